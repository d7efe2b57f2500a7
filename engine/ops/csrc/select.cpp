// Top-k selection for a batch of index queries.
#include "select.h"

#include <algorithm>

#include "error.h"
#include "parallel.h"
#include "score_stream.h"
#include "topk.h"

namespace sluice {
namespace {

constexpr int64_t kKeysPerSegment = 2048;  // the least worth a unit of its own

// Rows [begin, end) of one request.
struct RowTile {
  int64_t request, begin, end;
};

class Selector {
 public:
  Selector(const IndexBatch& batch, const Selection& selection) : a_(batch), out_(selection) {}

  int run() {
    if (cut()) return SLUICE_INVALID;
    if (tile_count_ == 0) return SLUICE_OK;
    const int64_t wanted = (a_.threads + tile_count_ - 1) / tile_count_;
    const int64_t segments = std::min(wanted, longest_ / kKeysPerSegment);
    if (segments > 1)
      run_by_segments(segments);
    else
      run_by_rows();
    return SLUICE_OK;
  }

 private:
  int64_t visible(int64_t request, int64_t row) const {
    if (out_.searched != nullptr && out_.searched[request] >= 0) return out_.searched[request];
    return a_.key_lens[request] - (a_.query_ends[request] - 1 - row);
  }

  // Cuts the batch into tiles of rows, and checks their block tables.
  int cut() {
    thread_local Scratch memory;
    tiles_ = memory.take<RowTile>(a_.requests + a_.rows / kRowsPerTile + 1);
    for (int64_t i = 0, begin = 0; i < a_.requests; ++i) {
      const int64_t end = a_.query_ends[i];
      if (begin == end) continue;
      const int64_t length = visible(i, end - 1);
      const int64_t bad = a_.keys(i).bad_column(length);
      if (bad >= 0 && bad >= a_.max_blocks)
        return invalid("key_lens[%lld] is %lld; legal: at most %lld, the block table's width times the block size",
                       static_cast<long long>(i), static_cast<long long>(length),
                       static_cast<long long>(a_.max_blocks * a_.block_size));
      if (bad >= 0)
        return invalid("block_table[%lld, %lld] is %d; legal: 0 to %lld", static_cast<long long>(i),
                       static_cast<long long>(bad), a_.block_table[i * a_.max_blocks + bad],
                       static_cast<long long>(a_.blocks - 1));
      longest_ = std::max(longest_, length);
      for (; begin < end; begin += kRowsPerTile)
        tiles_[tile_count_++] = {i, begin, std::min(begin + kRowsPerTile, end)};
      begin = end;
    }
    return SLUICE_OK;
  }

  // Scores tile t over keys [begin, end) into the rows' running top-k.
  void score(int64_t t, int64_t begin, int64_t end, RunningTopK* best) const {
    const RowTile& tile = tiles_[t];
    const int64_t rows = tile.end - tile.begin;
    const QueryPanel query(a_, tile.begin, rows);
    KeyTile keys(a_, tile.request, query);
    for (int64_t first = begin; first < end; first += kScoreTile) {
      const int64_t count = std::min(kScoreTile, end - first);
      keys.load(count, [&](int64_t k) { return first + k; });
      float* totals = out_.totals == nullptr ? nullptr : out_.totals + t * out_.totals_stride + first;
      if (totals != nullptr) std::fill(totals, totals + count, 0.0f);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t seen = std::min(count, visible(tile.request, tile.begin + r) - first);
        if (seen <= 0) continue;
        alignas(64) float scores[kScoreTile];
        keys.score(r, scores);
        best[r].push(first, scores, seen);
        if (totals == nullptr) continue;
        for (int64_t k = 0; k < seen; ++k) totals[k] += scores[k];
      }
    }
  }

  void write(int64_t row, const uint64_t* ranks, int64_t count) const {
    int32_t* ids = out_.ids + row * a_.topk;
    for (int64_t i = 0; i < count; ++i) ids[i] = position_of(ranks[i]);
    std::fill(ids + count, ids + a_.topk, -1);
    if (out_.scores == nullptr) return;
    float* scores = out_.scores + row * a_.topk;
    for (int64_t i = 0; i < count; ++i) scores[i] = score_of(ranks[i]);
    std::fill(scores + count, scores + a_.topk, -__builtin_inff());
  }

  // One unit per tile of rows.
  void run_by_rows() const {
    parallel_for(a_.threads, tile_count_, [&](int64_t t) {
      thread_local Scratch memory;
      const RowTile& tile = tiles_[t];
      const int64_t room = RunningTopK::room(a_.topk), rows = tile.end - tile.begin;
      uint64_t* ranks = memory.take<uint64_t>(rows * room);
      RunningTopK best[kRowsPerTile];
      for (int64_t r = 0; r < rows; ++r) best[r].reset(ranks + r * room, a_.topk);
      score(t, 0, std::max<int64_t>(visible(tile.request, tile.end - 1), 0), best);
      for (int64_t r = 0; r < rows; ++r) write(tile.begin + r, ranks + r * room, best[r].finish(out_.ordered));
    });
  }

  // Few rows over many keys: one unit per tile and segment of keys, then each row's segments are merged.
  void run_by_segments(int64_t segments) const {
    thread_local Scratch rank_memory, count_memory;
    const int64_t room = RunningTopK::room(a_.topk);
    uint64_t* ranks = rank_memory.take<uint64_t>(a_.rows * segments * room);
    int64_t* counts = count_memory.take<int64_t>(a_.rows * segments);
    parallel_for(a_.threads, tile_count_ * segments, [&](int64_t unit) {
      const int64_t t = unit / segments, segment = unit % segments;
      const RowTile& tile = tiles_[t];
      const int64_t rows = tile.end - tile.begin;
      const int64_t length = std::max<int64_t>(visible(tile.request, tile.end - 1), 0);
      const int64_t share = ((length + segments - 1) / segments + kScoreTile - 1) / kScoreTile * kScoreTile;
      RunningTopK best[kRowsPerTile];
      auto place = [&](int64_t r) { return (tile.begin + r) * segments + segment; };
      for (int64_t r = 0; r < rows; ++r) best[r].reset(ranks + place(r) * room, a_.topk);
      score(t, std::min(segment * share, length), std::min((segment + 1) * share, length), best);
      for (int64_t r = 0; r < rows; ++r) counts[place(r)] = best[r].finish(false);
    });
    parallel_for(a_.threads, a_.rows, [&](int64_t row) {
      uint64_t* merged = ranks + row * segments * room;
      int64_t count = 0;
      for (int64_t s = 0; s < segments; ++s) {
        const uint64_t* from = merged + s * room;
        std::copy(from, from + counts[row * segments + s], merged + count);
        count += counts[row * segments + s];
      }
      write(row, merged, keep_best(merged, count, a_.topk, out_.ordered));
    });
  }

  const IndexBatch& a_;
  const Selection& out_;
  RowTile* tiles_ = nullptr;
  int64_t tile_count_ = 0, longest_ = 0;
};

}  // namespace

int select_topk(const IndexBatch& batch, const Selection& selection) { return Selector(batch, selection).run(); }

void score_positions(const IndexBatch& batch, int64_t request, int64_t row, const int32_t* positions, int64_t count,
                     float* scores) {
  const QueryPanel query(batch, row, 1);
  KeyTile keys(batch, request, query);
  alignas(64) float here[kScoreTile];
  for (int64_t first = 0; first < count; first += kScoreTile) {
    const int64_t size = std::min(kScoreTile, count - first);
    keys.load(size, [&](int64_t k) { return positions[first + k]; });
    keys.score(0, here);
    std::copy(here, here + size, scores + first);
  }
}

}  // namespace sluice
