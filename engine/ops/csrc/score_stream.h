// The lightning indexer's scores of a few query rows over one request's keys.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "paged.h"
#include "workspace.h"

namespace sluice {

// Query rows of one request, widened to float32: q [rows, heads, dims], weights [rows, heads].
struct QueryRows {
  const float* q;
  const float* weights;
  int64_t rows, heads, dims;
};

// Widens `count` consecutive rows; the scratch must outlive the result.
inline QueryRows widen_rows(const void* query, int64_t dtype, const void* weights, int64_t weights_dtype, int64_t first,
                            int64_t count, int64_t heads, int64_t dims, Scratch& q_memory, Scratch& weight_memory) {
  const int64_t width = heads * dims;
  float* q = q_memory.take<float>(count * width);
  float* w = weight_memory.take<float>(count * heads);
  kernels().widen(static_cast<const char*>(query) + first * width * element_bytes(dtype), dtype, q, count * width);
  kernels().widen(static_cast<const char*>(weights) + first * heads * element_bytes(weights_dtype), weights_dtype, w,
                  count * heads);
  return {q, w, count, heads, dims};
}

// Up to kKeyTile keys, ready to be scored against any number of query rows.
class ScoreTile {
 public:
  explicit ScoreTile(int64_t dims) : kernel_(kernels()), dims_(dims), stride_(padded(dims)) {
    rows_ = row_memory().take<float>(kKeyTile * stride_);
    packed_ = packed_memory().take<float>(kKeyTile * stride_);
    std::fill(rows_, rows_ + kKeyTile * stride_, 0.0f);
  }

  // Loads the keys at position(0) .. position(count - 1), whose blocks must have been checked.
  template <typename Position>
  void load(const PagedRows& keys, int64_t dtype, int64_t count, const Position& position) {
    for (int64_t k = 0; k < count; ++k)
      kernel_.widen(keys.at(keys.row(position(k))), dtype, rows_ + k * stride_, dims_);
    kernel_.pack(rows_, stride_, packed_);
  }

  // Scores of row r for all loaded keys; scores has room for kKeyTile.
  void score(const QueryRows& query, int64_t r, float* scores) const {
    kernel_.index_scores(query.q + r * query.heads * dims_, query.weights + r * query.heads, query.heads, dims_, packed_,
                         scores);
  }

 private:
  static Scratch& row_memory() {
    thread_local Scratch memory;
    return memory;
  }
  static Scratch& packed_memory() {
    thread_local Scratch memory;
    return memory;
  }

  const Kernels& kernel_;
  const int64_t dims_, stride_;
  float* rows_;
  float* packed_;
};

// Calls sink(row, first position, scores, count) for each row and each tile of keys of [begin, end), positions
// ascending, with `count` cut to the row's visible(row).
template <typename Visible, typename Sink>
void stream_scores(const PagedRows& keys, int64_t dtype, const QueryRows& query, int64_t begin, int64_t end,
                   const Visible& visible, const Sink& sink) {
  ScoreTile tile(query.dims);
  for (int64_t first = begin; first < end; first += kKeyTile) {
    const int64_t count = std::min(kKeyTile, end - first);
    tile.load(keys, dtype, count, [&](int64_t k) { return first + k; });
    for (int64_t r = 0; r < query.rows; ++r) {
      const int64_t seen = std::min(count, visible(r) - first);
      if (seen <= 0) continue;
      alignas(64) float scores[kKeyTile];
      tile.score(query, r, scores);
      sink(r, first, scores, seen);
    }
  }
}

// totals[j] = sum over the rows of the score of positions[j].
inline void sum_scores(const PagedRows& keys, int64_t dtype, const QueryRows& query, const int32_t* positions,
                       int64_t count, float* totals) {
  ScoreTile tile(query.dims);
  for (int64_t first = 0; first < count; first += kKeyTile) {
    const int64_t here = std::min(kKeyTile, count - first);
    tile.load(keys, dtype, here, [&](int64_t k) { return positions[first + k]; });
    std::fill(totals + first, totals + first + here, 0.0f);
    for (int64_t r = 0; r < query.rows; ++r) {
      alignas(64) float scores[kKeyTile];
      tile.score(query, r, scores);
      for (int64_t k = 0; k < here; ++k) totals[first + k] += scores[k];
    }
  }
}

}  // namespace sluice
