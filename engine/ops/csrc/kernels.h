// The inner loops, compiled once per instruction set and chosen at run time.
#pragma once

#include <cstdint>

namespace sluice {

// Keys scored or attended together. All packed buffers are this many keys wide.
constexpr int64_t kKeyTile = 32;
// Rows of float32 scratch matrices are padded to this many elements.
constexpr int64_t kRowPad = 16;

constexpr int64_t padded(int64_t n) { return (n + kRowPad - 1) / kRowPad * kRowPad; }

// Function table of one instruction set. Scores of one (query row, key) pair are summed in one fixed order (dims, then
// heads), whatever the tile or batch they were computed in, so prefill and decode rank keys alike.
struct Kernels {
  const char* name;

  // dst[i] = float(src[i]); dtype is one of SLUICE_FLOAT32/BFLOAT16/FLOAT16.
  void (*widen)(const void* src, int64_t dtype, float* dst, int64_t count);
  // dst[i] = dtype(src[i] * factor), rounded to nearest even.
  void (*narrow)(const float* src, float factor, int64_t dtype, void* dst, int64_t count);
  // packed[d][k] = rows[k * stride + d] for kKeyTile rows; stride is a multiple of kRowPad.
  void (*pack)(const float* rows, int64_t stride, float* packed);
  // out[h][k] = sum_d q[h][d] * packed[d][k]
  void (*dots)(const float* q, int64_t heads, int64_t dims, const float* packed, float* out);
  // out[k] = sum_h weights[h] * relu(sum_d q[h][d] * packed[d][k])
  void (*index_scores)(const float* q, const float* weights, int64_t heads, int64_t dims, const float* packed,
                       float* out);
  // One step of the running softmax of one head over `count` scores: scores become exp(scale * s - new maximum),
  // `peak` and `total` are brought up to date; returns the factor for what was accumulated before.
  float (*softmax)(float* scores, int64_t count, float scale, float* peak, float* total);
  // acc[h][c] = acc[h][c] * decay[h] + sum_k probs[h][k] * rows[k][c], c < width; all rows `stride` apart but probs
  // (kKeyTile) and acc (width, a multiple of kRowPad).
  void (*accumulate)(const float* probs, const float* decay, int64_t heads, int64_t count, const float* rows,
                     int64_t stride, int64_t width, float* acc);
};

// The selected table (the best this machine runs, unless sluice_ops_select_isa said otherwise).
const Kernels& kernels();

}  // namespace sluice
