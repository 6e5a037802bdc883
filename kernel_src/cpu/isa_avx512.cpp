#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")
#define SHORT_CONV_ISA avx512
#define SHORT_CONV_ISA_NAME "avx512"
#include "kernel_body.h"
#endif
