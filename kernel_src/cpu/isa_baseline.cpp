// On x86 only processors without AVX2 come here: a third of the code for a third of the speed.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O2")
#endif
#define SHORT_CONV_ISA baseline
#define SHORT_CONV_VECTOR_BYTES 16
#define SHORT_CONV_ISA_NAME "baseline"
#include "kernel_body.h"
