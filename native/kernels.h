// The native kernels' one interface: plain structs of addresses and counts. No Python, no torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

constexpr int kBlockSize = 32;        // tokens in a block
constexpr int kPartitionBlocks = 16;  // blocks in an attention partition
constexpr int kPartitionTokens = kBlockSize * kPartitionBlocks;
constexpr int kMaxHeadDim = 512;
constexpr int kMaxTileRows = 128;  // query rows that are attended to one page at a time, unless a group has more

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

// Sequences that have pages of one partition in common: `order[first]` to `order[first + count - 1]`.
struct SharedRun {
  std::int64_t first, count, partition;
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
  // What sequences share, see sharing.h. Layers with a window leave it aside.
  const SharedRun* runs;
  std::int64_t num_runs;
  const std::int64_t* order;          // indices of sequences
  const std::int64_t* common;         // how many blocks the i-th in that order has in common with the one before it
  const std::int64_t* shared_starts;  // [num_seqs + 1] sums of the partitions that each has in runs, its first ones
  std::int64_t* bytes_read;  // to which the bytes of sealed pages that were read are added; may be null
  int num_threads;
};

// How weights are packed: dense numbers, or codes of so many bits. native/packing.h has the layouts.
enum class Packing : int { kFp32 = 0, kBf16 = 1, kInt8 = 2, kInt6 = 3, kInt4 = 4, kInt5 = 5 };

// Weights [num_outputs, num_inputs]. A coded weight is scale * code + minimum where there are minima, and otherwise
// scale * (code - half of the codes' range).
struct Matrix {
  Packing packing;
  bool stepped;      // false: a half-precision scale (and minimum) for every 32 inputs. true: one for every 256, and
                     // 8-bit multiples of it for every 32 inputs (every 16 where there are no minima)
  bool has_minimum;
  std::int64_t num_outputs, num_inputs;  // coded: num_inputs is a multiple of 32, stepped of 256
  const char* data;                      // matrix_bytes() of them, 64-byte aligned
};

// out[r][n] = (add ? out[r][n] : 0) + factor * (sum over k of weights[n][k] * x[r][k] + bias[n])
struct Product {
  Matrix weights;
  const float* bias;  // may be null
  float* out;
  std::int64_t out_stride;
  float factor;
  bool add;
};

struct DecoderArgs;

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
  // Bytes of `rows` prepared rows. All coded packings prepare alike, so that products of different ones can share them.
  std::size_t (*activation_bytes)(Packing, std::int64_t rows, std::int64_t num_inputs);
  // Prepares rows row_begin to row_end - 1 of `x` for products: quantised, rounded or copied into `to`, where row 0
  // starts. For the calling thread alone.
  void (*prepare_rows)(Packing, const float* x, std::int64_t stride, std::int64_t row_begin, std::int64_t row_end,
                       std::int64_t num_inputs, char* to);
  // Products of the same prepared rows. Called by every thread of a team; ends without a barrier.
  void (*multiply)(const Product*, int count, const char* activations, std::int64_t rows);
  // prepare_rows and multiply in a team of their own.
  void (*multiply_rows)(const Product*, int count, const float* x, std::int64_t stride, std::int64_t rows,
                        char* activations, int num_threads);
  std::size_t (*decoder_workspace)(const DecoderArgs&);
  void (*decode)(const DecoderArgs&);  // a step of a whole decoder, see decoder.h
};

extern const Kernels kGeneric;
#ifdef OCTAVO_X86
extern const Kernels kAvx2;
extern const Kernels kAvx512;
extern const Kernels kAvx512Bf16;
#endif

// The kernels of the named instruction set, or of the best one this CPU has when `name` is null or empty.
// Null when the name is unknown or the CPU lacks it.
const Kernels* choose_kernels(const char* name);

// Packed weights, the same for every instruction set (packing.cpp).
//
// The packing of a GGUF type without loss, or false when it has none: {packing, stepped, has_minimum} of `matrix` are
// set. Dense types leave the packing as it is.
bool packing_of(int type_id, Matrix& matrix);
// Bytes of a row in a GGUF file; 0 for a type that cannot be packed.
std::int64_t row_bytes(int type_id, std::int64_t num_inputs);
std::int64_t matrix_bytes(const Matrix&);
// Fills `matrix.data` from a file's rows. order[n] is the file's row of output n; null keeps the file's order.
void pack_gguf(int type_id, const char* rows, const std::int64_t* order, const Matrix& matrix, int num_threads);
// The same from float32 or bf16 rows; `matrix` is dense.
void pack_dense(DType, const void* rows, const Matrix& matrix, int num_threads);
// Rows of the file as float32, out[i] being row row_ids[i].
void unpack_rows(int type_id, const char* rows, const std::int64_t* row_ids, std::int64_t count, std::int64_t num_inputs,
                 float* out);
// Rows of packed weights as float32.
void unpack_matrix(const Matrix&, const std::int64_t* row_ids, std::int64_t count, float* out);
// Rows as blocks of Q8_0 (type_id 8) or Q4_1 (3), scales and minima chosen for the least squared error.
void quantise_rows(int type_id, const float* x, std::int64_t rows, std::int64_t num_inputs, char* out, int num_threads);

}  // namespace octavo
