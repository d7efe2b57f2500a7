// Paged tensors and the rows of requests, as every operator sees them.
#pragma once

#include <cstdint>

#include "error.h"
#include "sluice_ops.h"

namespace sluice {

inline int64_t element_bytes(int64_t dtype) { return dtype == SLUICE_FLOAT32 ? 4 : dtype == SLUICE_INT8 ? 1 : 2; }

// One request's view of a paged cache [blocks, block_size, dims].
struct PagedRows {
  const char* base;
  int64_t row_bytes, blocks, block_size, max_blocks;
  const int32_t* table;  // [max_blocks]

  // Index of the cache row that holds `position`, or -1 if the table has no legal block for it.
  int64_t row(int64_t position) const {
    const int64_t column = position / block_size;
    if (position < 0 || column >= max_blocks) return -1;
    const int64_t block = table[column];
    return block < 0 || block >= blocks ? -1 : block * block_size + position % block_size;
  }

  const char* at(int64_t cache_row) const { return base + cache_row * row_bytes; }

  // First of the blocks [0, ceil(length / block_size)) that is not legal, or -1.
  int64_t bad_column(int64_t length) const {
    const int64_t used = (length + block_size - 1) / block_size;
    for (int64_t column = 0; column < used; ++column)
      if (column >= max_blocks || table[column] < 0 || table[column] >= blocks) return column;
    return -1;
  }
};

// 0 if `ends` are cumulative row counts of `requests` requests over `rows` rows, else an error.
inline int check_query_ends(const char* name, const int32_t* ends, int64_t requests, int64_t rows, bool allow_empty) {
  int64_t last = 0;
  for (int64_t i = 0; i < requests; ++i) {
    if (ends[i] < last || (!allow_empty && ends[i] == last))
      return invalid("%s[%lld] is %d after %lld; legal: %s", name, static_cast<long long>(i), ends[i],
                     static_cast<long long>(last),
                     allow_empty ? "cumulative row counts that never fall" : "strictly increasing row counts");
    last = ends[i];
  }
  if (last != rows)
    return invalid("%s ends at %lld; legal: the number of query rows, %lld", name, static_cast<long long>(last),
                   static_cast<long long>(rows));
  return SLUICE_OK;
}

}  // namespace sluice
