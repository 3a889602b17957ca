// The native kernels' one interface: plain structs of addresses and counts. No Python, no torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

constexpr int kBlockSize = 32;        // tokens in a block
constexpr int kPartitionBlocks = 16;  // blocks in an attention partition
constexpr int kPartitionTokens = kBlockSize * kPartitionBlocks;
constexpr int kMaxHeadDim = 512;

enum class DType : int { kBf16 = 0, kFp32 = 1 };

// How a sealed page is encoded. Keys: kFp32 and kBf16 raw; kInt8 and kK8V4 8 bits, kInt4 4 bits, asymmetric, a
// scale and a zero per channel of the block. Values: kInt8 8 bits with a scale and a zero per token, kK8V4 and
// kInt4 4 bits with those per token and 32 channels.
enum class Format : int { kBf16 = 0, kFp32 = 1, kInt8 = 2, kK8V4 = 3, kInt4 = 4 };
enum class Activation : int { kSilu = 0, kGeluTanh = 1, kGeluErf = 2, kQuickGelu = 3 };

// Rows of one tensor: element (token t, head h, i) lies at data + (t * token_stride + h * head_stride + i).
struct Rows {
  void* data;
  std::int64_t token_stride;
  std::int64_t head_stride;
};

// One layer of one step.
struct AttendArgs {
  DType dtype;
  Format format;
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
  float softcap;       // scores become softcap * tanh(score / softcap); 0 leaves them
  std::int64_t window;  // a token sees itself and the window - 1 tokens before it; 0 for all
  const float* sinks;  // [num_heads] a score that takes probability and gives no value; may be null
  int num_threads;
};

struct Kernels {
  const char* name;
  std::size_t (*attend_workspace)(const AttendArgs&);
  void (*attend)(const AttendArgs&);
  // The same for callers inside a parallel region: every thread of the team calls it, `num_threads` of them at most.
  // It ends with a barrier.
  void (*attend_in_team)(const AttendArgs&);
  void (*activate)(Activation kind, DType dtype, const void* in, void* out, std::int64_t count, int num_threads);
  // Bytes of one key-value head in a sealed page; a page is num_kv_heads of them. An open page is a raw one in the
  // compute dtype. formats.inc has the layouts.
  std::int64_t (*head_bytes)(Format format, int head_dim, int v_head_dim);
  // Reads `count` pages of `page_bytes`, a multiple of 64, and returns a sum of what is in them: the ceiling of
  // everything that has to read them.
  std::int64_t (*read_pages)(const char* base, const std::int64_t* offsets, std::int64_t count, std::int64_t page_bytes,
                             int num_threads);
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
