// Which sequences of a step have a history in common, so that its pages can be read once for all of them.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels.h"

namespace octavo {

// Built once a step, for all its layers. It looks at sequences that have one new token, and at whole partitions.
struct Sharing {
  std::vector<SharedRun> runs;
  std::vector<std::int64_t> order, starts;

  explicit Sharing(const AttendArgs& a) : starts(a.num_seqs + 1) {
    for (std::int64_t s = 0; s < a.num_seqs; ++s)
      if (a.query_starts[s + 1] - a.query_starts[s] == 1 && num_whole(a, s) > 0) order.push_back(s);
    // Sequences that share partitions become neighbours.
    std::sort(order.begin(), order.end(), [&](std::int64_t x, std::int64_t y) {
      const std::int64_t *p = table(a, x), *q = table(a, y);
      const std::int64_t blocks_x = num_whole(a, x) * kPartitionBlocks, blocks_y = num_whole(a, y) * kPartitionBlocks;
      return std::lexicographical_compare(p, p + blocks_x, q, q + blocks_y);
    });
    const std::int64_t n = static_cast<std::int64_t>(order.size());
    std::vector<std::int64_t> common(n + 1, 0);  // partitions that the i-th has in common with the one before it
    for (std::int64_t i = 1; i < n; ++i) common[i] = num_common(a, order[i - 1], order[i]);
    const std::int64_t most = std::min<std::int64_t>(kBlockSize, std::max(1, kMaxTileRows / (a.num_heads / a.num_kv_heads)));
    for (std::int64_t i = 0; i < n; ++i) {
      starts[order[i] + 1] = std::max(common[i], common[i + 1]);
      for (std::int64_t p = common[i]; p < common[i + 1]; ++p) {
        std::int64_t end = i + 1;
        while (end < n && common[end] > p) ++end;
        const std::int64_t parts = (end - i + most - 1) / most;
        for (std::int64_t k = 0; k < parts; ++k) {
          const std::int64_t first = i + (end - i) * k / parts;
          runs.push_back({first, i + (end - i) * (k + 1) / parts - first, p});
        }
      }
    }
    std::partial_sum(starts.begin(), starts.end(), starts.begin());
  }

 private:
  static const std::int64_t* table(const AttendArgs& a, std::int64_t s) { return a.block_offsets + a.table_starts[s]; }
  // Partitions of sealed blocks alone.
  static std::int64_t num_whole(const AttendArgs& a, std::int64_t s) { return a.context_lens[s] / kPartitionTokens; }
  static std::int64_t num_common(const AttendArgs& a, std::int64_t x, std::int64_t y) {
    const std::int64_t blocks = std::min(num_whole(a, x), num_whole(a, y)) * kPartitionBlocks;
    const std::int64_t* p = table(a, x);
    return (std::mismatch(p, p + blocks, table(a, y)).first - p) / kPartitionBlocks;
  }
};

}  // namespace octavo
