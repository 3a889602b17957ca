// A whole decoder in one call: what it is made of, and one step of it.
#pragma once

#include "kernels.h"

namespace octavo {

// Root-mean-square norm: x / sqrt(mean(x^2) + eps) * weight. None where `weight` is null.
struct Norm {
  const float* weight;
  float eps;
};

struct Projection {
  Matrix weights;
  const float* bias;  // may be null
};

constexpr int kMaxProjections = 3;

// x += factor * after_attention(out(attend(rotate(norm(qkv(before_attention(x)))))))
// x += factor * after_mlp(down(act(gate) * up)), gate and up of before_mlp(x)
struct DecoderLayer {
  Norm before_attention, after_attention, before_mlp, after_mlp;
  Norm query, key;     // over each head, or over all heads of a row
  bool norms_whole_rows;
  Projection qkv[kMaxProjections];  // their outputs side by side: queries, keys, values
  int num_qkv;
  Projection out;
  Projection gate_up[2];  // their outputs side by side: gate, up
  int num_gate_up;
  Projection down;
  int rotary;  // which table of cosines and sines
  float scale, softcap;
  std::int64_t window;
  const float* sinks;
};

// Cosines and sines of one rotary embedding: float32 [positions, dim / 2].
struct RotaryTable {
  const float *cos, *sin;
};

struct DecoderShape {
  std::int64_t hidden, intermediate, vocab;
  int rotary_dim;  // channels of a head that turn: channel i with channel i + rotary_dim / 2
  Activation activation;
  float residual_factor;
  float logit_factor, logit_softcap;  // logits times factor; then softcap * tanh(x / softcap) unless 0
};

// Where a step's time goes.
enum Phase : int { kPhaseNorms, kPhaseLinear, kPhaseRotary, kPhaseAttention, kPhaseActivation, kPhaseHead, kNumPhases };

struct DecoderArgs {
  DecoderShape shape;
  const DecoderLayer* layers;
  int num_layers;
  Norm final_norm;
  Projection head;
  AttendArgs attend;  // the step and its scratch; rows, pages and scoring are filled in for each layer
  char* const* sealed;  // [num_layers]
  char* const* open;    // [num_layers]
  const RotaryTable* rotary;
  const std::int64_t* positions;  // [rows]
  std::int64_t num_rows;
  float* x;  // [rows, hidden] embeddings; the residual stream afterwards
  const std::int64_t* wanted;  // [num_wanted] rows whose logits are computed
  std::int64_t num_wanted;
  float* logits;  // [num_wanted, vocab]
  char* workspace;  // decoder_workspace() bytes, 64-byte aligned
  double* phase_s;  // [kNumPhases] seconds are added to it; null to not look at the clock
};

}  // namespace octavo
