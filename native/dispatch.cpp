// Chooses the instruction set at run time.
#include <cstring>

#include "kernels.h"

namespace octavo {

const Kernels* choose_kernels(const char* name) {
  const bool any = name == nullptr || *name == '\0';
#ifdef OCTAVO_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
                    __builtin_cpu_supports("gfni");
  if (bf16 && (any || std::strcmp(name, "avx512bf16") == 0)) return &kAvx512Bf16;
  if (avx512 && (any || std::strcmp(name, "avx512") == 0)) return &kAvx512;
  if (avx2 && (any || std::strcmp(name, "avx2") == 0)) return &kAvx2;
#endif
  if (any || std::strcmp(name, "generic") == 0) return &kGeneric;
  return nullptr;
}

}  // namespace octavo
