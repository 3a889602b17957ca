// Half-precision and bf16 numbers, one at a time.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace octavo {
namespace {

using half = std::uint16_t;

inline float from_half(half h) {
  const std::uint32_t sign = std::uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
  if (exponent == 0) {
    const float tiny = float(fraction) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -tiny : tiny;
  }
  const std::uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

// The nearest half float, ties to even; beyond the greatest one infinity, NaN for NaN.
inline half to_half(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const half sign = half(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return 0x7e00;
  if (bits >= 0x477ff000) return half(sign | 0x7c00);
  if (bits < 0x38800000) return half(sign | half(std::nearbyint(std::fabs(x) * 16777216.0f)));
  bits += 0xfff + (bits >> 13 & 1);
  return half(sign | (bits - 0x38000000) >> 13);
}

inline float from_bf16(std::uint16_t x) {
  const std::uint32_t bits = std::uint32_t(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline std::uint16_t to_bf16(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return std::uint16_t(bits >> 16 | 0x40);
  return std::uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace
}  // namespace octavo
