// Streams the lightning indexer's scores of a few query rows over a range of one request's keys.
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

// Calls sink(row, first position, scores, count) for each row and each tile of keys of [begin, end), positions
// ascending, with `count` cut to the row's visible(row). Table entries of the range must have been checked.
template <typename Visible, typename Sink>
void stream_scores(const PagedRows& keys, int64_t dtype, const QueryRows& query, int64_t begin, int64_t end,
                   const Visible& visible, const Sink& sink) {
  thread_local Scratch row_memory, packed_memory;
  const Kernels& kernel = kernels();
  const int64_t stride = padded(query.dims);
  float* rows = row_memory.take<float>(kKeyTile * stride);
  float* packed = packed_memory.take<float>(kKeyTile * stride);
  std::fill(rows, rows + kKeyTile * stride, 0.0f);
  for (int64_t first = begin; first < end; first += kKeyTile) {
    const int64_t count = std::min(kKeyTile, end - first);
    for (int64_t k = 0; k < count; ++k)
      kernel.widen(keys.at(keys.row(first + k)), dtype, rows + k * stride, query.dims);
    kernel.pack(rows, stride, packed);
    for (int64_t r = 0; r < query.rows; ++r) {
      const int64_t seen = std::min(count, visible(r) - first);
      if (seen <= 0) continue;
      alignas(64) float scores[kKeyTile];
      kernel.index_scores(query.q + r * query.heads * query.dims, query.weights + r * query.heads, query.heads,
                          query.dims, packed, scores);
      sink(r, first, scores, seen);
    }
  }
}

}  // namespace sluice
