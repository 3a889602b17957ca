// One step, as Python describes it.
#pragma once

#include <nanobind/ndarray.h>

#include <optional>
#include <stdexcept>
#include <vector>

#include "bindings.h"
#include "sharing.h"

namespace octavo {

using Ints = nanobind::ndarray<const std::int64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

// The step's metadata, checked against each other once, here.
struct Step {
  AttendArgs args{};
  std::vector<std::int64_t> starts, contexts, tables, offsets, slot_offsets;
  std::optional<Sharing> sharing;
  std::int64_t bytes_read = 0;  // of sealed pages, so far

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
    args.bytes_read = &bytes_read;
    if (n < 2) return;
    sharing.emplace(args);
    args.runs = sharing->runs.data();
    args.num_runs = static_cast<std::int64_t>(sharing->runs.size());
    args.order = sharing->order.data();
    args.common = sharing->common.data();
    args.shared_starts = sharing->starts.data();
  }

  Step(const Step&) = delete;

  static std::vector<std::int64_t> copy(const Ints& x) { return {x.data(), x.data() + x.shape(0)}; }

  std::size_t workspace_bytes() const { return kernels->attend_workspace(args); }

  // `sealed` and `open` are addresses, one for each layer: the same rows attend to the pages of each in turn, and `out`
  // is the last one's. One team of threads does several layers.
  void attend(std::uintptr_t q, std::int64_t q_token, std::int64_t q_head, std::uintptr_t k, std::int64_t k_token,
              std::int64_t k_head, std::uintptr_t v, std::int64_t v_token, std::int64_t v_head, std::uintptr_t out,
              std::int64_t out_token, std::int64_t out_head, const Ints& sealed, const Ints& open,
              std::uintptr_t scratch, float scale, float softcap, std::int64_t window, std::uintptr_t sinks) const {
    AttendArgs a = args;
    a.softcap = softcap;
    a.window = window;
    a.sinks = at<const float>(sinks);
    a.q = {at<void>(q), q_token, q_head};
    a.k = {at<void>(k), k_token, k_head};
    a.v = {at<void>(v), v_token, v_head};
    a.out = {at<void>(out), out_token, out_head};
    a.scratch = at<char>(scratch);
    a.scale = scale;
    const std::int64_t num_layers = static_cast<std::int64_t>(sealed.shape(0));
    if (num_layers < 1 || static_cast<std::int64_t>(open.shape(0)) != num_layers)
      throw std::invalid_argument("there must be as many open pages as sealed ones, and one layer at least");
    const std::int64_t *sealed_at = sealed.data(), *open_at = open.data();
    const auto of_layer = [=](std::int64_t layer) {
      AttendArgs b = a;
      b.sealed = at<char>(static_cast<std::uintptr_t>(sealed_at[layer]));
      b.open = at<char>(static_cast<std::uintptr_t>(open_at[layer]));
      return b;
    };
    nanobind::gil_scoped_release release;
    if (num_layers == 1) return kernels->attend(of_layer(0));
#pragma omp parallel num_threads(a.num_threads)
    for (std::int64_t layer = 0; layer < num_layers; ++layer) kernels->attend_in_team(of_layer(layer));
  }
};

}  // namespace octavo
