#define OCTAVO_ISA avx512
#define OCTAVO_ISA_NAME "avx512"
#define OCTAVO_KERNELS kAvx512
#include "kernels.inc"
