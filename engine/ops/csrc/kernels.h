// The inner loops, compiled once per instruction set and chosen at run time.
//
// Query heads are the lanes of the vectors: a packed query ("panel") holds, for each vector of heads, its words in order
// of dimension, one per lane; rows of a cache are read where they are, word by word, each broadcast to all lanes. A word
// is what one instruction multiplies and adds up: a float32, a pair of bfloat16 or four int8.
#pragma once

#include <cstdint>

namespace sluice {

// Cache rows attended to together.
constexpr int64_t kAttendTile = 128;
// Cache rows scored together.
constexpr int64_t kScoreTile = 64;

// A function table and the element format it reads.
enum class Format : int64_t { kFloat32, kBfloat16, kInt8 };
constexpr int64_t elements_per_word(Format format) {
  return format == Format::kFloat32 ? 1 : format == Format::kBfloat16 ? 2 : 4;
}

// Index scores of one query row.
struct ScoreTask {
  const void* panel;        // [vectors][words][lanes] words
  const float* weights;     // [vectors][lanes], 0 in lanes without a head
  const int32_t* live;      // [vectors][lanes], -1 in lanes with a head, else 0
  const int32_t* bias;      // int8 only: [vectors][lanes], -128 * sum of the head's elements
  int64_t vectors, words;
  const void* const* rows;  // [kScoreTile] keys; int8: with 128 added to every element
  int64_t count;            // of them to be scored, the rest are readable
  float* out;               // [kScoreTile]
};

// One tile of running-softmax attention of one query row.
struct AttendTask {
  const void* panel;  // [vectors][latent words, then rope words][lanes] words
  int64_t vectors, latent, rope;
  const void* const* ckv;        // [kAttendTile] rows, readable beyond count
  const void* const* rope_rows;  // likewise
  int64_t count;
  // Rows wanted next; they are prefetched while this tile is computed. next_count may be 0.
  const void* const* next_ckv;
  const void* const* next_rope;
  int64_t next_count;
  float scale;
  float* peak;    // [vectors][lanes]
  float* total;   // [vectors][lanes]
  float* acc;     // see acc_of
  void* scratch;  // scratch_bytes
};

// A hot buffer's slots against the positions wanted from it.
struct SlotTask {
  int32_t* token;         // [capacity] position each slot holds, negative: none
  int32_t* used;          // [capacity] when it was last used
  const int32_t* wanted;  // bits of [0, stable)
  int64_t capacity;
  int32_t stable, now;
  int32_t* hit_tokens;    // out, room for capacity + 16
  int32_t* hit_slots;     // likewise
  int32_t* oldest;        // out [1]
};

// Scores of one (query row, key) pair are summed in one fixed order, whatever the tile or batch they were computed in,
// so prefill and decode rank keys alike.
struct Kernels {
  const char* name;
  int64_t lanes;  // heads per vector

  // dst[i] = float(src[i]); dtype is a SLUICE_ code.
  void (*widen)(const void* src, int64_t dtype, float* dst, int64_t count);
  // dst[i] = dtype(src[i] * factor), rounded to nearest even; not for int8.
  void (*narrow)(const float* src, float factor, int64_t dtype, void* dst, int64_t count);
  // Copies a row that is not read again soon, past the caches where it can; stream_end makes such rows visible to other
  // threads.
  void (*stream_row)(const char* from, char* to, int64_t bytes);
  void (*stream_end)();
  // out[k] = sum_h weights[h] * relu(q_h . key_k), for float32 rows.
  void (*index_scores)(const ScoreTask& task);
  // The same for bfloat16 rows; null where the instruction set has no such products.
  void (*index_scores_bfloat16)(const ScoreTask& task);
  // out[k] = sum_h weights[h] * half(relu(q_h . key_k) / 1024): int8 values widened to float32 (exact up to
  // kExactInt8Dims), and int8 itself (null where there are no such products).
  void (*quant_scores)(const ScoreTask& task);
  void (*quant_scores_int8)(const ScoreTask& task);
  // Advances peak, total and acc over the task's rows; for float32 and bfloat16 (may be null) rows.
  void (*attend)(const AttendTask& task);
  void (*attend_bfloat16)(const AttendTask& task);
  // Lists the slots that hold a wanted position, sets their `used` to `now`, empties those that hold a position from
  // `stable` on (used: 0), and finds the least `used`. Returns how many are listed, by rising slot.
  int64_t (*match_slots)(const SlotTask& task);
  // Lists the slots with `used` at most limit, by rising slot, in room for count + 16; returns how many.
  int64_t (*list_up_to)(const int32_t* used, int64_t count, int32_t limit, int32_t* slots);
};

// Most dimensions for which a sum of products of int8 values is exact in float32.
constexpr int64_t kExactInt8Dims = 1024;

// The vectors of acc are grouped in twos (the last may be single); a group of V vectors starting at vector v is
// [latent][V][lanes] floats at acc + v * latent * lanes.
inline float acc_of(const float* acc, int64_t latent, int64_t vectors, int64_t lanes, int64_t head, int64_t c) {
  const int64_t first = head / lanes / 2 * 2, width = (vectors - first < 2 ? 1 : 2) * lanes;
  return acc[first * latent * lanes + c * width + head - first * lanes];
}

inline int64_t attend_scratch_bytes(int64_t latent, int64_t lanes) {
  return kAttendTile * (2 * lanes * 4 * 2 + latent * 4);
}

// The selected table (the best this machine runs, unless sluice_ops_select_isa said otherwise).
const Kernels& kernels();

}  // namespace sluice
