// Attention of one query row over a list of cache rows, softmax and sums in float32.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "paged.h"
#include "workspace.h"

namespace sluice {

// The two parts of a latent cache. Keys are [ckv | rope], values are ckv.
struct LatentCache {
  const char* ckv;
  const char* rope;
  int64_t latent, rope_dims, dtype;
};

// Collects the distinct cache rows a query row attends to. `seen` marks hold the epoch of the last row that used them,
// so nothing is cleared between rows.
class AttendSet {
 public:
  // For logical positions below `positions` and at most `most` distinct ones.
  void begin(int64_t positions, int64_t most) {
    if (positions > marks_size_) {
      marks_ = mark_memory_.take<uint32_t>(positions);
      std::fill(marks_, marks_ + positions, 0u);
      marks_size_ = positions;
      epoch_ = 0;
    }
    if (++epoch_ == 0) {
      std::fill(marks_, marks_ + marks_size_, 0u);
      epoch_ = 1;
    }
    rows_ = row_memory_.take<int64_t>(most);
    count_ = 0;
  }
  // True the first time `position` (below begin's limit) is given.
  bool insert(int64_t position) {
    if (marks_[position] == epoch_) return false;
    marks_[position] = epoch_;
    return true;
  }
  void add(int64_t cache_row) { rows_[count_++] = cache_row; }
  const int64_t* rows() const { return rows_; }
  int64_t count() const { return count_; }

 private:
  Scratch mark_memory_, row_memory_;
  uint32_t* marks_ = nullptr;
  int64_t marks_size_ = 0;
  uint32_t epoch_ = 0;
  int64_t* rows_ = nullptr;
  int64_t count_ = 0;
};

// out[h] = softmax(scale * q[h] . key) . value over the set, for `heads` heads. q_nope and q_rope point at the first of
// them ([heads, latent], [heads, rope_dims]), out likewise [heads, latent]; all of the cache's dtype. An empty set
// gives zeros.
inline void attend(const LatentCache& cache, const AttendSet& set, const void* q_nope, const void* q_rope,
                   int64_t heads, float scale, void* out) {
  thread_local Scratch q_memory, row_memory, packed_memory, prob_memory, state_memory, acc_memory;
  const Kernels& kernel = kernels();
  const int64_t bytes = element_bytes(cache.dtype), latent = cache.latent, rope = cache.rope_dims;
  const int64_t dims = latent + rope, stride = padded(dims), width = padded(latent);
  float* q = q_memory.take<float>(heads * dims);
  for (int64_t h = 0; h < heads; ++h) {
    kernel.widen(static_cast<const char*>(q_nope) + h * latent * bytes, cache.dtype, q + h * dims, latent);
    kernel.widen(static_cast<const char*>(q_rope) + h * rope * bytes, cache.dtype, q + h * dims + latent, rope);
  }
  float* rows = row_memory.take<float>(kKeyTile * stride);
  float* packed = packed_memory.take<float>(kKeyTile * stride);
  float* probs = prob_memory.take<float>(heads * kKeyTile);
  float* peak = state_memory.take<float>(3 * heads);
  float* total = peak + heads;
  float* decay = total + heads;
  float* acc = acc_memory.take<float>(heads * width);
  std::fill(rows, rows + kKeyTile * stride, 0.0f);
  std::fill(peak, peak + heads, -__builtin_inff());
  std::fill(total, total + heads, 0.0f);
  std::fill(acc, acc + heads * width, 0.0f);

  for (int64_t first = 0; first < set.count(); first += kKeyTile) {
    const int64_t count = std::min(kKeyTile, set.count() - first);
    for (int64_t k = 0; k < count; ++k) {
      const int64_t row = set.rows()[first + k];
      kernel.widen(cache.ckv + row * latent * bytes, cache.dtype, rows + k * stride, latent);
      kernel.widen(cache.rope + row * rope * bytes, cache.dtype, rows + k * stride + latent, rope);
    }
    kernel.pack(rows, stride, packed);
    kernel.dots(q, heads, dims, packed, probs);
    for (int64_t h = 0; h < heads; ++h)
      decay[h] = kernel.softmax(probs + h * kKeyTile, count, scale, peak + h, total + h);
    kernel.accumulate(probs, decay, heads, count, rows, stride, width, acc);
  }
  for (int64_t h = 0; h < heads; ++h)
    kernel.narrow(acc + h * width, total[h] > 0.0f ? 1.0f / total[h] : 0.0f, cache.dtype,
                  static_cast<char*>(out) + h * latent * bytes, latent);
}

// How many units the heads of one row are split into so that `rows` rows occupy `threads` threads.
inline int64_t head_splits(int64_t rows, int64_t heads, int64_t threads) {
  const int64_t wanted = (threads + std::max<int64_t>(rows, 1) - 1) / std::max<int64_t>(rows, 1);
  return std::max<int64_t>(1, std::min(wanted, heads / 8));
}

}  // namespace sluice
