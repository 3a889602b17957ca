// Which sequences of a step have a history in common, so that its pages can be read once for all of them.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels.h"

namespace octavo {

// Built once a step, for all its layers. It looks at sequences that have one new token.
struct Sharing {
  static constexpr std::int64_t kLeastBlocks = 4;  // in a partition: a few pages are not worth the threads' balance

  std::vector<SharedRun> runs;
  std::vector<std::int64_t> order, common, starts;

  explicit Sharing(const AttendArgs& a) : starts(a.num_seqs + 1) {
    for (std::int64_t s = 0; s < a.num_seqs; ++s)
      if (a.query_starts[s + 1] - a.query_starts[s] == 1 && num_sealed(a, s) >= kLeastBlocks) order.push_back(s);
    // Sequences that begin alike become neighbours.
    std::sort(order.begin(), order.end(), [&](std::int64_t x, std::int64_t y) {
      return std::lexicographical_compare(table(a, x), table(a, x) + num_sealed(a, x), table(a, y),
                                          table(a, y) + num_sealed(a, y));
    });
    const std::int64_t n = static_cast<std::int64_t>(order.size());
    common.assign(n + 1, 0);
    for (std::int64_t i = 1; i < n; ++i) common[i] = num_common(a, order[i - 1], order[i]);
    // Partitions in which the i-th goes together with the one before it.
    const auto num_joint = [&](std::int64_t i) { return (common[i] + kPartitionBlocks - kLeastBlocks) / kPartitionBlocks; };
    const std::int64_t most = std::min<std::int64_t>(kBlockSize, std::max(1, kMaxTileRows / (a.num_heads / a.num_kv_heads)));
    for (std::int64_t i = 0; i < n; ++i) {
      starts[order[i] + 1] = std::max(num_joint(i), num_joint(i + 1));
      for (std::int64_t p = num_joint(i); p < num_joint(i + 1); ++p) {
        std::int64_t end = i + 1;
        while (end < n && num_joint(end) > p) ++end;
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
  static std::int64_t num_sealed(const AttendArgs& a, std::int64_t s) { return a.context_lens[s] / kBlockSize; }
  static std::int64_t num_common(const AttendArgs& a, std::int64_t x, std::int64_t y) {
    const std::int64_t *p = table(a, x), *end = p + std::min(num_sealed(a, x), num_sealed(a, y));
    return std::mismatch(p, end, table(a, y)).first - p;
  }
};

}  // namespace octavo
