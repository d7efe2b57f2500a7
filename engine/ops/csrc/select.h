// Top-k selection for a batch, shared by the indexers and the fused indexers.
#pragma once

#include <cstdint>

#include "paged.h"
#include "sluice_ops.h"

namespace sluice {

// A batch of index queries. Scales are null unless dtype is int8.
struct IndexBatch {
  const void* query;            // [rows, heads, dims] dtype
  const void* weights;          // [rows, heads] weights_dtype
  const uint16_t* query_scale;  // [rows, heads] float16
  const void* key_cache;        // [blocks, block_size, 1, dims] dtype
  const uint16_t* key_scale;    // [blocks, block_size, 1] float16
  const int32_t* block_table;   // [requests, max_blocks]
  const int32_t* query_ends;    // [requests]
  const int32_t* key_lens;      // [requests]
  int64_t rows, heads, dims, requests, blocks, block_size, max_blocks, topk, dtype, weights_dtype, threads;

  // Takes what any operator's argument struct says about its batch.
  template <typename Args>
  static IndexBatch of(const Args& a, int64_t weights_dtype) {
    return {a.query,   a.weights,    a.query_scale, a.key_cache, a.key_scale,     a.block_table, a.query_ends,
            a.key_lens, a.rows,      a.heads,       a.dims,      a.requests,      a.blocks,      a.block_size,
            a.max_blocks, a.topk,    a.dtype,       weights_dtype, a.threads};
  }

  int64_t begin(int64_t request) const { return request ? query_ends[request - 1] : 0; }
  PagedRows keys(int64_t request) const {
    return {static_cast<const char*>(key_cache), dims * element_bytes(dtype), blocks, block_size, max_blocks,
            block_table + request * max_blocks};
  }
};

// Rows of one request that are scored together; a request's rows are cut into tiles of this many.
constexpr int64_t kRowsPerTile = 16;
inline int64_t row_tiles(int64_t rows) { return (rows + kRowsPerTile - 1) / kRowsPerTile; }

// What to select, and where it goes.
struct Selection {
  // If searched is null or searched[i] < 0, row r of request i sees [0, key_lens[i] - (query_ends[i] - 1 - r)), else
  // every row of it sees [0, searched[i]).
  const int32_t* searched;
  bool ordered;        // by falling score; else in any order
  int32_t* ids;        // [rows, topk], padded with -1
  float* scores;       // null, or [rows, topk], padded with -inf
  float* totals;       // null, or [all requests' row tiles, totals_stride]: score of every position, summed over the tile
  int64_t totals_stride;
};

int select_topk(const IndexBatch& batch, const Selection& selection);

// The score of each of `count` positions for one row of a request; their blocks must have been checked.
void score_positions(const IndexBatch& batch, int64_t request, int64_t row, const int32_t* positions, int64_t count,
                     float* scores);

}  // namespace sluice
