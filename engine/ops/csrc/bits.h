// Sets of positions as bits.
#pragma once

#include <algorithm>
#include <cstdint>

namespace sluice {

inline int64_t bit_words(int64_t positions) { return (positions + 63) / 64; }
inline void clear_bits(uint64_t* bits, int64_t positions) { std::fill(bits, bits + bit_words(positions), uint64_t{0}); }
inline void set_bit(uint64_t* bits, int64_t position) { bits[position >> 6] |= uint64_t{1} << (position & 63); }
inline bool has_bit(const uint64_t* bits, int64_t position) { return bits[position >> 6] >> (position & 63) & 1; }

// Calls each(position) for every bit of word(w), w < words, in ascending order.
template <typename Word, typename Each>
inline void for_bits(int64_t words, const Word& word, const Each& each) {
  for (int64_t w = 0; w < words; ++w)
    for (uint64_t left = word(w); left != 0; left &= left - 1) each(w * 64 + __builtin_ctzll(left));
}

}  // namespace sluice
