#define OCTAVO_ISA avx512bf16
#define OCTAVO_ISA_NAME "avx512bf16"
#define OCTAVO_KERNELS kAvx512Bf16
#define OCTAVO_PAIRS  // products of bf16 pairs
#include "kernels.inc"
