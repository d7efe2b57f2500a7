// sluice_lru_residency: which selected positions are in the hot buffer, and which slots the others get.
#include <algorithm>

#include "error.h"
#include "paged.h"
#include "parallel.h"
#include "sluice_ops.h"
#include "workspace.h"

namespace sluice {
namespace {

using Args = sluice_residency_args;

// Rows of request `i`: [begin, end).
struct Span {
  int64_t begin, end;
};

Span rows_of(const Args& a, int64_t i) {
  if (a.query_ends == nullptr) return {i, i + 1};
  return {i == 0 ? 0 : a.query_ends[i - 1], a.query_ends[i]};
}

// Open-addressing map from a position to the index of its first occurrence in the request's top-k.
class FirstIndex {
 public:
  void build(const int32_t* ids, int64_t count, int32_t limit) {
    int64_t size = 16;
    while (size < 2 * count) size *= 2;
    mask_ = size - 1;
    ids_ = id_memory_.take<int32_t>(size);
    index_ = index_memory_.take<int32_t>(size);
    std::fill(ids_, ids_ + size, -1);
    for (int64_t i = 0; i < count; ++i) {
      if (ids[i] < 0 || ids[i] >= limit) continue;
      const int64_t at = probe(ids[i]);
      if (ids_[at] >= 0) continue;
      ids_[at] = ids[i];
      index_[at] = static_cast<int32_t>(i);
    }
  }
  // -1 if `id` is not in the top-k.
  int32_t find(int32_t id) const {
    const int64_t at = probe(id);
    return ids_[at] < 0 ? -1 : index_[at];
  }

 private:
  int64_t probe(int32_t id) const {
    int64_t at = static_cast<int64_t>(static_cast<uint32_t>(id) * 0x9e3779b1u >> 7) & mask_;
    while (ids_[at] >= 0 && ids_[at] != id) at = (at + 1) & mask_;
    return at;
  }

  Scratch id_memory_, index_memory_;
  int32_t* ids_ = nullptr;
  int32_t* index_ = nullptr;
  int64_t mask_ = 0;
};

bool is_permutation(const int32_t* order, int64_t count) {
  thread_local Scratch memory;
  uint8_t* seen = memory.take<uint8_t>(count);
  std::fill(seen, seen + count, uint8_t{0});
  for (int64_t i = 0; i < count; ++i) {
    if (order[i] < 0 || order[i] >= count || seen[order[i]]) return false;
    seen[order[i]] = 1;
  }
  return true;
}

// The top-k of all rows of a request are one list of `wanted` positions: what any row names is fetched once, and no row
// loses what another one names.
void update_request(const Args& a, int64_t request, FirstFault& fault) {
  thread_local FirstIndex first;
  thread_local Scratch evictable_memory, hit_memory;
  const Span span = rows_of(a, request);
  const int64_t wanted = (span.end - span.begin) * a.topk;
  const int32_t* ids = a.topk_ids + span.begin * a.topk;
  int32_t* slots = a.slots + span.begin * a.topk;
  int32_t* miss_ids = a.miss_ids + request * a.miss_capacity;
  int32_t* miss_slots = a.miss_slots + request * a.miss_capacity;
  std::fill(slots, slots + wanted, -1);
  std::fill(miss_ids, miss_ids + a.miss_capacity, -1);
  std::fill(miss_slots, miss_slots + a.miss_capacity, -1);
  a.miss_counts[request] = 0;
  const int64_t state = a.row_index[request];
  if (state < 0) return;

  int32_t* token = a.slot_to_token + state * a.capacity;
  int32_t* order = a.lru_order + state * a.capacity;
  if (a.last_generation[state] != a.generation[request]) {
    std::fill(token, token + a.capacity, -1);
    for (int64_t s = 0; s < a.capacity; ++s) order[s] = static_cast<int32_t>(s);
    a.last_generation[state] = a.generation[request];
  } else if (!is_permutation(order, a.capacity)) {
    return fault.report(state, request);
  }

  // 1. Walk the slots from the oldest: hits keep their slot, all others may be evicted.
  const int32_t stable = std::max(a.stable_prefix[request], 0);
  first.build(ids, wanted, stable);
  int32_t* evictable = evictable_memory.take<int32_t>(a.capacity);
  int32_t* hits = hit_memory.take<int32_t>(a.capacity);
  int64_t evictable_count = 0, hit_count = 0;
  for (int64_t i = 0; i < a.capacity; ++i) {
    const int32_t slot = order[i];
    if (token[slot] >= stable) token[slot] = -1;
    const int32_t at = token[slot] < 0 ? -1 : first.find(token[slot]);
    if (at >= 0 && slots[at] < 0) {
      slots[at] = slot;
      hits[hit_count++] = slot;
    } else {
      evictable[evictable_count++] = slot;
    }
  }

  // 2. Misses, in top-k order, take the oldest evictable slots; capacity >= wanted makes them suffice.
  int64_t misses = 0;
  for (int64_t i = 0; i < wanted; ++i) {
    const int32_t id = ids[i];
    if (id < 0) continue;
    if (id >= stable) {
      slots[i] = static_cast<int32_t>(a.capacity + (id - stable));
      continue;
    }
    const int32_t at = first.find(id);
    if (at != i) {
      slots[i] = slots[at];
    } else if (slots[i] < 0) {
      const int32_t slot = evictable[misses];
      token[slot] = id;
      slots[i] = slot;
      miss_ids[misses] = id;
      miss_slots[misses] = slot;
      ++misses;
    }
  }
  a.miss_counts[request] = static_cast<int32_t>(misses);

  // 3. New order: untouched slots, then this step's misses, then its hits.
  int32_t* next = std::copy(evictable + misses, evictable + evictable_count, order);
  next = std::copy(evictable, evictable + misses, next);
  std::copy(hits, hits + hit_count, next);
}

int check(const Args& a) {
  thread_local Scratch memory;
  uint8_t* named = memory.take<uint8_t>(a.state_rows);
  std::fill(named, named + a.state_rows, uint8_t{0});
  for (int64_t request = 0; request < a.requests; ++request) {
    const Span span = rows_of(a, request);
    const int64_t wanted = (span.end - span.begin) * a.topk;
    if (a.capacity < wanted || a.miss_capacity < wanted)
      return invalid("request %lld selects %lld positions in %lld rows; slot_to_token holds %lld slots, miss_ids %lld; "
                     "legal: at least as many of each",
                     static_cast<long long>(request), static_cast<long long>(wanted),
                     static_cast<long long>(span.end - span.begin), static_cast<long long>(a.capacity),
                     static_cast<long long>(a.miss_capacity));
    const int32_t state = a.row_index[request];
    if (state < 0) continue;
    if (state >= a.state_rows || named[state])
      return invalid("row_index[%lld] is %d; legal: negative (skip) or a row 0 to %lld that no other entry names",
                     static_cast<long long>(request), state, static_cast<long long>(a.state_rows - 1));
    named[state] = 1;
  }
  return SLUICE_OK;
}

int run(const Args& a) {
  if (a.query_ends != nullptr && check_query_ends("query_ends", a.query_ends, a.requests, a.rows, true))
    return SLUICE_INVALID;
  if (check(a)) return SLUICE_INVALID;
  FirstFault fault;
  parallel_for(a.threads, a.requests, [&](int64_t request) { update_request(a, request, fault); });
  if (fault)
    return invalid("lru_order[%lld] is not a permutation of 0 to %lld", static_cast<long long>(fault.where()),
                   static_cast<long long>(a.capacity - 1));
  return SLUICE_OK;
}

}  // namespace
}  // namespace sluice

extern "C" int sluice_lru_residency(const sluice_residency_args* args) {
  return sluice::enter(args, sluice::run);
}
