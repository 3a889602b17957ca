// Packing weights: GGUF blocks, quantised rows and dense rows into the tiles of packing.h, and back.
// Compiled without fused multiply-adds: unpacked values are those of the gguf package, bit by bit.
#include "packing.h"

#include <cstring>

#include "numbers.h"

namespace octavo {
namespace {

using byte = std::uint8_t;

enum TypeId { kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14, kBF16 = 30 };

struct Type {
  int id;
  int block_inputs, block_bytes;
  Packing packing;  // of coded types
  bool stepped, has_minimum;
};
constexpr Type kTypes[] = {
    {kF32, 1, 4, Packing::kFp32, false, false},      {kF16, 1, 2, Packing::kFp32, false, false},
    {kBF16, 1, 2, Packing::kFp32, false, false},     {kQ4_0, 32, 18, Packing::kInt4, false, false},
    {kQ4_1, 32, 20, Packing::kInt4, false, true},    {kQ5_0, 32, 22, Packing::kInt5, false, false},
    {kQ5_1, 32, 24, Packing::kInt5, false, true},    {kQ8_0, 32, 34, Packing::kInt8, false, false},
    {kQ4_K, 256, 144, Packing::kInt4, true, true},   {kQ5_K, 256, 176, Packing::kInt5, true, true},
    {kQ6_K, 256, 210, Packing::kInt6, true, false},
};

const Type* find_type(int id) {
  for (const Type& type : kTypes)
    if (type.id == id) return &type;
  return nullptr;
}

// One block of a coded type: codes from 0 on, scale and minimum as halves, and the steps of stepped types (two for
// each group; the second is that of the minimum, or of the second half of the group).
struct Block {
  half scale, minimum;
  byte steps[2 * kSuperGroups];
  byte codes[kGroup * kSuperGroups];
};

half half_at(const byte* p) {
  half h;
  std::memcpy(&h, p, 2);
  return h;
}

// 16 bytes with 32 codes of four bits; bit i of `high` goes on top of code i.
void read_nibbles(const byte* p, std::uint32_t high, byte* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = byte((p[i] & 15) | (high >> i & 1) << 4);
    codes[i + 16] = byte(p[i] >> 4 | (high >> (i + 16) & 1) << 4);
  }
}

void read_simple(int id, const byte* p, Block& b) {
  b.scale = half_at(p);
  p += 2;
  b.minimum = 0;
  if (id == kQ4_1 || id == kQ5_1) {
    b.minimum = half_at(p);
    p += 2;
  }
  if (id == kQ8_0) {
    for (int i = 0; i < kGroup; ++i) b.codes[i] = byte(p[i] + 128);
    return;
  }
  std::uint32_t high = 0;
  if (id == kQ5_0 || id == kQ5_1) {
    std::memcpy(&high, p, 4);
    p += 4;
  }
  read_nibbles(p, high, b.codes);
}

// Q4_K and Q5_K: 6-bit steps of scale and minimum in 12 bytes; two groups share 32 bytes.
void read_k_with_minimum(int id, const byte* p, Block& b) {
  b.scale = half_at(p);
  b.minimum = half_at(p + 2);
  const byte* s = p + 4;
  for (int g = 0; g < kSuperGroups; ++g) {
    b.steps[2 * g] = g < 4 ? s[g] & 63 : byte((s[g + 4] & 15) | s[g - 4] >> 6 << 4);
    b.steps[2 * g + 1] = g < 4 ? s[g + 4] & 63 : byte(s[g + 4] >> 4 | s[g] >> 6 << 4);
  }
  const byte* high = p + 16;
  const byte* low = id == kQ5_K ? high + 32 : high;
  for (int g = 0; g < kSuperGroups; ++g)
    for (int i = 0; i < kGroup; ++i) {
      byte code = low[g / 2 * 32 + i] >> (g % 2 * 4) & 15;
      if (id == kQ5_K) code = byte(code | (high[i] >> g & 1) << 4);
      b.codes[g * kGroup + i] = code;
    }
}

// Q6_K: each half of 128 has 64 bytes of low and 32 of high bits; a signed step for every 16.
void read_q6_k(const byte* p, Block& b) {
  const byte *low = p, *high = p + 128;
  for (int i = 0; i < 256; ++i) {
    const int part = i / 128, in = i % 128;
    const byte nibble = low[part * 64 + in % 64] >> (in / 64 * 4) & 15;
    b.codes[i] = byte(nibble | (high[part * 32 + in % 32] >> (in / 32 * 2) & 3) << 4);
  }
  std::memcpy(b.steps, p + 192, 16);
  b.scale = half_at(p + 208);
  b.minimum = 0;
}

void read_block(int id, const byte* p, Block& b) {
  if (id == kQ6_K) read_q6_k(p, b);
  else if (id == kQ4_K || id == kQ5_K) read_k_with_minimum(id, p, b);
  else read_simple(id, p, b);
}

// The values of group g of a block. The order of roundings is that of the gguf package.
void group_values(const Type& t, const Block& b, int g, float* out) {
  const byte* codes = b.codes + g * kGroup;
  const int zero = 1 << (code_bits(t.packing) - 1);
  const float scale = from_half(b.scale), minimum = from_half(b.minimum);
  if (t.stepped && t.has_minimum) {
    const float step = scale * float(b.steps[2 * g]), low = minimum * float(b.steps[2 * g + 1]);
    for (int i = 0; i < kGroup; ++i) out[i] = step * float(codes[i]) - low;
  } else if (t.stepped) {
    for (int i = 0; i < kGroup; ++i)
      out[i] = scale * float(static_cast<std::int8_t>(b.steps[2 * g + i / 16])) * float(codes[i] - zero);
  } else if (t.has_minimum) {
    for (int i = 0; i < kGroup; ++i) out[i] = scale * float(codes[i]) + minimum;
  } else {
    for (int i = 0; i < kGroup; ++i) out[i] = scale * float(codes[i] - zero);
  }
}

// Where the parts of one group of one output lie in a tile.
struct Place {
  byte *scale, *minimum, *steps, *codes, *high;

  Place(const Matrix& m, byte* tile, int output, std::int64_t group) {
    const int bits = code_bits(m.packing);
    byte* p = tile;
    steps = nullptr;
    if (m.stepped) {
      p += group / kSuperGroups * super_bytes(bits, m.has_minimum);
      scale = p + 2 * output;
      minimum = scale + 2 * kTile;
      p += kTile * (m.has_minimum ? 4 : 2) + group % kSuperGroups * group_bytes(bits, true, m.has_minimum);
      steps = p + output;
      p += 2 * kTile;
    } else {
      p += group * group_bytes(bits, false, m.has_minimum);
      scale = p + 2 * output;
      minimum = scale + 2 * kTile;
      p += kTile * (m.has_minimum ? 4 : 2);
    }
    codes = p + 4 * output;
    high = codes + 16 * kTile;
  }
};

void write_group(const Matrix& m, const Place& at, const Block& b, int g) {
  std::memcpy(at.scale, &b.scale, 2);
  if (m.has_minimum) {
    const half minimum = m.stepped ? b.minimum ^ 0x8000 : b.minimum;
    std::memcpy(at.minimum, &minimum, 2);
  }
  if (m.stepped) {
    at.steps[0] = b.steps[2 * g];
    at.steps[kTile] = b.steps[2 * g + 1];
  }
  const byte* codes = b.codes + g * kGroup;
  if (m.packing == Packing::kInt8) {
    for (int v = 0; v < 8; ++v) std::memcpy(at.codes + v * 4 * kTile, codes + 4 * v, 4);
    return;
  }
  for (int v = 0; v < 4; ++v)
    for (int i = 0; i < 4; ++i)
      at.codes[v * 4 * kTile + i] = byte((codes[4 * v + i] & 15) | (codes[16 + 4 * v + i] & 15) << 4);
  const int extra = code_bits(m.packing) - 4, per_byte = extra ? 8 / extra : 8;
  for (int q = 0; q * per_byte < 8 && extra; ++q)
    for (int i = 0; i < 4; ++i) {
      int bits = 0;
      for (int s = 0; s < per_byte; ++s) bits |= codes[4 * (q * per_byte + s) + i] >> 4 << (s * extra);
      at.high[q * 4 * kTile + i] = byte(bits);
    }
}

void read_group(const Matrix& m, const Place& at, Block& b) {
  b.scale = half_at(at.scale);
  b.minimum = m.has_minimum ? half_at(at.minimum) : half(0);
  if (m.stepped) {
    b.minimum ^= 0x8000;
    b.steps[0] = at.steps[0];
    b.steps[1] = at.steps[kTile];
  }
  const int extra = code_bits(m.packing) - 4, per_byte = extra ? 8 / extra : 8;
  for (int v = 0; v < 8; ++v)
    for (int i = 0; i < 4; ++i) {
      byte& code = b.codes[4 * v + i];
      if (m.packing == Packing::kInt8) {
        code = at.codes[v * 4 * kTile + i];
        continue;
      }
      code = at.codes[v % 4 * 4 * kTile + i] >> (v / 4 * 4) & 15;
      if (extra)
        code = byte(code | (at.high[v / per_byte * 4 * kTile + i] >> (v % per_byte * extra) & ((1 << extra) - 1)) << 4);
    }
}

void dense_values(int id, const byte* p, std::int64_t count, float* out) {
  if (id == kF32) {
    std::memcpy(out, p, count * 4);
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) out[i] = id == kF16 ? from_half(half_at(p + 2 * i)) : from_bf16(half_at(p + 2 * i));
}

// `rows(n, from, count, to)` gives inputs from .. from + count - 1 of output n.
template <typename Rows>
void pack_dense_tile(const Matrix& m, std::int64_t tile, byte* to, const Rows& rows) {
  std::memset(to, 0, tile_bytes(m));
  float chunk[256];
  for (int o = 0; o < kTile && tile * kTile + o < m.num_outputs; ++o)
    for (std::int64_t from = 0; from < m.num_inputs; from += 256) {
      const std::int64_t count = m.num_inputs - from < 256 ? m.num_inputs - from : 256;
      rows(tile * kTile + o, from, count, chunk);
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t k = from + i;
        if (m.packing == Packing::kFp32) {
          std::memcpy(to + (k * kTile + o) * 4, &chunk[i], 4);
        } else {
          const std::uint16_t x = to_bf16(chunk[i]);
          std::memcpy(to + ((k / 2 * kTile + o) * 2 + k % 2) * 2, &x, 2);
        }
      }
    }
}

byte* tile_at(const Matrix& m, std::int64_t tile) {
  return reinterpret_cast<byte*>(const_cast<char*>(m.data)) + tile * tile_bytes(m);
}

}  // namespace

bool packing_of(int type_id, Matrix& m) {
  const Type* t = find_type(type_id);
  if (t == nullptr) return false;
  m.stepped = t->stepped;
  m.has_minimum = t->has_minimum;
  if (t->block_inputs > 1) m.packing = t->packing;
  return true;
}

std::int64_t row_bytes(int type_id, std::int64_t num_inputs) {
  const Type* t = find_type(type_id);
  return t == nullptr ? 0 : num_inputs / t->block_inputs * t->block_bytes;
}

std::int64_t matrix_bytes(const Matrix& m) { return num_tiles(m) * tile_bytes(m); }

void pack_gguf(int type_id, const char* rows, const std::int64_t* order, const Matrix& m, int num_threads) {
  const Type& t = *find_type(type_id);
  const std::int64_t stride = row_bytes(type_id, m.num_inputs);
  const auto row = [&](std::int64_t n) { return reinterpret_cast<const byte*>(rows) + (order ? order[n] : n) * stride; };
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (std::int64_t tile = 0; tile < num_tiles(m); ++tile) {
    byte* to = tile_at(m, tile);
    if (t.block_inputs == 1) {
      pack_dense_tile(m, tile, to, [&](std::int64_t n, std::int64_t from, std::int64_t count, float* out) {
        dense_values(type_id, row(n) + from * t.block_bytes, count, out);
      });
      continue;
    }
    const int groups = t.block_inputs / kGroup;
    Block b;
    for (int o = 0; o < kTile; ++o) {
      const std::int64_t n = tile * kTile + o;
      if (n >= m.num_outputs) std::memset(&b, 0, sizeof b);
      for (std::int64_t i = 0; i < m.num_inputs / t.block_inputs; ++i) {
        if (n < m.num_outputs) read_block(type_id, row(n) + i * t.block_bytes, b);
        for (int g = 0; g < groups; ++g) write_group(m, Place(m, to, o, i * groups + g), b, g);
      }
    }
  }
}

void pack_dense(DType dtype, const void* rows, const Matrix& m, int num_threads) {
  pack_gguf(dtype == DType::kFp32 ? kF32 : kBF16, static_cast<const char*>(rows), nullptr, m, num_threads);
}

void unpack_rows(int type_id, const char* rows, const std::int64_t* row_ids, std::int64_t count, std::int64_t num_inputs,
                 float* out) {
  const Type& t = *find_type(type_id);
  const std::int64_t stride = row_bytes(type_id, num_inputs);
  Block b;
  for (std::int64_t r = 0; r < count; ++r, out += num_inputs) {
    const byte* row = reinterpret_cast<const byte*>(rows) + row_ids[r] * stride;
    if (t.block_inputs == 1) {
      dense_values(type_id, row, num_inputs, out);
      continue;
    }
    for (std::int64_t i = 0; i < num_inputs / t.block_inputs; ++i) {
      read_block(type_id, row + i * t.block_bytes, b);
      for (int g = 0; g < t.block_inputs / kGroup; ++g) group_values(t, b, g, out + i * t.block_inputs + g * kGroup);
    }
  }
}

void unpack_matrix(const Matrix& m, const std::int64_t* row_ids, std::int64_t count, float* out) {
  const Type t{-1, 0, 0, m.packing, m.stepped, m.has_minimum};
  Block b;
  for (std::int64_t r = 0; r < count; ++r, out += m.num_inputs) {
    const std::int64_t tile = row_ids[r] / kTile;
    const int o = int(row_ids[r] % kTile);
    byte* at = tile_at(m, tile);
    if (m.packing == Packing::kFp32) {
      for (std::int64_t k = 0; k < m.num_inputs; ++k) std::memcpy(out + k, at + (k * kTile + o) * 4, 4);
    } else if (m.packing == Packing::kBf16) {
      for (std::int64_t k = 0; k < m.num_inputs; ++k) out[k] = from_bf16(half_at(at + ((k / 2 * kTile + o) * 2 + k % 2) * 2));
    } else {
      for (std::int64_t g = 0; g < m.num_inputs / kGroup; ++g) {
        read_group(m, Place(m, at, o, g), b);
        group_values(t, b, 0, out + g * kGroup);
      }
    }
  }
}

}  // namespace octavo
