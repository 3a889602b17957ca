// What Python sees; the other bindings*.cpp have more of it. Addresses come in as integers; kernels/native.py checks what they point to.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <omp.h>

#include <stdexcept>

#include "bindings_step.h"

namespace nb = nanobind;
using namespace octavo;

const Kernels* octavo::kernels = choose_kernels(nullptr);

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a model that lives until the process ends is no leak
  m.doc() = "Octavo's native kernels.";
  m.attr("BLOCK_SIZE") = kBlockSize;
  m.attr("PARTITION_BLOCKS") = kPartitionBlocks;
  m.def("isa", [] { return std::string(kernels->name); }, "The instruction set in use.");
  m.def(
      "set_isa",
      [](const std::string& name) {
        const Kernels* chosen = choose_kernels(name.c_str());
        if (chosen == nullptr) throw std::invalid_argument("this CPU has no instruction set named '" + name + "'");
        kernels = chosen;
      },
      nb::arg("name"), "Chooses the instruction set: avx512bf16, avx512, avx2, generic, or '' for the best.");
  m.def(
      "head_bytes",
      [](int format, int head_dim, int v_head_dim) {
        return kernels->head_bytes(static_cast<Format>(format), head_dim, v_head_dim);
      },
      nb::arg("format"), nb::arg("head_dim"), nb::arg("v_head_dim"), "Bytes of one key-value head in a sealed page.");
  m.def(
      "read_pages",
      [](std::uintptr_t base, const Ints& offsets, std::int64_t page_bytes, int num_threads) {
        nb::gil_scoped_release release;
        return kernels->read_pages(at<const char>(base), offsets.data(), static_cast<std::int64_t>(offsets.shape(0)),
                                   page_bytes, num_threads);
      },
      nb::arg("base"), nb::arg("offsets"), nb::arg("page_bytes"), nb::arg("num_threads"),
      "Reads pages and returns a sum of them: the speed that memory allows.");
  m.def(
      "activate",
      [](int kind, int dtype, std::uintptr_t in, std::uintptr_t out, std::int64_t count, int num_threads) {
        nb::gil_scoped_release release;
        kernels->activate(static_cast<Activation>(kind), static_cast<DType>(dtype), at<const void>(in), at<void>(out), count,
                          num_threads);
      },
      nb::arg("kind"), nb::arg("dtype"), nb::arg("input"), nb::arg("output"), nb::arg("count"), nb::arg("num_threads"));
  bind_linear(m);
  bind_decoder(m);
  m.def(
      "release_threads", [] { omp_pause_resource_all(omp_pause_soft); },
      "Ends the threads that wait for the calling thread's next parallel work.");
  nb::class_<Step>(m, "Step")
      .def(nb::init<int, int, int, int, int, int, const Ints&, const Ints&, const Ints&, const Ints&, const Ints&, int>())
      .def_prop_ro("workspace_bytes", &Step::workspace_bytes)
      .def_ro("bytes_read", &Step::bytes_read)
      .def("attend", &Step::attend);
}
