// Rows of floats to blocks of GGUF's Q8_0 and Q4_1.
#include "numbers.h"
#include "packing.h"

namespace octavo {
namespace {

constexpr int kTrials = 12;

// To the nearest integer, ties to even, where |x| is below 2^22; std::nearbyint would be a call for each.
float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }

float clamp(float x, float most) { return x > 0.0f ? (x < most ? x : most) : 0.0f; }

// Codes of x by scale and minimum, and their squared error.
float encode(const float* x, float scale, float minimum, float* codes) {
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  float error = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    codes[i] = nearest(clamp((x[i] - minimum) * inverse, 15.0f));
    const float off = scale * codes[i] + minimum - x[i];
    error += off * off;
  }
  return error;
}

// The least squares line through (code, x); false when all codes are equal.
bool fit(const float* x, const float* codes, float* scale, float* minimum) {
  float c = 0.0f, cc = 0.0f, sum = 0.0f, cx = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    c += codes[i];
    cc += codes[i] * codes[i];
    sum += x[i];
    cx += codes[i] * x[i];
  }
  const float spread = kGroup * cc - c * c;
  if (!(spread > 0.0f)) return false;
  *scale = (kGroup * cx - c * sum) / spread;
  *minimum = (sum - *scale * c) / kGroup;
  return *scale > 0.0f;
}

void quantise_4(const float* x, unsigned char* out) {
  float low = x[0], high = x[0], poison = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
    poison += x[i] * 0.0f;  // NaN when any value is not finite
  }
  half best_scale = to_half((high - low) / 15.0f + poison), best_minimum = to_half(low);
  float codes[kGroup], best_codes[kGroup];
  float best = encode(x, from_half(best_scale), from_half(best_minimum), best_codes);
  for (int t = 0; t < kTrials && best > 0.0f; ++t) {
    // Codes by a somewhat smaller or larger scale, then the best line through them, then the codes of that line.
    float scale = (high - low) / (15.0f + 0.2f * float(t) - 1.4f), minimum = low;
    encode(x, scale, minimum, codes);
    if (!fit(x, codes, &scale, &minimum)) continue;
    const half s = to_half(scale), m = to_half(minimum);
    const float error = encode(x, from_half(s), from_half(m), codes);
    if (error < best) {
      best = error;
      best_scale = s;
      best_minimum = m;
      std::memcpy(best_codes, codes, sizeof codes);
    }
  }
  std::memcpy(out, &best_scale, 2);
  std::memcpy(out + 2, &best_minimum, 2);
  for (int i = 0; i < 16; ++i) out[4 + i] = static_cast<unsigned char>(int(best_codes[i]) | int(best_codes[i + 16]) << 4);
}

void quantise_8(const float* x, unsigned char* out) {
  float most = 0.0f, poison = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    most = std::fabs(x[i]) > most ? std::fabs(x[i]) : most;
    poison += x[i] * 0.0f;
  }
  const half scale = to_half(most / 127.0f + poison);
  const float step = from_half(scale), inverse = step > 0.0f ? 1.0f / step : 0.0f;
  std::memcpy(out, &scale, 2);
  for (int i = 0; i < kGroup; ++i) {
    const float code = x[i] * inverse;
    out[2 + i] = static_cast<unsigned char>(int(nearest(code > -127.0f ? (code < 127.0f ? code : 127.0f) : -127.0f)));
  }
}

}  // namespace

void quantise_rows(int type_id, const float* x, std::int64_t rows, std::int64_t num_inputs, char* out, int num_threads) {
  const std::int64_t groups = num_inputs / kGroup, bytes = row_bytes(type_id, kGroup);
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t g = 0; g < groups; ++g) {
      unsigned char* to = reinterpret_cast<unsigned char*>(out) + (r * groups + g) * bytes;
      if (type_id == 8) quantise_8(x + r * num_inputs + g * kGroup, to);
      else quantise_4(x + r * num_inputs + g * kGroup, to);
    }
}

}  // namespace octavo
