#define OCTAVO_ISA avx2
#define OCTAVO_ISA_NAME "avx2"
#define OCTAVO_KERNELS kAvx2
#include "kernels.inc"
