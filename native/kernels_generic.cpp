#define OCTAVO_ISA generic
#define OCTAVO_ISA_NAME "generic"
#define OCTAVO_KERNELS kGeneric
#include "kernels.inc"
