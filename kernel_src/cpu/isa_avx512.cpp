#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,prefer-vector-width=512")
#define SHORT_CONV_ISA avx512
#define SHORT_CONV_VECTOR_BYTES 64
#define SHORT_CONV_ISA_NAME "avx512"
// GCC warns about the deliberately undefined operands of its own AVX-512 intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

#include "kernel_body.h"
#endif
