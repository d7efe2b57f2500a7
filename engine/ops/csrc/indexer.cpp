// sluice_lightning_indexer: top-k source positions of every query row.
#include <algorithm>

#include "error.h"
#include "kernels.h"
#include "paged.h"
#include "parallel.h"
#include "score_stream.h"
#include "select.h"
#include "sluice_ops.h"
#include "topk.h"
#include "workspace.h"

namespace sluice {
namespace {

constexpr int64_t kRowsPerTile = 16;        // rows that share one packed tile of keys
constexpr int64_t kKeysPerSegment = 2048;   // the least worth a unit of its own

// Rows [begin, end) of one request.
struct RowTile {
  int64_t request, begin, end;
};

// The batch and what its rows may select from.
struct Args : sluice_indexer_args {
  const int32_t* searched;
};

PagedRows keys_of(const Args& a, int64_t request) {
  return {static_cast<const char*>(a.key_cache), a.dims * element_bytes(a.dtype), a.blocks, a.block_size, a.max_blocks,
          a.block_table + request * a.max_blocks};
}

int64_t visible(const Args& a, int64_t request, int64_t row) {
  if (a.searched != nullptr && a.searched[request] >= 0) return a.searched[request];
  return a.key_lens[request] - (a.query_ends[request] - 1 - row);
}

// Scores one tile of rows over keys [begin, end) into the rows' running top-k.
void score(const Args& a, const RowTile& tile, int64_t begin, int64_t end, RunningTopK* best) {
  thread_local Scratch query_memory, weight_memory;
  const QueryRows query = widen_rows(a.query, a.dtype, a.weights, a.weights_dtype, tile.begin, tile.end - tile.begin,
                                     a.heads, a.dims, query_memory, weight_memory);
  stream_scores(
      keys_of(a, tile.request), a.dtype, query, begin, end,
      [&](int64_t r) { return visible(a, tile.request, tile.begin + r); },
      [&](int64_t r, int64_t first, const float* scores, int64_t count) { best[r].push(first, scores, count); });
}

void write(const Args& a, int64_t row, const uint64_t* ranks, int64_t count) {
  int32_t* out = a.topk_ids + row * a.topk;
  for (int64_t i = 0; i < count; ++i) out[i] = position_of(ranks[i]);
  std::fill(out + count, out + a.topk, -1);
}

// One unit per tile of rows.
void run_by_rows(const Args& a, const RowTile* tiles, int64_t tile_count) {
  parallel_for(a.threads, tile_count, [&](int64_t unit) {
    thread_local Scratch memory;
    const RowTile& tile = tiles[unit];
    const int64_t room = RunningTopK::room(a.topk), rows = tile.end - tile.begin;
    uint64_t* ranks = memory.take<uint64_t>(rows * room);
    RunningTopK best[kRowsPerTile];
    for (int64_t r = 0; r < rows; ++r) best[r].reset(ranks + r * room, a.topk);
    score(a, tile, 0, std::max<int64_t>(visible(a, tile.request, tile.end - 1), 0), best);
    for (int64_t r = 0; r < rows; ++r) write(a, tile.begin + r, ranks + r * room, best[r].finish());
  });
}

// Few rows over many keys: one unit per tile and segment of keys, then each row's segments are merged.
void run_by_segments(const Args& a, const RowTile* tiles, int64_t tile_count, int64_t segments) {
  thread_local Scratch rank_memory, count_memory;
  const int64_t room = RunningTopK::room(a.topk);
  uint64_t* ranks = rank_memory.take<uint64_t>(a.rows * segments * room);
  int64_t* counts = count_memory.take<int64_t>(a.rows * segments);
  parallel_for(a.threads, tile_count * segments, [&](int64_t unit) {
    const RowTile& tile = tiles[unit / segments];
    const int64_t segment = unit % segments, rows = tile.end - tile.begin;
    const int64_t length = std::max<int64_t>(visible(a, tile.request, tile.end - 1), 0);
    const int64_t share = ((length + segments - 1) / segments + kKeyTile - 1) / kKeyTile * kKeyTile;
    RunningTopK best[kRowsPerTile];
    auto place = [&](int64_t r) { return (tile.begin + r) * segments + segment; };
    for (int64_t r = 0; r < rows; ++r) best[r].reset(ranks + place(r) * room, a.topk);
    score(a, tile, std::min(segment * share, length), std::min((segment + 1) * share, length), best);
    for (int64_t r = 0; r < rows; ++r) counts[place(r)] = best[r].finish();
  });
  for (int64_t row = 0; row < a.rows; ++row) {
    uint64_t* merged = ranks + row * segments * room;
    int64_t count = 0;
    for (int64_t s = 0; s < segments; ++s) {
      const uint64_t* from = merged + s * room;
      std::copy(from, from + counts[row * segments + s], merged + count);
      count += counts[row * segments + s];
    }
    const int64_t kept = std::min(count, a.topk);
    std::partial_sort(merged, merged + kept, merged + count, std::greater<uint64_t>());
    write(a, row, merged, kept);
  }
}

int run(const Args& a) {
  if (check_query_ends("query_ends", a.query_ends, a.requests, a.rows, true)) return SLUICE_INVALID;
  thread_local Scratch tile_memory;
  RowTile* tiles = tile_memory.take<RowTile>(a.requests + a.rows / kRowsPerTile + 1);
  int64_t tile_count = 0, begin = 0, longest = 0;
  for (int64_t i = 0; i < a.requests; ++i) {
    const int64_t end = a.query_ends[i];
    if (begin == end) continue;
    const int64_t length = visible(a, i, end - 1);
    const int64_t bad = keys_of(a, i).bad_column(length);
    if (bad >= 0 && bad >= a.max_blocks)
      return invalid("key_lens[%lld] is %lld; legal: at most %lld, the block table's width times the block size",
                     static_cast<long long>(i), static_cast<long long>(length),
                     static_cast<long long>(a.max_blocks * a.block_size));
    if (bad >= 0)
      return invalid("block_table[%lld, %lld] is %d; legal: 0 to %lld", static_cast<long long>(i),
                     static_cast<long long>(bad), a.block_table[i * a.max_blocks + bad],
                     static_cast<long long>(a.blocks - 1));
    longest = std::max(longest, length);
    for (; begin < end; begin += kRowsPerTile)
      tiles[tile_count++] = {i, begin, std::min(begin + kRowsPerTile, end)};
    begin = end;
  }
  if (tile_count == 0) return SLUICE_OK;
  const int64_t wanted = (a.threads + tile_count - 1) / tile_count;
  const int64_t segments = std::min(wanted, longest / kKeysPerSegment);
  if (segments > 1)
    run_by_segments(a, tiles, tile_count, segments);
  else
    run_by_rows(a, tiles, tile_count);
  return SLUICE_OK;
}

int run_causal(const sluice_indexer_args& args) { return select_topk(args, nullptr); }

}  // namespace

int select_topk(const sluice_indexer_args& args, const int32_t* searched) { return run({args, searched}); }

}  // namespace sluice

extern "C" int sluice_lightning_indexer(const sluice_indexer_args* args) {
  return sluice::enter(args, sluice::run_causal);
}
