// Queries packed for the kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "paged.h"
#include "sluice_ops.h"
#include "workspace.h"

namespace sluice {

inline int64_t head_vectors(int64_t heads, int64_t lanes) { return (heads + lanes - 1) / lanes; }

// Writes the words of `heads` rows of `dims` elements to words [offset, offset + dims / elements per word) of a panel
// [vectors][words][lanes] (4 bytes a word) of the given format; lanes without a head are left alone. dtype is that of
// the rows; a float32 panel takes any, others only their own, with dims a multiple of a word's elements.
inline void pack_heads(const Kernels& kernel, const void* rows, int64_t dtype, Format format, int64_t heads,
                       int64_t dims, int64_t offset, int64_t words, uint32_t* panel) {
  thread_local Scratch wide_memory;
  const int64_t lanes = kernel.lanes, bytes = element_bytes(dtype), used = dims / elements_per_word(format);
  const bool widened = format == Format::kFloat32 && dtype != SLUICE_FLOAT32;
  const int64_t stride = widened ? dims * 4 : dims * bytes;
  for (int64_t first = 0; first < heads; first += lanes, panel += words * lanes) {
    const int64_t here = std::min(lanes, heads - first);
    const char* from = static_cast<const char*>(rows) + first * dims * bytes;
    if (widened) {
      float* wide = wide_memory.take<float>(lanes * dims);
      kernel.widen(from, dtype, wide, here * dims);
      from = reinterpret_cast<const char*>(wide);
    }
    for (int64_t w = 0; w < used; ++w)
      for (int64_t lane = 0; lane < here; ++lane)
        std::memcpy(panel + (offset + w) * lanes + lane, from + lane * stride + w * 4, 4);
  }
}

}  // namespace sluice
