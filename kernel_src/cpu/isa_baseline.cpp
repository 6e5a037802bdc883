// On x86 only processors without AVX2 come here: three fifths of the code, for slower gradients and
// rare widths (1.5 and 5 times the time, read off the AVX2 level built so).
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O2")
#endif
#define SHORT_CONV_ISA baseline
#define SHORT_CONV_VECTOR_BYTES 16
#define SHORT_CONV_ISA_NAME "baseline"
#include "kernel_body.h"
