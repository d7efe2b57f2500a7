// Running-softmax attention; part of kernels_impl.h. Words is FloatWords or Bfloat16Words.

constexpr int64_t kGroup = 2 * kLanes;  // heads of a full group of vectors

inline void prefetch_row(const void* row, int64_t bytes) {
  const char* at = static_cast<const char*>(row);
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + line, 0, 2);
}

// Prefetches the next tile's rows in small portions, spread over the scoring of this one.
template <typename Words>
class Prefetcher {
 public:
  Prefetcher(const AttendTask& task, int64_t steps)
      : task_(task), portion_(steps > 0 ? (task.next_count + steps - 1) / steps : 0) {}
  void step() {
    constexpr int64_t kBytes = sizeof(typename Words::Word) / Words::kElements;
    for (int64_t i = 0; i < portion_ && next_ < task_.next_count; ++i, ++next_) {
      prefetch_row(task_.next_ckv[next_], task_.latent * kBytes);
      prefetch_row(task_.next_rope[next_], task_.rope * kBytes);
    }
  }

 private:
  const AttendTask& task_;
  const int64_t portion_;
  int64_t next_ = 0;
};

// scores[k][v] = q . key of V vectors of heads, for the tile's rows.
template <typename Words, int V>
void score_rows(const AttendTask& task, int64_t first, float* scores, Prefetcher<Words>& ahead) {
  typedef typename Words::Word Word;
  const int64_t latent = task.latent / Words::kElements, rope = task.rope / Words::kElements;
  const int64_t stride = (latent + rope) * kLanes;
  const Word* heads = static_cast<const Word*>(task.panel) + first * stride;
  const auto* ckv = reinterpret_cast<const Word* const*>(task.ckv);
  const auto* ropes = reinterpret_cast<const Word* const*>(task.rope_rows);
  for (int64_t row = 0; row < task.count; row += kBlock) {
    ahead.step();
    vec sum[kBlock][V];
    for (int k = 0; k < kBlock; ++k)
      for (int v = 0; v < V; ++v) sum[k][v] = Words::zero();
    const Word* keys[kBlock];
    for (int k = 0; k < kBlock; ++k) keys[k] = ckv[row + k];
    multiply<Words, V>(heads, stride, latent, [&](int k, int64_t w) { return keys[k][w]; }, sum);
    for (int k = 0; k < kBlock; ++k) keys[k] = ropes[row + k];
    multiply<Words, V>(heads + latent * kLanes, stride, rope, [&](int k, int64_t w) { return keys[k][w]; }, sum);
    for (int k = 0; k < kBlock; ++k)
      for (int v = 0; v < V; ++v) store(scores + ((row + k) * V + v) * kLanes, sum[k][v]);
  }
}

// Turns scores into exp(scale * score - new peak), brings peak and total up to date; decay is the factor for what was
// accumulated before. Rows from count on become 0.
template <int V>
void softmax_rows(const AttendTask& task, int64_t first, int64_t padded_count, float* scores, vec (&decay)[V]) {
  for (int v = 0; v < V; ++v) {
    float* at = scores + v * kLanes;
    vec high = splat(-__builtin_inff());
    for (int64_t k = 0; k < task.count; ++k) {
      const vec s = load(at + k * V * kLanes) * task.scale;
      store(at + k * V * kLanes, s);
      high = s > high ? s : high;
    }
    const vec old = load(task.peak + (first + v) * kLanes);
    high = old > high ? old : high;
    vec sum{};
    for (int64_t k = 0; k < task.count; ++k) {
      const vec p = exp_of(load(at + k * V * kLanes) - high);
      store(at + k * V * kLanes, p);
      sum += p;
    }
    for (int64_t k = task.count; k < padded_count; ++k) store(at + k * V * kLanes, vec{});
    decay[v] = exp_of(old - high);
    float* total = task.total + (first + v) * kLanes;
    store(total, load(total) * decay[v] + sum);
    store(task.peak + (first + v) * kLanes, high);
  }
}

// Rows as they are multiplied with the softmax's weights: a word per dimension, of kElements rows.
struct FloatValues {
  typedef FloatWords Words;
  const float* const* rows;
  const float* row(int64_t w) const { return rows[w]; }
  // Weights [k][V][lanes] are words already.
  template <int V>
  static const float* pack(float* probs, int64_t) {
    return probs;
  }
};

#ifdef SLUICE_HAS_DOT
struct Bfloat16Values {
  typedef Bfloat16Words Words;
  const uint32_t* words;
  int64_t latent;
  const uint32_t* row(int64_t w) const { return words + w * latent; }
  // Rounds weights to bfloat16 and pairs rows, in place.
  template <int V>
  static const uint32_t* pack(float* probs, int64_t count) {
    uint32_t* out = reinterpret_cast<uint32_t*>(probs);
    alignas(64) uint16_t order[32];
    for (int i = 0; i < 16; ++i) order[2 * i] = static_cast<uint16_t>(i), order[2 * i + 1] = static_cast<uint16_t>(16 + i);
    const __m512i pairs = _mm512_load_si512(order);
    for (int64_t k = 0; k < count; k += 2)
      for (int v = 0; v < V; ++v) {
        const __m512bh both =
            _mm512_cvtne2ps_pbh(load(probs + ((k + 1) * V + v) * kLanes), load(probs + (k * V + v) * kLanes));
        _mm512_storeu_si512(out + (k / 2 * V + v) * kLanes, _mm512_permutexvar_epi16(pairs, (__m512i)both));
      }
    return out;
  }
};

// words[k / 2][c] = the pair (rows[k][c], rows[k + 1][c])
inline void pair_rows(const void* const* rows, int64_t count, int64_t latent, uint32_t* words) {
  alignas(64) uint16_t low[32], high[32];
  for (int i = 0; i < 16; ++i) {
    low[2 * i] = static_cast<uint16_t>(i), low[2 * i + 1] = static_cast<uint16_t>(32 + i);
    high[2 * i] = static_cast<uint16_t>(16 + i), high[2 * i + 1] = static_cast<uint16_t>(48 + i);
  }
  const __m512i low_order = _mm512_load_si512(low), high_order = _mm512_load_si512(high);
  for (int64_t k = 0; k < count; k += 2, words += latent) {
    const uint16_t* a = static_cast<const uint16_t*>(rows[k]);
    const uint16_t* b = static_cast<const uint16_t*>(rows[k + 1]);
    int64_t c = 0;
    for (; c + 32 <= latent; c += 32) {
      const __m512i x = _mm512_loadu_si512(a + c), y = _mm512_loadu_si512(b + c);
      _mm512_storeu_si512(words + c, _mm512_permutex2var_epi16(x, low_order, y));
      _mm512_storeu_si512(words + c + 16, _mm512_permutex2var_epi16(x, high_order, y));
    }
    for (; c < latent; ++c) words[c] = a[c] | static_cast<uint32_t>(b[c]) << 16;
  }
}
#endif

// acc[c][v] = acc[c][v] * decay[v] + sum_w weights[w][v] . value word(w, c), for B columns from c on.
template <typename Values, int V, int B>
inline void accumulate_columns(const typename Values::Words::Word* weights, const Values& values, int64_t words,
                               int64_t c, const vec (&decay)[V], float* acc) {
  vec sum[B][V];
  for (int i = 0; i < B; ++i)
    for (int v = 0; v < V; ++v) sum[i][v] = load(acc + ((c + i) * V + v) * kLanes) * decay[v];
  for (int64_t w = 0; w < words; ++w) {
    const typename Values::Words::Word* value = values.row(w) + c;
    for (int i = 0; i < B; ++i)
      for (int v = 0; v < V; ++v) sum[i][v] = Values::Words::add(sum[i][v], weights + (w * V + v) * kLanes, value[i]);
  }
  for (int i = 0; i < B; ++i)
    for (int v = 0; v < V; ++v) store(acc + ((c + i) * V + v) * kLanes, sum[i][v]);
}

// One tile for V vectors of heads, starting at vector `first`.
template <typename Values, int V>
void attend_heads(const AttendTask& task, int64_t first, const Values& values, float* scores,
                  Prefetcher<typename Values::Words>& ahead) {
  typedef typename Values::Words Words;
  const int64_t words = (task.count + Words::kElements - 1) / Words::kElements;
  score_rows<Words, V>(task, first, scores, ahead);
  vec decay[V];
  softmax_rows<V>(task, first, words * Words::kElements, scores, decay);
  const auto* weights = Values::template pack<V>(scores, task.count);
  float* acc = task.acc + first * task.latent * kLanes;
  int64_t c = 0;
  for (; c + kBlock <= task.latent; c += kBlock)
    accumulate_columns<Values, V, kBlock>(weights, values, words, c, decay, acc);
  for (; c < task.latent; ++c) accumulate_columns<Values, V, 1>(weights, values, words, c, decay, acc);
}

template <typename Words>
void attend_tile(const AttendTask& task) {
  float* scores = static_cast<float*>(task.scratch);
  const int64_t groups = (task.vectors + 1) / 2, steps = groups * ((task.count + kBlock - 1) / kBlock);
  Prefetcher<Words> ahead(task, steps);
  auto run = [&](const auto& values) {
    int64_t v = 0;
    for (; v + 2 <= task.vectors; v += 2) attend_heads<std::decay_t<decltype(values)>, 2>(task, v, values, scores, ahead);
    if (v < task.vectors) attend_heads<std::decay_t<decltype(values)>, 1>(task, v, values, scores, ahead);
  };
#ifdef SLUICE_HAS_DOT
  if constexpr (Words::kElements == 2) {
    uint32_t* words = reinterpret_cast<uint32_t*>(scores + kAttendTile * kGroup);
    pair_rows(task.ckv, task.count, task.latent, words);
    run(Bfloat16Values{words, task.latent});
    return;
  } else
#endif
    run(FloatValues{reinterpret_cast<const float* const*>(task.ckv)});
}
