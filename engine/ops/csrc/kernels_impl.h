// Bodies of the kernels. No include guard: included once per instruction set, in a namespace of its own, with
// SLUICE_LANES (floats per vector register), SLUICE_HEAD_BLOCK (heads accumulated together in registers) and
// SLUICE_ISA_NAME defined.
// Only compiler vector extensions are used, so the same text serves x86 and aarch64.

constexpr int kLanes = SLUICE_LANES;
constexpr int kVectors = static_cast<int>(kKeyTile) / kLanes;

typedef float vec __attribute__((vector_size(SLUICE_LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(SLUICE_LANES * 4)));
typedef float loose_vec __attribute__((vector_size(SLUICE_LANES * 4), aligned(4), may_alias));

#if defined(__aarch64__)
typedef __fp16 half;  // g++ knows _Float16 there from version 13 on only
#else
typedef _Float16 half;
#endif

inline vec load(const float* p) { return *reinterpret_cast<const loose_vec*>(p); }
inline void store(float* p, vec v) { *reinterpret_cast<loose_vec*>(p) = v; }
inline vec splat(float x) { return x - vec{}; }

inline float from_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

void widen(const void* src, int64_t dtype, float* dst, int64_t count) {
  if (dtype == SLUICE_FLOAT32) {
    __builtin_memcpy(dst, src, static_cast<uint64_t>(count) * 4);
  } else if (dtype == SLUICE_BFLOAT16) {
    const uint16_t* from = static_cast<const uint16_t*>(src);
    for (int64_t i = 0; i < count; ++i) dst[i] = from_bits(static_cast<uint32_t>(from[i]) << 16);
  } else {
    const half* from = static_cast<const half*>(src);
    for (int64_t i = 0; i < count; ++i) dst[i] = static_cast<float>(from[i]);
  }
}

void narrow(const float* src, float factor, int64_t dtype, void* dst, int64_t count) {
  if (dtype == SLUICE_FLOAT32) {
    float* to = static_cast<float*>(dst);
    for (int64_t i = 0; i < count; ++i) to[i] = src[i] * factor;
  } else if (dtype == SLUICE_BFLOAT16) {
    uint16_t* to = static_cast<uint16_t*>(dst);
    for (int64_t i = 0; i < count; ++i) {
      float value = src[i] * factor;
      uint32_t bits;
      __builtin_memcpy(&bits, &value, 4);
      uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
      to[i] = static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
    }
  } else {
    half* to = static_cast<half*>(dst);
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<half>(src[i] * factor);
  }
}

// Interleaves the lower (upper) halves of a and b; log2(kLanes) rounds of it transpose a square of vectors.
#if SLUICE_LANES == 16
inline vec zip_low(vec a, vec b) {
  return __builtin_shuffle(a, b, ivec{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
}
inline vec zip_high(vec a, vec b) {
  return __builtin_shuffle(a, b, ivec{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
}
#elif SLUICE_LANES == 8
inline vec zip_low(vec a, vec b) { return __builtin_shuffle(a, b, ivec{0, 8, 1, 9, 2, 10, 3, 11}); }
inline vec zip_high(vec a, vec b) { return __builtin_shuffle(a, b, ivec{4, 12, 5, 13, 6, 14, 7, 15}); }
#else
inline vec zip_low(vec a, vec b) { return __builtin_shuffle(a, b, ivec{0, 4, 1, 5}); }
inline vec zip_high(vec a, vec b) { return __builtin_shuffle(a, b, ivec{2, 6, 3, 7}); }
#endif

void pack(const float* rows, int64_t stride, float* packed) {
  for (int64_t k = 0; k < kKeyTile; k += kLanes) {
    for (int64_t d = 0; d < stride; d += kLanes) {
      vec square[kLanes], next[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = load(rows + (k + i) * stride + d);
      for (int round = 1; round < kLanes; round *= 2) {
        for (int i = 0; i < kLanes / 2; ++i) {
          next[2 * i] = zip_low(square[i], square[i + kLanes / 2]);
          next[2 * i + 1] = zip_high(square[i], square[i + kLanes / 2]);
        }
        for (int i = 0; i < kLanes; ++i) square[i] = next[i];
      }
      for (int i = 0; i < kLanes; ++i) store(packed + (d + i) * kKeyTile + k, square[i]);
    }
  }
}

// acc[h][v] = dot products of H heads with 2 vectors of keys starting at packed[.][0].
template <int H>
inline void dot_block(const float* q, int64_t dims, const float* packed, vec (&acc)[H][2]) {
  for (int h = 0; h < H; ++h) acc[h][0] = acc[h][1] = vec{};
  for (int64_t d = 0; d < dims; ++d) {
    const vec k0 = load(packed + d * kKeyTile), k1 = load(packed + d * kKeyTile + kLanes);
    for (int h = 0; h < H; ++h) {
      const float x = q[h * dims + d];
      acc[h][0] += x * k0;
      acc[h][1] += x * k1;
    }
  }
}

template <int H>
inline void dots_of(const float* q, int64_t dims, const float* packed, float* out) {
  for (int v = 0; v < kVectors; v += 2) {
    vec acc[H][2];
    dot_block<H>(q, dims, packed + v * kLanes, acc);
    for (int h = 0; h < H; ++h) {
      store(out + h * kKeyTile + v * kLanes, acc[h][0]);
      store(out + h * kKeyTile + (v + 1) * kLanes, acc[h][1]);
    }
  }
}

void dots(const float* q, int64_t heads, int64_t dims, const float* packed, float* out) {
  int64_t h = 0;
  for (; h + SLUICE_HEAD_BLOCK <= heads; h += SLUICE_HEAD_BLOCK)
    dots_of<SLUICE_HEAD_BLOCK>(q + h * dims, dims, packed, out + h * kKeyTile);
  for (; h + 2 <= heads; h += 2) dots_of<2>(q + h * dims, dims, packed, out + h * kKeyTile);
  for (; h < heads; ++h) dots_of<1>(q + h * dims, dims, packed, out + h * kKeyTile);
}

template <int H>
inline void score_block(const float* q, const float* weights, int64_t dims, const float* packed, vec (&score)[2]) {
  vec acc[H][2];
  dot_block<H>(q, dims, packed, acc);
  for (int h = 0; h < H; ++h) {
    score[0] += weights[h] * (acc[h][0] < 0.0f ? vec{} : acc[h][0]);
    score[1] += weights[h] * (acc[h][1] < 0.0f ? vec{} : acc[h][1]);
  }
}

void index_scores(const float* q, const float* weights, int64_t heads, int64_t dims, const float* packed, float* out) {
  for (int v = 0; v < kVectors; v += 2) {
    vec score[2] = {};
    const float* keys = packed + v * kLanes;
    int64_t h = 0;
    for (; h + SLUICE_HEAD_BLOCK <= heads; h += SLUICE_HEAD_BLOCK)
      score_block<SLUICE_HEAD_BLOCK>(q + h * dims, weights + h, dims, keys, score);
    for (; h < heads; ++h) score_block<1>(q + h * dims, weights + h, dims, keys, score);
    store(out + v * kLanes, score[0]);
    store(out + (v + 1) * kLanes, score[1]);
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

float softmax(float* scores, int64_t count, float scale, float* peak, float* total) {
  for (int64_t k = count; k < kKeyTile; ++k) scores[k] = -__builtin_inff();
  vec high = splat(-__builtin_inff());
  for (int v = 0; v < kVectors; ++v) {
    vec s = load(scores + v * kLanes);
    if (v * kLanes < count) s = s * scale;
    store(scores + v * kLanes, s);
    high = s > high ? s : high;
  }
  float top = *peak;
  for (int i = 0; i < kLanes; ++i) top = high[i] > top ? high[i] : top;
  vec sum{};
  for (int v = 0; v < kVectors; ++v) {
    const vec p = exp_of(load(scores + v * kLanes) - top);
    store(scores + v * kLanes, p);
    sum += p;
  }
  float added = 0.0f;
  for (int i = 0; i < kLanes; ++i) added += sum[i];
  const float decay = exp_of(splat(*peak - top))[0];
  *total = *total * decay + added;
  *peak = top;
  return decay;
}

template <int H>
inline void accumulate_block(const float* probs, const float* decay, int64_t count, const float* rows, int64_t stride,
                             int64_t width, float* acc) {
  constexpr int kStep = 16 / kLanes > 2 ? 2 : 16 / kLanes;  // vectors per step; kRowPad is a multiple of their width
  for (int64_t c = 0; c < width; c += kStep * kLanes) {
    vec sum[H][kStep];
    for (int h = 0; h < H; ++h)
      for (int v = 0; v < kStep; ++v) sum[h][v] = load(acc + h * width + c + v * kLanes) * decay[h];
    for (int64_t k = 0; k < count; ++k) {
      vec value[kStep];
      for (int v = 0; v < kStep; ++v) value[v] = load(rows + k * stride + c + v * kLanes);
      for (int h = 0; h < H; ++h)
        for (int v = 0; v < kStep; ++v) sum[h][v] += probs[h * kKeyTile + k] * value[v];
    }
    for (int h = 0; h < H; ++h)
      for (int v = 0; v < kStep; ++v) store(acc + h * width + c + v * kLanes, sum[h][v]);
  }
}

void accumulate(const float* probs, const float* decay, int64_t heads, int64_t count, const float* rows,
                int64_t stride, int64_t width, float* acc) {
  int64_t h = 0;
  for (; h + SLUICE_HEAD_BLOCK <= heads; h += SLUICE_HEAD_BLOCK)
    accumulate_block<SLUICE_HEAD_BLOCK>(probs + h * kKeyTile, decay + h, count, rows, stride, width, acc + h * width);
  for (; h + 2 <= heads; h += 2)
    accumulate_block<2>(probs + h * kKeyTile, decay + h, count, rows, stride, width, acc + h * width);
  for (; h < heads; ++h)
    accumulate_block<1>(probs + h * kKeyTile, decay + h, count, rows, stride, width, acc + h * width);
}

constexpr Kernels kTable = {SLUICE_ISA_NAME, widen, narrow, pack, dots, index_scores, softmax, accumulate};
