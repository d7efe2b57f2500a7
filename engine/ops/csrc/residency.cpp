// sluice_lru_residency: which selected positions are in the hot buffer, and which slots the others get.
#include <algorithm>
#include <climits>

#include "bits.h"
#include "error.h"
#include "kernels.h"
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

constexpr int64_t kMostWanted = 1 << 16;  // places in a request's top-k are kept in 16 bits: half the memory to touch

// A request's hot buffer and what it wants from it. Lookups are by bits and by passes over the slots in order, so that a
// buffer that is not in the processor's caches is read from memory once, forwards.
class HotBuffer {
 public:
  HotBuffer(const Args& a, int64_t state, int32_t stable)
      : kernel_(kernels()),
        token_(a.slot_to_token + state * a.capacity),
        used_(a.last_used + state * a.capacity),
        clock_(a.clock[state]),
        capacity_(a.capacity),
        stable_(stable) {}

  void clear() {
    std::fill(token_, token_ + capacity_, -1);
    std::fill(used_, used_ + capacity_, 0);
    clock_ = 0;
  }

  bool cached(int32_t id) const { return static_cast<uint32_t>(id) < static_cast<uint32_t>(stable_); }

  // Finds which of the ids (at most kMostWanted) are hits: slots[i] becomes their slot, -1 for all others. An id named
  // again is only looked up at its first place; returns whether there is one.
  bool look_up(const int32_t* ids, int64_t count, int32_t* slots) {
    Buffers& buffers = memory();
    tick();
    uint64_t* wanted = buffers.wanted.take<uint64_t>(bit_words(stable_) + 1);
    place_ = buffers.place.take<uint16_t>(stable_);
    int32_t* hit_tokens = buffers.tokens.take<int32_t>(capacity_ + 16);
    int32_t* hit_slots = buffers.slots.take<int32_t>(capacity_ + 16);
    clear_bits(wanted, stable_ + 1);
    uint64_t repeated = 0;
    uint16_t* const place = place_;
    const uint32_t stable = static_cast<uint32_t>(stable_);
    for (int64_t i = count - 1; i >= 0; --i) {  // backwards: the first place of an id stays
      const uint32_t id = static_cast<uint32_t>(ids[i]);
      if (id >= stable) continue;
      const uint64_t bit = uint64_t{1} << (id & 63), old = wanted[id >> 6];
      repeated |= old & bit;
      wanted[id >> 6] = old | bit;
      place[id] = static_cast<uint16_t>(i);
    }
    const int64_t hits = kernel_.match_slots({token_, used_, reinterpret_cast<const int32_t*>(wanted), capacity_,
                                              stable_, clock_, hit_tokens, hit_slots, &oldest_});
    std::fill(slots, slots + count, -1);
    for (int64_t i = 0; i < hits; ++i) slots[place[hit_tokens[i]]] = hit_slots[i];
    return repeated != 0;
  }

  // The place of an id's first occurrence.
  int64_t place(int32_t id) const { return place_[id]; }

  // The `count` slots that have not been used for longest, by rising slot; ties go to the lowest slots. Null if so many
  // are not older than this call, which takes a caller that wrote to the state.
  const int32_t* victims(int64_t count) {
    thread_local Scratch slot_memory, histogram_memory;
    int32_t* slots = slot_memory.take<int32_t>(capacity_ + 16);
    int64_t span = kFirstSpan, found = 0;  // of times from the oldest on: those last used then are candidates
    const int64_t latest = int64_t{clock_} - 1 - oldest_;  // beyond it are this call's hits
    for (;; span *= 8) {
      span = std::min(span, latest);
      found = kernel_.list_up_to(used_, capacity_, static_cast<int32_t>(oldest_ + span - 1), slots);
      if (found >= count) break;
      if (span == latest) return nullptr;
    }
    // The `count` oldest of the candidates: up to time `last`, and of those used then only the first `ties`.
    int64_t last = 0, ties = count;
    if (span <= kHistogram) {
      int32_t* histogram = histogram_memory.take<int32_t>(span);
      std::fill(histogram, histogram + span, 0);
      for (int64_t i = 0; i < found; ++i) ++histogram[used_[slots[i]] - oldest_];
      while (ties > histogram[last]) ties -= histogram[last++];
      last += oldest_;
    } else {
      int32_t* times = histogram_memory.take<int32_t>(found);
      for (int64_t i = 0; i < found; ++i) times[i] = used_[slots[i]];
      std::nth_element(times, times + (count - 1), times + found);
      last = times[count - 1];
      ties = count - std::count_if(times, times + count, [&](int32_t time) { return time < last; });
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < found; ++i) {
      const int64_t time = used_[slots[i]];
      const bool tie = time == last, taken = time < last || (tie && ties > 0);
      ties -= tie;
      slots[kept] = slots[i];
      kept += taken;
    }
    return slots;
  }

  void fill(int32_t slot, int32_t id) {
    token_[slot] = id;
    used_[slot] = clock_ - 1;  // a miss is older than a hit of the same call
  }

 private:
  static constexpr int64_t kFirstSpan = 8, kHistogram = 4096;

  struct Buffers {
    Scratch wanted, place, tokens, slots;
  };
  static Buffers& memory() {
    thread_local Buffers buffers;
    return buffers;
  }

  void tick() {
    if (clock_ > INT32_MAX - 2) {
      const int32_t least = *std::min_element(used_, used_ + capacity_);
      for (int64_t s = 0; s < capacity_; ++s) used_[s] -= least;
      clock_ -= least;
    }
    clock_ += 2;
  }

  const Kernels& kernel_;
  int32_t* token_;
  int32_t* used_;
  int32_t& clock_;
  const int64_t capacity_;
  const int32_t stable_;
  int32_t oldest_ = 0;
  uint16_t* place_ = nullptr;
};

// The top-k of all rows of a request are one list of `wanted` positions: what any row names is fetched once, and no row
// loses what another one names.
void update_request(const Args& a, int64_t request, FirstFault& fault) {
  thread_local Scratch place_memory;
  const Span span = rows_of(a, request);
  const int64_t wanted = (span.end - span.begin) * a.topk;
  const int32_t* ids = a.topk_ids + span.begin * a.topk;
  int32_t* slots = a.slots + span.begin * a.topk;
  int32_t* miss_ids = a.miss_ids + request * a.miss_capacity;
  int32_t* miss_slots = a.miss_slots + request * a.miss_capacity;
  int64_t misses = 0, cached = 0;
  auto pad = [&] {
    std::fill(miss_ids + misses, miss_ids + a.miss_capacity, -1);
    std::fill(miss_slots + misses, miss_slots + a.miss_capacity, -1);
    a.miss_counts[request] = static_cast<int32_t>(misses);
    a.hit_counts[request] = static_cast<int32_t>(cached - misses);
  };
  const int64_t state = a.row_index[request];
  if (state < 0) {
    std::fill(slots, slots + wanted, -1);
    return pad();
  }

  const int32_t stable = std::max(a.stable_prefix[request], 0);
  HotBuffer hot(a, state, stable);
  if (a.last_generation[state] != a.generation[request]) {
    hot.clear();
    a.last_generation[state] = a.generation[request];
  }
  const bool repeated = hot.look_up(ids, wanted, slots);

  // Misses, in top-k order, get the victims' slots; capacity >= wanted makes them suffice.
  int32_t* places = place_memory.take<int32_t>(wanted + 1);
  bool tail = false;
  for (int64_t i = 0; i < wanted; ++i) {
    tail |= ids[i] >= stable;
    places[misses] = static_cast<int32_t>(i);
    cached += hot.cached(ids[i]);
    misses += hot.cached(ids[i]) & (slots[i] < 0);
  }
  if (repeated)
    misses = std::remove_if(places, places + misses, [&](int32_t i) { return hot.place(ids[i]) != i; }) - places;
  if (misses > 0) {
    const int32_t* victims = hot.victims(misses);
    if (victims == nullptr) return fault.report(state, request);
    for (int64_t j = 0; j < misses; ++j) {
      const int32_t id = ids[places[j]];
      hot.fill(victims[j], id);
      miss_ids[j] = id;
      miss_slots[j] = slots[places[j]] = victims[j];
    }
  }
  if (repeated || tail)
    for (int64_t i = 0; i < wanted; ++i) {
      if (ids[i] >= stable)
        slots[i] = static_cast<int32_t>(a.capacity + (ids[i] - stable));
      else if (ids[i] >= 0)
        slots[i] = slots[hot.place(ids[i])];
    }
  pad();
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
    if (wanted > kMostWanted)
      return invalid("request %lld selects %lld positions; legal: at most %lld", static_cast<long long>(request),
                     static_cast<long long>(wanted), static_cast<long long>(kMostWanted));
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
    return invalid("last_used[%lld] holds times later than the row's clock; legal: what earlier calls left there",
                   static_cast<long long>(fault.where()));
  return SLUICE_OK;
}

}  // namespace
}  // namespace sluice

extern "C" int sluice_lru_residency(const sluice_residency_args* args) {
  return sluice::enter(args, sluice::run);
}
