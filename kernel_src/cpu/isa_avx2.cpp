#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define SHORT_CONV_ISA avx2
#define SHORT_CONV_ISA_NAME "avx2"
#include "kernel_body.h"
#endif
