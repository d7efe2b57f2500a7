// Running top-k over a stream of scores: highest score first, ties to the lowest position, NaN last.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>

namespace sluice {

// A (score, position) pair as one integer that is larger for the better pair.
inline uint64_t rank_of(float score, uint32_t position) {
  const float value = score + 0.0f;  // -0 and +0 tie
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits ^= static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u;
  if (value != value) bits = 0;
  return static_cast<uint64_t>(bits) << 32 | (0xffffffffu - position);
}

inline int32_t position_of(uint64_t rank) { return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(rank)); }

inline float score_of(uint64_t rank) {
  const uint32_t bits = static_cast<uint32_t>(rank >> 32);
  const uint32_t raw = bits == 0 ? 0x7fc00000u : bits & 0x80000000u ? bits ^ 0x80000000u : ~bits;
  float score;
  std::memcpy(&score, &raw, 4);
  return score;
}

// Leaves the best min(k, count) ranks first, sorted if `ordered`; returns how many.
inline int64_t keep_best(uint64_t* ranks, int64_t count, int64_t k, bool ordered) {
  if (count > k) std::nth_element(ranks, ranks + (k - 1), ranks + count, std::greater<uint64_t>());
  count = std::min(count, k);
  if (ordered) std::sort(ranks, ranks + count, std::greater<uint64_t>());
  return count;
}

// Keeps at least the best k of what was pushed, in `room(k)` integers of the caller's memory. Positions must be pushed
// in ascending order.
class RunningTopK {
 public:
  static int64_t room(int64_t k) { return std::max<int64_t>(2 * k, 256); }

  void reset(uint64_t* memory, int64_t k) {
    best_ = memory;
    k_ = k;
    room_ = room(k);
    count_ = 0;
    full_ = false;
  }

  void push(int64_t first_position, const float* scores, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      if (full_ && !(scores[i] > bar_)) continue;  // an equal score loses: its position is higher
      if (count_ == room_) prune();
      best_[count_++] = rank_of(scores[i], static_cast<uint32_t>(first_position + i));
    }
  }

  // Leaves min(k, pushed) entries, best first if `ordered`; returns how many.
  int64_t finish(bool ordered) { return count_ = keep_best(best_, count_, k_, ordered); }

 private:
  void prune() {
    count_ = keep_best(best_, count_, k_, false);
    if (best_[k_ - 1] >> 32 == 0) return;  // the k-th is NaN: anything may still beat it
    bar_ = score_of(best_[k_ - 1]);
    full_ = true;
  }

  uint64_t* best_ = nullptr;
  int64_t k_ = 0, room_ = 0, count_ = 0;
  bool full_ = false;
  float bar_ = 0.0f;
};

}  // namespace sluice
