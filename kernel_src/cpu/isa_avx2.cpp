#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#define SHORT_CONV_ISA avx2
#define SHORT_CONV_VECTOR_BYTES 32
#define SHORT_CONV_ISA_NAME "avx2"
#include <immintrin.h>

#include "kernel_body.h"
#endif
