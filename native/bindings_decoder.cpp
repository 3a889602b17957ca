// Python's view of a whole decoder. models/fused.py says what the addresses point to.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings_step.h"
#include "decoder.h"

namespace nb = nanobind;

namespace octavo {
namespace {

using NormAt = std::pair<std::uintptr_t, float>;        // weight, eps
using ProjectionAt = std::pair<Matrix, std::uintptr_t>;  // weights, bias

// A model's layers; the weights they point to are kept by the caller.
struct Decoder {
  DecoderArgs args{};
  std::vector<DecoderLayer> layers;
  int num_rotary = 0;

  Decoder(std::int64_t hidden, std::int64_t intermediate, std::int64_t vocab, int rotary_dim, int activation,
          float residual_factor, float logit_factor, float logit_softcap, const NormAt& final_norm,
          const ProjectionAt& head) {
    args.shape = {hidden, intermediate, vocab, rotary_dim, static_cast<Activation>(activation), residual_factor,
                  logit_factor, logit_softcap};
    args.final_norm = norm(final_norm);
    args.head = projection(head, hidden, vocab);
  }

  static Norm norm(const NormAt& n) { return {at<const float>(n.first), n.second}; }

  static Projection projection(const ProjectionAt& p, std::int64_t num_inputs, std::int64_t num_outputs) {
    if (p.first.num_inputs != num_inputs || (num_outputs != 0 && p.first.num_outputs != num_outputs))
      throw std::invalid_argument("a projection has another size than the decoder");
    return {p.first, at<const float>(p.second)};
  }

  // Projections whose outputs lie side by side and make a row of `width`.
  static int side_by_side(const std::vector<ProjectionAt>& from, std::int64_t num_inputs, int most, Projection* to) {
    if (from.empty() || from.size() > static_cast<std::size_t>(most))
      throw std::invalid_argument("too many projections side by side, or none");
    for (std::size_t i = 0; i < from.size(); ++i) to[i] = projection(from[i], num_inputs, 0);
    return static_cast<int>(from.size());
  }

  void add_layer(const std::vector<NormAt>& norms, bool whole_rows, const std::vector<ProjectionAt>& qkv,
                 const ProjectionAt& out, const std::vector<ProjectionAt>& gate_up, const ProjectionAt& down, int rotary,
                 float scale, float softcap, std::int64_t window) {
    const std::int64_t hidden = args.shape.hidden, intermediate = args.shape.intermediate;
    if (norms.size() != 6) throw std::invalid_argument("a layer has six norms, some of which may be none");
    DecoderLayer layer{};
    layer.before_attention = norm(norms[0]);
    layer.after_attention = norm(norms[1]);
    layer.before_mlp = norm(norms[2]);
    layer.after_mlp = norm(norms[3]);
    layer.query = norm(norms[4]);
    layer.key = norm(norms[5]);
    layer.norms_whole_rows = whole_rows;
    layer.num_qkv = side_by_side(qkv, hidden, kMaxProjections, layer.qkv);
    layer.out = projection(out, out.first.num_inputs, hidden);
    layer.num_gate_up = side_by_side(gate_up, hidden, 2, layer.gate_up);
    layer.down = projection(down, intermediate, hidden);
    layer.rotary = rotary;
    layer.scale = scale;
    layer.softcap = softcap;
    layer.window = window;
    if (outputs(layer.gate_up, layer.num_gate_up) != 2 * intermediate)
      throw std::invalid_argument("gate and up do not have the width of down");
    if (rotary + 1 > num_rotary) num_rotary = rotary + 1;
    layers.push_back(layer);
  }

  static std::int64_t outputs(const Projection* p, int count) {
    std::int64_t sum = 0;
    for (int i = 0; i < count; ++i) sum += p[i].weights.num_outputs;
    return sum;
  }

  DecoderArgs step_args(const Step& step, std::int64_t num_rows, std::int64_t num_wanted) const {
    DecoderArgs a = args;
    a.layers = layers.data();
    a.num_layers = static_cast<int>(layers.size());
    a.attend = step.args;
    a.num_rows = num_rows;
    a.num_wanted = num_wanted;
    return a;
  }

  std::size_t workspace_bytes(const Step& step, std::int64_t num_rows, std::int64_t num_wanted) const {
    return kernels->decoder_workspace(step_args(step, num_rows, num_wanted));
  }

  void decode(const Step& step, const Ints& sealed, const Ints& open, const Ints& rotary, const Ints& positions,
              std::uintptr_t x, const Ints& wanted, std::uintptr_t logits, std::uintptr_t workspace,
              std::uintptr_t attend_scratch, std::uintptr_t phase_s) const {
    const std::int64_t num_rows = step.args.query_starts[step.args.num_seqs];
    DecoderArgs a = step_args(step, num_rows, static_cast<std::int64_t>(wanted.shape(0)));
    const AttendArgs& t = a.attend;
    const std::int64_t width = std::int64_t(t.num_heads + t.num_kv_heads) * t.head_dim + std::int64_t(t.num_kv_heads) * t.v_head_dim;
    if (sealed.shape(0) != layers.size() || open.shape(0) != layers.size())
      throw std::invalid_argument("the pages are those of another number of layers");
    if (positions.shape(0) != static_cast<std::size_t>(num_rows) || rotary.shape(0) != 2 * static_cast<std::size_t>(num_rotary))
      throw std::invalid_argument("positions or rotary tables do not belong to the step");
    for (const DecoderLayer& layer : layers)
      if (outputs(layer.qkv, layer.num_qkv) != width || layer.out.weights.num_inputs != std::int64_t(t.num_heads) * t.v_head_dim)
        throw std::invalid_argument("a layer's queries, keys and values have another width than the step's");
    for (std::size_t i = 0; i < wanted.shape(0); ++i)
      if (wanted.data()[i] < 0 || wanted.data()[i] >= num_rows) throw std::invalid_argument("a wanted row is not in the step");
    std::vector<RotaryTable> tables;
    for (int i = 0; i < num_rotary; ++i)
      tables.push_back({at<const float>(rotary.data()[2 * i]), at<const float>(rotary.data()[2 * i + 1])});
    a.sealed = reinterpret_cast<char* const*>(sealed.data());
    a.open = reinterpret_cast<char* const*>(open.data());
    a.rotary = tables.data();
    a.positions = positions.data();
    a.x = at<float>(x);
    a.wanted = wanted.data();
    a.logits = at<float>(logits);
    a.workspace = at<char>(workspace);
    a.attend.scratch = at<char>(attend_scratch);
    a.phase_s = at<double>(phase_s);
    nb::gil_scoped_release release;
    kernels->decode(a);
  }
};

}  // namespace

void bind_decoder(nb::module_& m) {
  nb::class_<Decoder>(m, "Decoder", "A model's layers; whoever makes it keeps the weights alive.")
      .def(nb::init<std::int64_t, std::int64_t, std::int64_t, int, int, float, float, float, const NormAt&, const ProjectionAt&>())
      .def("add_layer", &Decoder::add_layer)
      .def("workspace_bytes", &Decoder::workspace_bytes)
      .def("decode", &Decoder::decode);
}

}  // namespace octavo
