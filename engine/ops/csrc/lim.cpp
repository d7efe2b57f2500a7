// sluice_lightning_indexer_manage (LIM): select each row's top-k and keep the request's map of hot slots up to date.
#include <algorithm>
#include <climits>

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

using Args = sluice_lim_args;

enum State : int32_t { kNotOffloaded = -3, kFirstDecode = -2, kSteady = -1 };

constexpr int32_t kNoSlot = INT32_MIN;
constexpr int32_t kCausal = -1;  // a `searched` length: rows see what precedes them

// One request's share of the batch.
struct Request {
  const Args& a;
  int64_t index, begin, end;  // rows [begin, end)
  int32_t state, stable, capacity, keys;
  int32_t* slot_of;  // [pool_width], hot slot of each source position, negative: not resident

  Request(const Args& args, int64_t i)
      : a(args),
        index(i),
        begin(i ? args.query_ends[i - 1] : 0),
        end(args.query_ends[i]),
        state(args.states[i]),
        stable(args.stable_lens[i]),
        capacity(args.cache_tokens[i]),
        keys(args.key_lens[i]),
        slot_of(args.slots_pool + args.pool_entries[i] * args.pool_width) {}

  int64_t rows() const { return end - begin; }
  int32_t* sources(int64_t row) const { return a.topk_src_ids + row * a.topk; }
  int32_t* slots(int64_t row) const { return a.topk_dst_slots + row * a.topk; }
  int32_t* miss_sources() const { return a.miss_src_ids + index * a.miss_capacity; }
  int32_t* miss_slots() const { return a.miss_dst_slots + index * a.miss_capacity; }
};

bool is_identity(const Request& r) {
  for (int64_t s = 0; s < r.a.pool_width; ++s)
    if (r.slot_of[s] != s) return false;
  return true;
}

// Exactly `capacity` residents, all below `stable`, their slots a bijection on [0, capacity).
bool is_bijection(const Request& r) {
  thread_local Scratch memory;
  uint8_t* taken = memory.take<uint8_t>(r.capacity);
  std::fill(taken, taken + r.capacity, uint8_t{0});
  int64_t residents = 0;
  for (int64_t s = 0; s < r.a.pool_width; ++s) {
    const int32_t slot = r.slot_of[s];
    if (slot < 0) continue;
    if (s >= r.stable || slot >= r.capacity || taken[slot]) return false;
    taken[slot] = 1;
    ++residents;
  }
  return residents == r.capacity;
}

// Whether the request keeps the operator's preconditions.
bool is_legal(const Request& r) {
  const int64_t rows = r.rows(), topk = r.a.topk, block = r.a.block_size;
  if (r.keys < rows || r.keys > r.a.pool_width) return false;
  if (r.state == kNotOffloaded) return true;
  if (r.state != kFirstDecode && r.state != kSteady) return false;
  if (r.stable < topk || r.capacity > r.stable || r.stable > r.keys) return false;
  if (r.stable % block || r.capacity % block || r.stable > (r.keys - rows) / block * block) return false;
  if (r.capacity > r.a.miss_capacity) return false;
  if (r.stable <= rows * topk ? r.capacity != r.stable : r.capacity < rows * topk) return false;
  return r.state == kFirstDecode || is_identity(r) || is_bijection(r);
}

void refuse(const Request& r) {
  r.a.miss_counts[r.index] = 0;
  for (int64_t row = r.begin; row < r.end; ++row) {
    std::fill(r.sources(row), r.sources(row) + r.a.topk, -1);
    std::fill(r.slots(row), r.slots(row) + r.a.topk, -1);
    r.a.topk_miss_counts[row] = 0;
  }
}

// State -3: everything is on the device, slot == position.
void not_offloaded(const Request& r) {
  r.a.miss_counts[r.index] = 0;
  for (int64_t row = r.begin; row < r.end; ++row) {
    std::copy(r.sources(row), r.sources(row) + r.a.topk, r.slots(row));
    r.a.topk_miss_counts[row] = 0;
  }
  for (int64_t s = 0; s < r.a.pool_width; ++s) r.slot_of[s] = static_cast<int32_t>(s);
}

// members[s] = 1 for every position below `stable` in some row's top-k.
uint8_t* mark_members(const Request& r, Scratch& memory) {
  uint8_t* members = memory.take<uint8_t>(r.stable);
  std::fill(members, members + r.stable, uint8_t{0});
  for (int64_t row = r.begin; row < r.end; ++row)
    for (int64_t i = 0; i < r.a.topk; ++i) members[r.sources(row)[i]] = 1;
  return members;
}

// Orders every row: the positions for which is_miss holds, then the others, each ascending; writes slots and counts.
template <typename IsMiss>
void order_rows(const Request& r, const IsMiss& is_miss) {
  for (int64_t row = r.begin; row < r.end; ++row) {
    int32_t* ids = r.sources(row);
    int32_t* middle = std::partition(ids, ids + r.a.topk, is_miss);
    std::sort(ids, middle);
    std::sort(middle, ids + r.a.topk);
    r.a.topk_miss_counts[row] = static_cast<int32_t>(middle - ids);
  }
}

void write_slots(const Request& r) {
  for (int64_t row = r.begin; row < r.end; ++row)
    for (int64_t i = 0; i < r.a.topk; ++i) r.slots(row)[i] = r.slot_of[r.sources(row)[i]];
}

// State -2: fill the hot buffer with the rows' top-k, then with the lowest other positions.
void first_decode(const Request& r) {
  thread_local Scratch member_memory;
  const uint8_t* members = mark_members(r, member_memory);
  int32_t* sources = r.miss_sources();
  int32_t* slots = r.miss_slots();
  std::fill(r.slot_of, r.slot_of + r.a.pool_width, kNoSlot);
  int32_t count = 0;
  for (uint8_t wanted : {uint8_t{1}, uint8_t{0}}) {
    for (int32_t s = 0; s < r.stable && count < r.capacity; ++s) {
      if (members[s] != wanted) continue;
      sources[count] = s;
      slots[count] = r.slot_of[s] = count;
      ++count;
    }
  }
  r.a.miss_counts[r.index] = count;
  order_rows(r, [](int32_t) { return true; });
  write_slots(r);
}

// The `count` residents outside every row's top-k with the lowest score summed over the rows, as ranks, lowest first.
const uint64_t* pick_victims(const Request& r, const uint8_t* members, int64_t count) {
  thread_local Scratch q_memory, weight_memory, candidate_memory, total_memory, rank_memory;
  int32_t* candidates = candidate_memory.take<int32_t>(r.capacity);
  int64_t found = 0;
  for (int32_t s = 0; s < r.stable; ++s)
    if (r.slot_of[s] >= 0 && !members[s]) candidates[found++] = s;
  const Args& a = r.a;
  const QueryRows query = widen_rows(a.query, a.dtype, a.weights, a.dtype, r.begin, r.rows(), a.heads, a.dims, q_memory,
                                     weight_memory);
  const PagedRows keys{static_cast<const char*>(a.key_cache), a.dims * element_bytes(a.dtype), a.blocks, a.block_size,
                       a.max_blocks, a.block_table + r.index * a.max_blocks};
  float* totals = total_memory.take<float>(found);
  sum_scores(keys, a.dtype, query, candidates, found, totals);
  uint64_t* ranks = rank_memory.take<uint64_t>(found);
  for (int64_t j = 0; j < found; ++j) ranks[j] = rank_of(totals[j], static_cast<uint32_t>(candidates[j]));
  std::partial_sort(ranks, ranks + count, ranks + found);
  return ranks;
}

// State -1: misses take the slots of victims.
void steady(const Request& r) {
  thread_local Scratch member_memory;
  if (is_identity(r)) std::fill(r.slot_of + r.capacity, r.slot_of + r.a.pool_width, kNoSlot);
  const uint8_t* members = mark_members(r, member_memory);
  int32_t* sources = r.miss_sources();
  int32_t count = 0;
  for (int32_t s = 0; s < r.stable; ++s)
    if (members[s] && r.slot_of[s] < 0) sources[count++] = s;
  r.a.miss_counts[r.index] = count;
  order_rows(r, [&](int32_t s) { return r.slot_of[s] < 0; });
  if (count > 0) {
    const uint64_t* victims = pick_victims(r, members, count);
    for (int32_t j = 0; j < count; ++j) {
      int32_t& freed = r.slot_of[position_of(victims[j])];
      r.miss_slots()[j] = r.slot_of[sources[j]] = freed;
      freed = kNoSlot;
    }
  }
  write_slots(r);
}

int check(const Args& a) {
  if (check_query_ends("actual_seq_lengths_query", a.query_ends, a.requests, a.rows, false)) return SLUICE_INVALID;
  thread_local Scratch memory;
  uint8_t* named = memory.take<uint8_t>(a.pool_rows);
  std::fill(named, named + a.pool_rows, uint8_t{0});
  for (int64_t i = 0; i < a.requests; ++i) {
    const int32_t entry = a.pool_entries[i];
    if (entry < 0 || entry >= a.pool_rows || named[entry])
      return invalid("req_pool_entries[%lld] is %d; legal: a row 0 to %lld that no other entry names",
                     static_cast<long long>(i), entry, static_cast<long long>(a.pool_rows - 1));
    named[entry] = 1;
  }
  return SLUICE_OK;
}

int run(const Args& a) {
  if (check(a)) return SLUICE_INVALID;
  thread_local Scratch legal_memory, searched_memory;
  uint8_t* legal = legal_memory.take<uint8_t>(a.requests);
  int32_t* searched = searched_memory.take<int32_t>(a.requests);
  parallel_for(a.threads, a.requests, [&](int64_t i) {
    const Request request(a, i);
    legal[i] = is_legal(request);
    searched[i] = !legal[i] ? 0 : request.state == kNotOffloaded ? kCausal : request.stable;
  });

  sluice_indexer_args select{};
  select.size = sizeof select;
  select.query = a.query, select.weights = a.weights, select.key_cache = a.key_cache;
  select.block_table = a.block_table, select.query_ends = a.query_ends, select.key_lens = a.key_lens;
  select.topk_ids = a.topk_src_ids;
  select.rows = a.rows, select.heads = a.heads, select.dims = a.dims, select.requests = a.requests;
  select.blocks = a.blocks, select.block_size = a.block_size, select.max_blocks = a.max_blocks, select.topk = a.topk;
  select.dtype = select.weights_dtype = a.dtype, select.threads = a.threads;
  if (select_topk(select, searched)) return SLUICE_INVALID;

  parallel_for(a.threads, a.requests, [&](int64_t i) {
    const Request request(a, i);
    if (!legal[i])
      refuse(request);
    else if (request.state == kNotOffloaded)
      not_offloaded(request);
    else if (request.state == kFirstDecode)
      first_decode(request);
    else
      steady(request);
  });
  return SLUICE_OK;
}

}  // namespace
}  // namespace sluice

extern "C" int sluice_lightning_indexer_manage(const sluice_lim_args* args) {
  return sluice::enter(args, sluice::run);
}
