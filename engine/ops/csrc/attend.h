// Attention of one query row over a set of cache rows; softmax and sums in float32.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "paged.h"
#include "panel.h"
#include "workspace.h"

namespace sluice {

// The two parts of a latent cache, each [rows, latent or rope_dims]. Keys are [ckv | rope], values are ckv.
struct LatentCache {
  const char* ckv;
  const char* rope;
  int64_t latent, rope_dims, dtype;

  int64_t ckv_bytes() const { return latent * element_bytes(dtype); }
  int64_t rope_bytes() const { return rope_dims * element_bytes(dtype); }
  const char* ckv_row(int64_t row) const { return ckv + row * ckv_bytes(); }
  const char* rope_row(int64_t row) const { return rope + row * rope_bytes(); }
};

// Collects the distinct cache rows a query row attends to, as pointers to their parts. `seen` marks hold the epoch of the
// last row that used them, so nothing is cleared between rows.
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
    ckv_ = ckv_memory_.take<const void*>(most + kAttendTile);
    rope_ = rope_memory_.take<const void*>(most + kAttendTile);
    count_ = 0;
  }
  // True the first time `position` (below begin's limit) is given.
  bool insert(int64_t position) {
    if (marks_[position] == epoch_) return false;
    marks_[position] = epoch_;
    return true;
  }
  void add(const LatentCache& cache, int64_t row) {
    ckv_[count_] = cache.ckv_row(row);
    rope_[count_++] = cache.rope_row(row);
  }
  // Makes a whole tile readable after the last row.
  void end() {
    if (count_ == 0) return;
    std::fill(ckv_ + count_, ckv_ + count_ + kAttendTile, ckv_[count_ - 1]);
    std::fill(rope_ + count_, rope_ + count_ + kAttendTile, rope_[count_ - 1]);
  }
  const void* const* ckv() const { return ckv_; }
  const void* const* rope() const { return rope_; }
  int64_t count() const { return count_; }
  int64_t tiles() const { return (count_ + kAttendTile - 1) / kAttendTile; }

 private:
  Scratch mark_memory_, ckv_memory_, rope_memory_;
  uint32_t* marks_ = nullptr;
  int64_t marks_size_ = 0;
  uint32_t epoch_ = 0;
  const void** ckv_ = nullptr;
  const void** rope_ = nullptr;
  int64_t count_ = 0;
};

// One query row's attention for `heads` heads: q_nope and q_rope point at the first of them ([heads, latent],
// [heads, rope_dims]), out likewise [heads, latent]; all of the cache's dtype. An empty set gives zeros.
class RowAttention {
 public:
  RowAttention(const LatentCache& cache, const void* q_nope, const void* q_rope, int64_t heads, float scale)
      : cache_(cache), kernel_(kernels()), memory_(memory()), heads_(heads), dims_(cache.latent + cache.rope_dims) {
    const bool pairs = cache.dtype == SLUICE_BFLOAT16 && cache.latent % 2 == 0 && cache.rope_dims % 2 == 0 &&
                       kernel_.attend_bfloat16 != nullptr;
    const Format format = pairs ? Format::kBfloat16 : Format::kFloat32;
    run_ = pairs ? kernel_.attend_bfloat16 : kernel_.attend;
    widened_ = !pairs && cache.dtype != SLUICE_FLOAT32;
    const int64_t lanes = kernel_.lanes, vectors = head_vectors(heads, lanes), width = vectors * lanes;
    const int64_t words = dims_ / elements_per_word(format);
    uint32_t* panel = memory_.panel.take<uint32_t>(width * words);
    std::fill(panel, panel + width * words, 0u);
    pack_heads(kernel_, q_nope, cache.dtype, format, heads, cache.latent, 0, words, panel);
    pack_heads(kernel_, q_rope, cache.dtype, format, heads, cache.rope_dims, cache.latent / elements_per_word(format),
               words, panel);
    task_.panel = panel;
    task_.vectors = vectors, task_.latent = cache.latent, task_.rope = cache.rope_dims;
    task_.scale = scale;
    task_.peak = memory_.state.take<float>(2 * width);
    task_.total = task_.peak + width;
    task_.acc = memory_.acc.take<float>(cache.latent * width);
    task_.scratch = memory_.scratch.take<char>(attend_scratch_bytes(cache.latent, lanes));
    std::fill(task_.peak, task_.peak + width, -__builtin_inff());
    std::fill(task_.total, task_.total + width, 0.0f);
    std::fill(task_.acc, task_.acc + cache.latent * width, 0.0f);
  }

  // Attends to tile t of the set, and prefetches tile t + 1.
  void attend(const AttendSet& set, int64_t t) {
    const int64_t first = t * kAttendTile, next = first + kAttendTile;
    task_.count = std::min(kAttendTile, set.count() - first);
    task_.ckv = set.ckv() + first;
    task_.rope_rows = set.rope() + first;
    task_.next_ckv = set.ckv() + next;
    task_.next_rope = set.rope() + next;
    task_.next_count = std::max<int64_t>(std::min(kAttendTile, set.count() - next), 0);
    if (widened_) widen();
    run_(task_);
  }

  void finish(void* out) {
    float* row = memory_.row.take<float>(cache_.latent);
    for (int64_t h = 0; h < heads_; ++h) {
      for (int64_t c = 0; c < cache_.latent; ++c)
        row[c] = acc_of(task_.acc, cache_.latent, task_.vectors, kernel_.lanes, h, c);
      const float total = task_.total[h];
      kernel_.narrow(row, total > 0.0f ? 1.0f / total : 0.0f, cache_.dtype,
                     static_cast<char*>(out) + h * cache_.ckv_bytes(), cache_.latent);
    }
  }

 private:
  struct Buffers {
    Scratch panel, state, acc, scratch, rows, row;
  };
  static Buffers& memory() {
    thread_local Buffers buffers;
    return buffers;
  }

  // Replaces the tile's rows by float32 copies.
  void widen() {
    float* rows = memory_.rows.take<float>(kAttendTile * dims_);
    for (int64_t k = 0; k < kAttendTile; ++k) {
      wide_ckv_[k] = rows + std::min(k, task_.count - 1) * dims_;
      wide_rope_[k] = rows + std::min(k, task_.count - 1) * dims_ + cache_.latent;
      if (k >= task_.count) continue;
      kernel_.widen(task_.ckv[k], cache_.dtype, rows + k * dims_, cache_.latent);
      kernel_.widen(task_.rope_rows[k], cache_.dtype, rows + k * dims_ + cache_.latent, cache_.rope_dims);
    }
    task_.ckv = wide_ckv_;
    task_.rope_rows = wide_rope_;
    task_.next_count = 0;
  }

  const LatentCache& cache_;
  const Kernels& kernel_;
  Buffers& memory_;
  const int64_t heads_, dims_;
  void (*run_)(const AttendTask&);
  bool widened_;
  AttendTask task_{};
  const void* wide_ckv_[kAttendTile];
  const void* wide_rope_[kAttendTile];
};

// The heads of a row are split between units, by whole vectors, so that `rows` rows occupy `threads` threads.
struct HeadSplit {
  int64_t heads, lanes, parts;

  HeadSplit(int64_t rows, int64_t all_heads, int64_t threads) : heads(all_heads), lanes(kernels().lanes) {
    const int64_t wanted = (threads + std::max<int64_t>(rows, 1) - 1) / std::max<int64_t>(rows, 1);
    parts = std::max<int64_t>(1, std::min(wanted, head_vectors(heads, lanes)));
  }
  int64_t begin(int64_t part) const { return std::min(heads, head_vectors(heads, lanes) * part / parts * lanes); }
  int64_t end(int64_t part) const { return begin(part + 1); }
};

}  // namespace sluice
