// Where packed weights lie.
//
// Outputs come in tiles of 32, the last one padded with zeros. A tile is contiguous and holds:
// - dense: for each input (fp32), or pair of inputs (bf16), 32 numbers or pairs.
// - coded: for each group of 32 inputs 32 half-precision scales, then 32 minima if there are any, then the codes.
// - coded and stepped: for each 8 groups 32 half-precision scales, then 32 negative minima if there are any; then for each
//   group 32 steps of the scale and 32 of the minimum, or where there are no minima 32 steps for the first 16 inputs and
//   32 for the others; then the codes.
// Codes of a group are vectors of 32 x 4 bytes: byte 4 o + i of vector v belongs to output o and input 4 v + i. Eight
// bits: eight such vectors. Fewer: four vectors, v in the low and v + 4 in the high half of each byte; then what is
// above four bits, for 6 bits two vectors with bits 2 s of vector q belonging to v = 4 q + s, for 5 bits one with bit v.
#pragma once

#include "kernels.h"

namespace octavo {
namespace {  // of each instruction set's own: a shared inline function could be compiled for another one

constexpr int kTile = 32;        // outputs
constexpr int kGroup = 32;       // inputs with one scale
constexpr int kSuperGroups = 8;  // groups with one half-precision scale where scales are stepped

constexpr int code_bits(Packing packing) {
  switch (packing) {
    case Packing::kInt8: return 8;
    case Packing::kInt6: return 6;
    case Packing::kInt5: return 5;
    case Packing::kInt4: return 4;
    default: return 0;
  }
}

constexpr std::int64_t group_bytes(int bits, bool stepped, bool has_minimum) {
  return kTile * ((stepped ? 2 : has_minimum ? 4 : 2) + kGroup * bits / 8);
}

constexpr std::int64_t super_bytes(int bits, bool has_minimum) {
  return kTile * (has_minimum ? 4 : 2) + kSuperGroups * group_bytes(bits, true, has_minimum);
}

inline std::int64_t tile_bytes(const Matrix& m) {
  const int bits = code_bits(m.packing);
  if (m.packing == Packing::kFp32) return m.num_inputs * kTile * 4;
  if (m.packing == Packing::kBf16) return (m.num_inputs + 1) / 2 * kTile * 4;
  if (m.stepped) return m.num_inputs / (kGroup * kSuperGroups) * super_bytes(bits, m.has_minimum);
  return m.num_inputs / kGroup * group_bytes(bits, false, m.has_minimum);
}

inline std::int64_t num_tiles(const Matrix& m) { return (m.num_outputs + kTile - 1) / kTile; }

}  // namespace
}  // namespace octavo
