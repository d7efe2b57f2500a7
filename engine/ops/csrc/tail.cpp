// sluice_select_with_tail: the exact top-k of rows for which LIM searched only the stable prefix.
#include <algorithm>
#include <numeric>

#include "error.h"
#include "parallel.h"
#include "select.h"
#include "sluice_ops.h"
#include "topk.h"
#include "workspace.h"

namespace sluice {
namespace {

using Args = sluice_tail_args;

constexpr int32_t kNotOffloaded = -3;

void select_row(const Args& a, const IndexBatch& batch, int64_t request, int64_t row) {
  thread_local Scratch rank_memory, score_memory, tail_memory, slot_memory;
  const int32_t* ids = a.topk_src_ids + row * a.topk;
  const int32_t* slots = a.topk_dst_slots + row * a.topk;
  int32_t* out_ids = a.ids + row * a.topk;
  int32_t* out_slots = a.slots + row * a.topk;
  const int64_t stable = a.stable_lens[request], visible = a.key_lens[request] - (a.query_ends[request] - 1 - row);
  const int64_t chosen = std::find(ids, ids + a.topk, -1) - ids;
  if (a.states[request] == kNotOffloaded || chosen == 0) {  // complete, or refused
    std::copy(ids, ids + a.topk, out_ids);
    std::copy(slots, slots + a.topk, out_slots);
    return;
  }
  const int64_t tail = std::max<int64_t>(visible - stable, 0);
  float* scores = score_memory.take<float>(chosen + tail);
  if (a.topk_scores != nullptr)
    std::copy(a.topk_scores + row * a.topk, a.topk_scores + row * a.topk + chosen, scores);
  else
    score_positions(batch, request, row, ids, chosen, scores);
  int32_t* positions = tail_memory.take<int32_t>(tail);
  std::iota(positions, positions + tail, static_cast<int32_t>(stable));
  score_positions(batch, request, row, positions, tail, scores + chosen);

  uint64_t* ranks = rank_memory.take<uint64_t>(chosen + tail);
  int32_t* slot_of = slot_memory.take<int32_t>(stable);
  for (int64_t i = 0; i < chosen; ++i) {
    ranks[i] = rank_of(scores[i], static_cast<uint32_t>(ids[i]));
    slot_of[ids[i]] = slots[i];
  }
  for (int64_t i = 0; i < tail; ++i)
    ranks[chosen + i] = rank_of(scores[chosen + i], static_cast<uint32_t>(positions[i]));
  const int64_t count = keep_best(ranks, chosen + tail, a.topk, true);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t id = position_of(ranks[i]);
    out_ids[i] = id;
    out_slots[i] = id < stable ? slot_of[id] : static_cast<int32_t>(a.cache_tokens[request] + id - stable);
  }
  std::fill(out_ids + count, out_ids + a.topk, -1);
  std::fill(out_slots + count, out_slots + a.topk, -1);
}

int check(const Args& a, const IndexBatch& batch) {
  if (check_query_ends("actual_seq_lengths_query", a.query_ends, a.requests, a.rows, false)) return SLUICE_INVALID;
  for (int64_t i = 0; i < a.requests; ++i) {
    if (a.states[i] == kNotOffloaded) continue;
    const int64_t bad = batch.keys(i).bad_column(a.key_lens[i]);
    if (bad >= 0)
      return invalid("block_table of request %lld has no legal block for column %lld of its %d keys; legal: 0 to %lld",
                     static_cast<long long>(i), static_cast<long long>(bad), a.key_lens[i],
                     static_cast<long long>(a.blocks - 1));
    for (int64_t at = batch.begin(i) * a.topk; at < a.query_ends[i] * a.topk; ++at)
      if (a.topk_src_ids[at] < -1 || a.topk_src_ids[at] >= a.stable_lens[i])
        return invalid("topk_src_ids of row %lld names position %d; legal: -1 to %d", static_cast<long long>(at / a.topk),
                       a.topk_src_ids[at], a.stable_lens[i] - 1);
  }
  return SLUICE_OK;
}

int run(const Args& a) {
  const IndexBatch batch = IndexBatch::of(a, a.weights_dtype);
  if (check(a, batch)) return SLUICE_INVALID;
  parallel_for(a.threads, a.rows, [&](int64_t row) {
    const int64_t request = std::upper_bound(a.query_ends, a.query_ends + a.requests, row) - a.query_ends;
    select_row(a, batch, request, row);
  });
  return SLUICE_OK;
}

}  // namespace
}  // namespace sluice

extern "C" int sluice_select_with_tail(const sluice_tail_args* args) { return sluice::enter(args, sluice::run); }
