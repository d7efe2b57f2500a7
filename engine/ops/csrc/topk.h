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

  // Leaves min(k, pushed) entries, best first; returns how many.
  int64_t finish() {
    if (count_ > k_) prune();
    std::sort(best_, best_ + count_, std::greater<uint64_t>());
    return count_;
  }

 private:
  void prune() {
    std::nth_element(best_, best_ + (k_ - 1), best_ + count_, std::greater<uint64_t>());
    count_ = k_;
    const uint32_t bits = static_cast<uint32_t>(best_[k_ - 1] >> 32);
    if (bits == 0) return;  // the k-th is NaN: anything may still beat it
    const uint32_t raw = bits & 0x80000000u ? bits ^ 0x80000000u : ~bits;
    std::memcpy(&bar_, &raw, 4);
    full_ = true;
  }

  uint64_t* best_ = nullptr;
  int64_t k_ = 0, room_ = 0, count_ = 0;
  bool full_ = false;
  float bar_ = 0.0f;
};

}  // namespace sluice
