// The native kernels' one interface: plain structs of addresses and counts. No Python, no torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

constexpr int kBlockSize = 32;        // tokens in a block
constexpr int kPartitionBlocks = 16;  // blocks in an attention partition
constexpr int kPartitionTokens = kBlockSize * kPartitionBlocks;

enum class DType : int { kBf16 = 0, kFp32 = 1 };
enum class Activation : int { kSilu = 0, kGeluTanh = 1, kGeluErf = 2, kQuickGelu = 3 };

// Rows of one tensor: element (token t, head h, i) lies at data + (t * token_stride + h * head_stride + i).
struct Rows {
  void* data;
  std::int64_t token_stride;
  std::int64_t head_stride;
};

// One layer of one step. A page is, in elements: keys [num_kv_heads][head_dim][32] (channel-major), then
// values [num_kv_heads][32][v_head_dim].
struct AttendArgs {
  DType dtype;
  Rows q, k, v, out;
  char* sealed;   // this layer's sealed pages; block_offsets are bytes from here
  char* open;     // this layer's open pages; slot offsets are bytes from here
  char* scratch;  // workspace of at least attend_workspace() bytes, 64-byte aligned
  std::int64_t num_seqs;
  const std::int64_t* query_starts;   // [num_seqs + 1] rows of q of each sequence
  const std::int64_t* context_lens;   // [num_seqs] tokens computed before this step
  const std::int64_t* table_starts;   // [num_seqs + 1] into block_offsets
  const std::int64_t* block_offsets;  // sealed pages, those that this step fills included
  // [num_seqs] open page of the sequence: the rows of the block in which the step starts, and afterwards those
  // of the block in which it ends.
  const std::int64_t* slots;
  int num_heads, num_kv_heads, head_dim, v_head_dim;
  float scale;
  int num_threads;
};

struct Kernels {
  const char* name;
  std::size_t (*attend_workspace)(const AttendArgs&);
  void (*attend)(const AttendArgs&);
  void (*activate)(Activation kind, DType dtype, const void* in, void* out, std::int64_t count, int num_threads);
};

extern const Kernels kGeneric;
#ifdef OCTAVO_X86
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

// The kernels of the named instruction set, or of the best one this CPU has when `name` is null or empty.
// Null when the name is unknown or the CPU lacks it.
const Kernels* choose_kernels(const char* name);

}  // namespace octavo
