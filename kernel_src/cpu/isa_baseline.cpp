#define SHORT_CONV_ISA baseline
#define SHORT_CONV_VECTOR_BYTES 16
#define SHORT_CONV_ISA_NAME "baseline"
#include "kernel_body.h"
