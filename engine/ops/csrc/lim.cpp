// sluice_lightning_indexer_manage (LIM, for int8 LIM C8): select each row's top-k and keep the request's map of hot slots
// up to date.
#include <algorithm>
#include <climits>

#include "bits.h"
#include "error.h"
#include "parallel.h"
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
  int32_t* slot_of;      // [pool_width], hot slot of each source position, negative: not resident
  uint64_t* resident;    // bits of [0, stable): what is resident when the call begins
  const float* totals;   // [row tiles, totals_stride]: score of each position, summed over the rows of a tile
  int64_t totals_stride;

  Request(const Args& args, int64_t i, uint64_t* resident_bits, const float* score_totals, int64_t stride)
      : a(args),
        index(i),
        begin(i ? args.query_ends[i - 1] : 0),
        end(args.query_ends[i]),
        state(args.states[i]),
        stable(args.stable_lens[i]),
        capacity(args.cache_tokens[i]),
        keys(args.key_lens[i]),
        slot_of(args.slots_pool + args.pool_entries[i] * args.pool_width),
        resident(resident_bits),
        totals(score_totals),
        totals_stride(stride) {}

  int64_t rows() const { return end - begin; }
  int32_t* sources(int64_t row) const { return a.topk_src_ids + row * a.topk; }
  int32_t* slots(int64_t row) const { return a.topk_dst_slots + row * a.topk; }
  float* scores(int64_t row) const { return a.topk_scores + row * a.topk; }
  int32_t* miss_sources() const { return a.miss_src_ids + index * a.miss_capacity; }
  int32_t* miss_slots() const { return a.miss_dst_slots + index * a.miss_capacity; }
};

bool is_identity(const Request& r) {
  for (int64_t s = 0; s < r.a.pool_width; ++s)
    if (r.slot_of[s] != s) return false;
  return true;
}

// Whether there are exactly `capacity` residents, all below `stable`, their slots a bijection on [0, capacity). Sets
// `resident` to them.
bool is_bijection(const Request& r) {
  thread_local Scratch memory;
  uint64_t* taken = memory.take<uint64_t>(bit_words(r.capacity));
  clear_bits(taken, r.capacity);
  int32_t outside = -1;  // negative while everything from `stable` on is
  for (int64_t s = r.stable; s < r.a.pool_width; ++s) outside &= r.slot_of[s];
  if (outside >= 0) return false;
  for (int64_t s = 0; s < r.stable; s += 64) {
    const int64_t end = std::min<int64_t>(s + 64, r.stable);
    uint64_t word = 0;
    for (int64_t at = s; at < end; ++at) word |= static_cast<uint64_t>(r.slot_of[at] >= 0) << (at - s);
    r.resident[s / 64] = word;
  }
  int64_t residents = 0;
  bool legal = true;
  for_bits(bit_words(r.stable), [&](int64_t w) { return r.resident[w]; }, [&](int64_t s) {
    const int32_t slot = r.slot_of[s];
    if (slot >= r.capacity || has_bit(taken, slot)) {
      legal = false;
      return;
    }
    set_bit(taken, slot);
    ++residents;
  });
  return legal && residents == r.capacity;
}

// Returns whether the request keeps the operator's preconditions. In state -1 it then sets `resident` (an identity row is
// cut to its first `capacity` positions).
bool admit(const Request& r) {
  const int64_t rows = r.rows(), topk = r.a.topk, block = r.a.block_size;
  if (r.keys < rows || r.keys > r.a.pool_width) return false;
  if (r.state == kNotOffloaded) return true;
  if (r.state != kFirstDecode && r.state != kSteady) return false;
  if (r.stable < topk || r.capacity > r.stable || r.stable > r.keys) return false;
  if (r.stable % block || r.capacity % block || r.stable > (r.keys - rows) / block * block) return false;
  if (r.capacity > r.a.miss_capacity) return false;
  if (r.stable <= rows * topk ? r.capacity != r.stable : r.capacity < rows * topk) return false;
  if (r.state == kFirstDecode) return true;
  if (!is_identity(r)) return is_bijection(r);
  std::fill(r.slot_of + r.capacity, r.slot_of + r.a.pool_width, kNoSlot);
  clear_bits(r.resident, r.stable);
  for (int64_t s = 0; s < r.capacity; ++s) set_bit(r.resident, s);
  return true;
}

void refuse(const Request& r) {
  r.a.miss_counts[r.index] = 0;
  for (int64_t row = r.begin; row < r.end; ++row) {
    std::fill(r.sources(row), r.sources(row) + r.a.topk, -1);
    std::fill(r.slots(row), r.slots(row) + r.a.topk, -1);
    if (r.a.topk_scores != nullptr)
      std::fill(r.scores(row), r.scores(row) + r.a.topk, -__builtin_inff());
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

// The positions in some row's top-k, as bits of [0, stable).
uint64_t* union_of_rows(const Request& r) {
  thread_local Scratch memory;
  uint64_t* members = memory.take<uint64_t>(bit_words(r.stable));
  clear_bits(members, r.stable);
  for (int64_t row = r.begin; row < r.end; ++row)
    for (int64_t i = 0; i < r.a.topk; ++i) set_bit(members, r.sources(row)[i]);
  return members;
}

// Orders every row: its misses, then the others, each ascending; writes their slots and, if asked, scores. Everything in
// a row must have a slot by now.
template <typename IsHit>
void order_rows(const Request& r, const IsHit& hits) {
  thread_local Scratch bit_memory, score_memory;
  uint64_t* mine = bit_memory.take<uint64_t>(bit_words(r.stable));
  float* score_of_position = r.a.topk_scores == nullptr ? nullptr : score_memory.take<float>(r.stable);
  for (int64_t row = r.begin; row < r.end; ++row) {
    int32_t* ids = r.sources(row);
    clear_bits(mine, r.stable);
    for (int64_t i = 0; i < r.a.topk; ++i) {
      set_bit(mine, ids[i]);
      if (score_of_position != nullptr) score_of_position[ids[i]] = r.scores(row)[i];
    }
    int32_t* slots = r.slots(row);
    int64_t count = 0;
    auto put = [&](int64_t s) {
      ids[count] = static_cast<int32_t>(s);
      slots[count] = r.slot_of[s];
      if (score_of_position != nullptr) r.scores(row)[count] = score_of_position[s];
      ++count;
    };
    for_bits(bit_words(r.stable), [&](int64_t w) { return mine[w] & ~hits(w); }, put);
    r.a.topk_miss_counts[row] = static_cast<int32_t>(count);
    for_bits(bit_words(r.stable), [&](int64_t w) { return mine[w] & hits(w); }, put);
  }
}

// State -2: fill the hot buffer with the rows' top-k, then with the lowest other positions.
void first_decode(const Request& r) {
  const uint64_t* members = union_of_rows(r);
  int32_t* sources = r.miss_sources();
  int32_t* slots = r.miss_slots();
  std::fill(r.slot_of, r.slot_of + r.a.pool_width, kNoSlot);
  int32_t count = 0;
  auto put = [&](int64_t s) {
    if (count == r.capacity || s >= r.stable) return;
    sources[count] = static_cast<int32_t>(s);
    slots[count] = r.slot_of[s] = count;
    ++count;
  };
  for_bits(bit_words(r.stable), [&](int64_t w) { return members[w]; }, put);
  for_bits(bit_words(r.stable), [&](int64_t w) { return count == r.capacity ? 0 : ~members[w]; }, put);
  r.a.miss_counts[r.index] = count;
  order_rows(r, [](int64_t) { return uint64_t{0}; });
}

// The `count` residents outside every row's top-k with the lowest score summed over the rows, as ranks, lowest first.
const uint64_t* pick_victims(const Request& r, const uint64_t* members, int64_t count) {
  thread_local Scratch rank_memory;
  uint64_t* ranks = rank_memory.take<uint64_t>(r.capacity);
  const int64_t tiles = row_tiles(r.rows());
  int64_t found = 0;
  for_bits(bit_words(r.stable), [&](int64_t w) { return r.resident[w] & ~members[w]; }, [&](int64_t s) {
    float total = r.totals[s];
    for (int64_t t = 1; t < tiles; ++t) total += r.totals[t * r.totals_stride + s];
    ranks[found++] = rank_of(total, static_cast<uint32_t>(s));
  });
  if (count < found) std::nth_element(ranks, ranks + count, ranks + found);
  std::sort(ranks, ranks + count);
  return ranks;
}

// State -1: misses take the slots of victims.
void steady(const Request& r) {
  const uint64_t* members = union_of_rows(r);
  int32_t* sources = r.miss_sources();
  int32_t count = 0;
  for_bits(bit_words(r.stable), [&](int64_t w) { return members[w] & ~r.resident[w]; },
           [&](int64_t s) { sources[count++] = static_cast<int32_t>(s); });
  r.a.miss_counts[r.index] = count;
  if (count > 0) {
    const uint64_t* victims = pick_victims(r, members, count);
    for (int32_t j = 0; j < count; ++j) {
      int32_t& freed = r.slot_of[position_of(victims[j])];
      r.miss_slots()[j] = r.slot_of[sources[j]] = freed;
      freed = kNoSlot;
    }
  }
  order_rows(r, [&](int64_t w) { return r.resident[w]; });
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
  thread_local Scratch legal_memory, searched_memory, first_memory, resident_memory, total_memory;
  uint8_t* legal = legal_memory.take<uint8_t>(a.requests);
  int32_t* searched = searched_memory.take<int32_t>(a.requests);
  int64_t* first_tile = first_memory.take<int64_t>(a.requests);
  const int64_t words = bit_words(a.pool_width);
  uint64_t* resident = resident_memory.take<uint64_t>(a.requests * words);
  int64_t tiles = 0, stride = 0;
  for (int64_t i = 0; i < a.requests; ++i) {
    first_tile[i] = tiles;
    tiles += row_tiles(a.query_ends[i] - (i ? a.query_ends[i - 1] : 0));
    stride = std::max<int64_t>(stride, std::min<int64_t>(a.key_lens[i], a.pool_width));
  }
  float* totals = total_memory.take<float>(tiles * stride);
  auto request_of = [&](int64_t i) { return Request(a, i, resident + i * words, totals + first_tile[i] * stride, stride); };
  parallel_for(a.threads, a.requests, [&](int64_t i) {
    const Request request = request_of(i);
    legal[i] = admit(request);
    searched[i] = !legal[i] ? 0 : request.state == kNotOffloaded ? kCausal : request.stable;
  });

  // Only rows of state -3 come out by falling score; the others are put in order below.
  const bool ordered = std::find(a.states, a.states + a.requests, kNotOffloaded) != a.states + a.requests;
  if (select_topk(IndexBatch::of(a, a.weights_dtype),
                  {searched, ordered, a.topk_src_ids, a.topk_scores, totals, stride}))
    return SLUICE_INVALID;

  parallel_for(a.threads, a.requests, [&](int64_t i) {
    const Request request = request_of(i);
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
