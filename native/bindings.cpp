// The one file that knows Python. Addresses come in as integers; kernels/native.py checks what they point to.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <vector>

#include "bindings.h"

namespace nb = nanobind;
using namespace octavo;

const Kernels* octavo::kernels = choose_kernels(nullptr);

namespace {

using Ints = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The step's metadata, checked against each other once, here.
struct Step {
  AttendArgs args{};
  std::vector<std::int64_t> starts, contexts, tables, offsets, slot_offsets;

  Step(int dtype, int format, int num_heads, int num_kv_heads, int head_dim, int v_head_dim, const Ints& query_starts,
       const Ints& context_lens, const Ints& table_starts, const Ints& block_offsets, const Ints& slots,
       int num_threads)
      : starts(copy(query_starts)),
        contexts(copy(context_lens)),
        tables(copy(table_starts)),
        offsets(copy(block_offsets)),
        slot_offsets(copy(slots)) {
    const std::size_t n = contexts.size();
    if (num_heads < 1 || num_kv_heads < 1 || num_heads % num_kv_heads != 0)
      throw std::invalid_argument("num_heads must be a multiple of num_kv_heads, both at least 1");
    if (head_dim < 1 || v_head_dim < 1 || head_dim > kMaxHeadDim || v_head_dim > kMaxHeadDim || num_threads < 1)
      throw std::invalid_argument("head_dim and v_head_dim must be 1 to 512, num_threads at least 1");
    if (n < 1 || starts.size() != n + 1 || tables.size() != n + 1 || slot_offsets.size() != n ||
        starts[0] != 0 || tables[0] != 0 || static_cast<std::size_t>(tables[n]) != offsets.size())
      throw std::invalid_argument("the step's arrays do not belong to the same number of sequences");
    for (std::size_t s = 0; s < n; ++s) {
      const std::int64_t tokens = starts[s + 1] - starts[s], blocks = tables[s + 1] - tables[s];
      if (tokens < 1 || contexts[s] < 0 || blocks < (contexts[s] + tokens) / kBlockSize)
        throw std::invalid_argument("a sequence has no tokens in this step, or fewer blocks than it fills");
    }
    args.dtype = static_cast<DType>(dtype);
    args.format = static_cast<Format>(format);
    args.num_seqs = static_cast<std::int64_t>(n);
    args.query_starts = starts.data();
    args.context_lens = contexts.data();
    args.table_starts = tables.data();
    args.block_offsets = offsets.data();
    args.slots = slot_offsets.data();
    args.num_heads = num_heads;
    args.num_kv_heads = num_kv_heads;
    args.head_dim = head_dim;
    args.v_head_dim = v_head_dim;
    args.num_threads = num_threads;
  }

  Step(const Step&) = delete;

  static std::vector<std::int64_t> copy(const Ints& x) { return {x.data(), x.data() + x.shape(0)}; }

  std::size_t workspace_bytes() const { return kernels->attend_workspace(args); }

  void attend(std::uintptr_t q, std::int64_t q_token, std::int64_t q_head, std::uintptr_t k, std::int64_t k_token,
              std::int64_t k_head, std::uintptr_t v, std::int64_t v_token, std::int64_t v_head, std::uintptr_t out,
              std::int64_t out_token, std::int64_t out_head, std::uintptr_t sealed, std::uintptr_t open,
              std::uintptr_t scratch, float scale, float softcap, std::int64_t window, std::uintptr_t sinks) const {
    AttendArgs a = args;
    a.softcap = softcap;
    a.window = window;
    a.sinks = at<const float>(sinks);
    a.q = {at<void>(q), q_token, q_head};
    a.k = {at<void>(k), k_token, k_head};
    a.v = {at<void>(v), v_token, v_head};
    a.out = {at<void>(out), out_token, out_head};
    a.sealed = at<char>(sealed);
    a.open = at<char>(open);
    a.scratch = at<char>(scratch);
    a.scale = scale;
    nb::gil_scoped_release release;
    kernels->attend(a);
  }
};

}  // namespace

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
  nb::class_<Step>(m, "Step")
      .def(nb::init<int, int, int, int, int, int, const Ints&, const Ints&, const Ints&, const Ints&, const Ints&, int>())
      .def_prop_ro("workspace_bytes", &Step::workspace_bytes)
      .def("attend", &Step::attend);
}
