// The lightning indexer's scores of a few query rows over one request's keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "paged.h"
#include "panel.h"
#include "select.h"
#include "workspace.h"

namespace sluice {

// Query rows of one request, packed; `memory` is one set of buffers per thread.
class QueryPanel {
 public:
  QueryPanel(const IndexBatch& batch, int64_t first, int64_t count) : kernel_(kernels()), heads_(batch.heads) {
    const int64_t dims = batch.dims;
    format_ = Format::kFloat32;
    if (batch.dtype == SLUICE_BFLOAT16 && dims % 2 == 0 && kernel_.index_scores_bfloat16 != nullptr)
      format_ = Format::kBfloat16;
    if (batch.dtype == SLUICE_INT8 && dims % 4 == 0 && kernel_.quant_scores_int8 != nullptr) format_ = Format::kInt8;
    score_ = format_ == Format::kBfloat16 ? kernel_.index_scores_bfloat16
             : format_ == Format::kInt8   ? kernel_.quant_scores_int8
             : batch.dtype == SLUICE_INT8 ? kernel_.quant_scores
                                          : kernel_.index_scores;
    vectors_ = head_vectors(heads_, kernel_.lanes);
    words_ = dims / elements_per_word(format_);
    Buffers& buffers = memory();
    const int64_t panel_words = vectors_ * words_ * kernel_.lanes, width = vectors_ * kernel_.lanes;
    panel_ = buffers.panel.take<uint32_t>(count * panel_words);
    weights_ = buffers.weights.take<float>(count * width);
    bias_ = buffers.bias.take<int32_t>(count * width);
    live_ = buffers.live.take<int32_t>(width);
    std::fill(panel_, panel_ + count * panel_words, 0u);
    std::fill(weights_, weights_ + count * width, 0.0f);
    std::fill(bias_, bias_ + count * width, 0);
    for (int64_t h = 0; h < width; ++h) live_[h] = h < heads_ ? -1 : 0;
    for (int64_t r = 0; r < count; ++r) {
      const char* row = static_cast<const char*>(batch.query) + (first + r) * heads_ * dims * element_bytes(batch.dtype);
      pack_heads(kernel_, row, batch.dtype, format_, heads_, dims, 0, words_, panel_ + r * panel_words);
      pack_weights(batch, first + r, weights_ + r * width);
      if (format_ != Format::kInt8) continue;
      for (int64_t h = 0; h < heads_; ++h)
        for (int64_t d = 0; d < dims; ++d) bias_[r * width + h] -= 128 * reinterpret_cast<const int8_t*>(row)[h * dims + d];
    }
  }

  Format format() const { return format_; }
  // Scores of row r for keys rows[0 .. count), all kScoreTile of them readable; scores has room for kScoreTile.
  void score(int64_t r, const void* const* rows, int64_t count, float* scores) const {
    const int64_t width = vectors_ * kernel_.lanes;
    score_({panel_ + r * width * words_, weights_ + r * width, live_, bias_ + r * width, vectors_, words_, rows, count,
            scores});
  }

 private:
  struct Buffers {
    Scratch panel, weights, bias, live;
  };
  static Buffers& memory() {
    thread_local Buffers buffers;
    return buffers;
  }

  // With scales: weight times scale, rounded to half precision.
  void pack_weights(const IndexBatch& batch, int64_t row, float* weights) const {
    const char* from = static_cast<const char*>(batch.weights) + row * heads_ * element_bytes(batch.weights_dtype);
    kernel_.widen(from, batch.weights_dtype, weights, heads_);
    if (batch.query_scale == nullptr) return;
    thread_local Scratch half_memory, scale_memory;
    uint16_t* halves = half_memory.take<uint16_t>(heads_);
    float* scales = scale_memory.take<float>(heads_);
    kernel_.widen(batch.query_scale + row * heads_, SLUICE_FLOAT16, scales, heads_);
    for (int64_t h = 0; h < heads_; ++h) weights[h] *= scales[h];
    kernel_.narrow(weights, 1.0f, SLUICE_FLOAT16, halves, heads_);
    kernel_.widen(halves, SLUICE_FLOAT16, weights, heads_);
  }

  const Kernels& kernel_;
  const int64_t heads_;
  Format format_;
  void (*score_)(const ScoreTask&);
  int64_t vectors_, words_;
  uint32_t* panel_;
  float* weights_;
  int32_t* bias_;
  int32_t* live_;
};

// Up to kScoreTile keys, ready to be scored against the rows of a panel.
class KeyTile {
 public:
  KeyTile(const IndexBatch& batch, int64_t request, const QueryPanel& query)
      : batch_(batch), keys_(batch.keys(request)), query_(query) {
    const Format format = query.format();
    direct_ = format == Format::kBfloat16 || batch.dtype == SLUICE_FLOAT32;
    if (direct_) return;
    thread_local Scratch memory;
    copies_ = memory.take<char>(kScoreTile * batch.dims * (format == Format::kInt8 ? 1 : 4));
  }

  // Loads the keys at position(0) .. position(count - 1), whose blocks must have been checked; count is at least 1.
  template <typename Position>
  void load(int64_t count, const Position& position) {
    uint16_t scales[kScoreTile] = {};
    for (int64_t k = 0; k < count; ++k) {
      const int64_t row = keys_.row(position(k));
      rows_[k] = direct_ ? keys_.at(row) : copy(keys_.at(row), k);
      if (batch_.key_scale != nullptr) scales[k] = batch_.key_scale[row];
    }
    for (int64_t k = count; k < kScoreTile; ++k) rows_[k] = rows_[0];
    count_ = count;
    if (batch_.key_scale != nullptr) kernels().widen(scales, SLUICE_FLOAT16, scales_, kScoreTile);
  }

  // Scores of row r of the panel for all loaded keys; scores has room for kScoreTile.
  void score(int64_t r, float* scores) const {
    query_.score(r, rows_, count_, scores);
    if (batch_.key_scale == nullptr) return;
    for (int64_t k = 0; k < kScoreTile; ++k) scores[k] *= scales_[k];
  }

 private:
  const void* copy(const char* key, int64_t k) {
    const int64_t dims = batch_.dims;
    if (query_.format() != Format::kInt8) {
      float* to = reinterpret_cast<float*>(copies_) + k * dims;
      kernels().widen(key, batch_.dtype, to, dims);
      return to;
    }
    char* to = copies_ + k * dims;
    for (int64_t d = 0; d < dims; ++d) to[d] = static_cast<char>(key[d] ^ 0x80);
    return to;
  }

  const IndexBatch& batch_;
  const PagedRows keys_;
  const QueryPanel& query_;
  bool direct_;
  char* copies_ = nullptr;
  const void* rows_[kScoreTile];
  alignas(64) float scales_[kScoreTile];
  int64_t count_ = 0;
};

}  // namespace sluice
