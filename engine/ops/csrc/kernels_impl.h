// Bodies of the kernels. No include guard: included once per instruction set, in a namespace of its own, with
// SLUICE_LANES (floats per vector register), SLUICE_BLOCK (rows multiplied together with two vectors of heads; divides
// the tiles) and SLUICE_ISA_NAME defined, and SLUICE_HAS_DOT where there are products of bfloat16 pairs and int8 quads.
// But for those, rounding to half precision, looking slots up and prefetching only compiler vector extensions are used, so the same text
// serves x86 and aarch64.

constexpr int kLanes = SLUICE_LANES;
constexpr int kBlock = SLUICE_BLOCK;

typedef float vec __attribute__((vector_size(SLUICE_LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(SLUICE_LANES * 4)));
typedef float loose_vec __attribute__((vector_size(SLUICE_LANES * 4), aligned(4), may_alias));
typedef int32_t loose_ivec __attribute__((vector_size(SLUICE_LANES * 4), aligned(4), may_alias));

#if defined(__aarch64__)
typedef __fp16 half;  // g++ knows _Float16 there from version 13 on only
#else
typedef _Float16 half;
#endif

inline vec load(const float* p) { return *reinterpret_cast<const loose_vec*>(p); }
inline void store(float* p, vec v) { *reinterpret_cast<loose_vec*>(p) = v; }
inline ivec load(const int32_t* p) { return *reinterpret_cast<const loose_ivec*>(p); }
inline vec splat(float x) { return x - vec{}; }

inline float from_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = to_bits(value);
  return static_cast<uint16_t>(value != value ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

void widen(const void* src, int64_t dtype, float* dst, int64_t count) {
  if (dtype == SLUICE_FLOAT32) {
    __builtin_memcpy(dst, src, static_cast<uint64_t>(count) * 4);
  } else if (dtype == SLUICE_BFLOAT16) {
    const uint16_t* from = static_cast<const uint16_t*>(src);
    for (int64_t i = 0; i < count; ++i) dst[i] = from_bits(static_cast<uint32_t>(from[i]) << 16);
  } else if (dtype == SLUICE_FLOAT16) {
    const half* from = static_cast<const half*>(src);
    for (int64_t i = 0; i < count; ++i) dst[i] = static_cast<float>(from[i]);
  } else {
    const int8_t* from = static_cast<const int8_t*>(src);
    for (int64_t i = 0; i < count; ++i) dst[i] = static_cast<float>(from[i]);
  }
}

void narrow(const float* src, float factor, int64_t dtype, void* dst, int64_t count) {
  if (dtype == SLUICE_FLOAT32) {
    float* to = static_cast<float*>(dst);
    for (int64_t i = 0; i < count; ++i) to[i] = src[i] * factor;
  } else if (dtype == SLUICE_BFLOAT16) {
    uint16_t* to = static_cast<uint16_t*>(dst);
    for (int64_t i = 0; i < count; ++i) to[i] = to_bfloat16(src[i] * factor);
  } else {
    half* to = static_cast<half*>(dst);
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<half>(src[i] * factor);
  }
}

// exp(x) for x <= 0, relative error below 2e-7; 0 below -87.
inline vec exp_of(vec x) {
  const vec floor_x = splat(-87.3f);
  const auto tiny = x < floor_x;
  x = tiny ? floor_x : x;
  const vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vec n = (x * 1.44269504088896341f + magic) - magic;
  const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // x - n ln 2, ln 2 split in two
  vec y = splat(1.9875691500e-4f);                            // minimax polynomial of (e^r - 1 - r) / r^2
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
  vec two_n;
  __builtin_memcpy(&two_n, &power, sizeof two_n);
  const vec result = y * two_n;
  return tiny ? vec{} : result;
}

// Rounds to half precision and back.
inline vec through_half(vec x) {
#if SLUICE_LANES == 16
  return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif SLUICE_LANES == 8
  return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  for (int i = 0; i < kLanes; ++i) x[i] = static_cast<float>(static_cast<half>(x[i]));
  return x;
#endif
}

// Copies a row past the caches where it can: for rows that are not read again soon. stream_end() makes them visible.
void stream_row(const char* from, char* to, int64_t bytes) {
#if SLUICE_LANES == 16
  if (reinterpret_cast<uintptr_t>(to) % 64 == 0 && bytes % 64 == 0) {
    for (int64_t at = 0; at < bytes; at += 64)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
    return;
  }
#elif SLUICE_LANES == 8
  if (reinterpret_cast<uintptr_t>(to) % 32 == 0 && bytes % 32 == 0) {
    for (int64_t at = 0; at < bytes; at += 32)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at)));
    return;
  }
#endif
  __builtin_memcpy(to, from, static_cast<uint64_t>(bytes));
}

void stream_end() {
#if SLUICE_LANES >= 8
  _mm_sfence();
#endif
}

// How words of one format are multiplied: Sum is a vector of sums, Word what is broadcast.
struct FloatWords {
  typedef float Word;
  typedef vec Sum;
  static constexpr int kElements = 1;
  static Sum zero() { return vec{}; }
  static Sum add(Sum sum, const Word* heads, Word key) { return sum + load(heads) * key; }
  static vec value(Sum sum) { return sum; }
};

#ifdef SLUICE_HAS_DOT
struct Bfloat16Words {
  typedef uint32_t Word;
  typedef vec Sum;
  static constexpr int kElements = 2;
  static Sum zero() { return vec{}; }
  static Sum add(Sum sum, const Word* heads, Word key) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(heads),
                            (__m512bh)_mm512_set1_epi32(static_cast<int>(key)));
  }
  static vec value(Sum sum) { return sum; }
};

struct Int8Words {
  typedef uint32_t Word;
  typedef __m512i Sum;
  static constexpr int kElements = 4;
  static Sum add(Sum sum, const Word* heads, Word key) {
    return _mm512_dpbusd_epi32(sum, _mm512_set1_epi32(static_cast<int>(key)), _mm512_loadu_si512(heads));
  }
  static vec value(Sum sum) { return _mm512_cvtepi32_ps(sum); }
};
#endif

// sum[k][v] += the products of V vectors of heads (at heads, heads + stride) with kBlock rows over `words` words;
// word(k, w) is the w-th word of row k.
template <typename Words, int V, typename At>
inline void multiply(const typename Words::Word* heads, int64_t stride, int64_t words, const At& word,
                     typename Words::Sum (&sum)[kBlock][V]) {
  for (int64_t w = 0; w < words; ++w) {
    for (int k = 0; k < kBlock; ++k) {
      const typename Words::Word key = word(k, w);
      for (int v = 0; v < V; ++v) sum[k][v] = Words::add(sum[k][v], heads + v * stride + w * kLanes, key);
    }
  }
}

#include "kernels_attend.h"
#include "kernels_score.h"
#include "kernels_slots.h"

constexpr Kernels kTable = {
    SLUICE_ISA_NAME,
    kLanes,
    widen,
    narrow,
    stream_row,
    stream_end,
    index_scores<FloatWords, false>,
#ifdef SLUICE_HAS_DOT
    index_scores<Bfloat16Words, false>,
    index_scores<FloatWords, true>,
    index_scores<Int8Words, true>,
    attend_tile<FloatWords>,
    attend_tile<Bfloat16Words>,
#else
    nullptr,
    index_scores<FloatWords, true>,
    nullptr,
    attend_tile<FloatWords>,
    nullptr,
#endif
    match_slots,
    list_up_to,
};
