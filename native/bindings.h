// What the files that know Python share.
#pragma once

#include <nanobind/nanobind.h>

#include "kernels.h"

namespace octavo {

extern const Kernels* kernels;  // those in use

template <typename T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void bind_linear(nanobind::module_& m);
void bind_decoder(nanobind::module_& m);

}  // namespace octavo
