// Index scores; part of kernels_impl.h.

inline float sum_lanes(vec x) {
  float lane[kLanes];
  store(lane, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}

// Adds weights * relu(products) of V vectors of heads, starting at vector `first`, to part[k].
template <typename Words, bool kHalf, int V>
inline void score_heads(const ScoreTask& task, int64_t first, const typename Words::Word* const* rows,
                        vec (&part)[kBlock]) {
  typedef typename Words::Word Word;
  const int64_t stride = task.words * kLanes;
  const Word* keys[kBlock];
  for (int k = 0; k < kBlock; ++k) keys[k] = rows[k];
  typename Words::Sum sum[kBlock][V];
  for (int k = 0; k < kBlock; ++k)
    for (int v = 0; v < V; ++v) {
      if constexpr (Words::kElements == 4)
        __builtin_memcpy(&sum[k][v], task.bias + (first + v) * kLanes, sizeof sum[k][v]);
      else
        sum[k][v] = Words::zero();
    }
  multiply<Words, V>(static_cast<const Word*>(task.panel) + first * stride, stride, task.words,
                     [&](int k, int64_t w) { return keys[k][w]; }, sum);
  for (int v = 0; v < V; ++v) {
    const vec weight = load(task.weights + (first + v) * kLanes);
    const ivec live = load(task.live + (first + v) * kLanes);
    for (int k = 0; k < kBlock; ++k) {
      vec product = Words::value(sum[k][v]);
      product = product < 0.0f ? vec{} : product;
      if (kHalf) product = through_half(product * (1.0f / 1024));
      product *= weight;
      part[k] += live != 0 ? product : vec{};
    }
  }
}

template <typename Words, bool kHalf>
void index_scores(const ScoreTask& task) {
  const auto* all = reinterpret_cast<const typename Words::Word* const*>(task.rows);
  for (int64_t first = 0; first < task.count; first += kBlock) {
    vec part[kBlock] = {};
    int64_t v = 0;
    for (; v + 2 <= task.vectors; v += 2) score_heads<Words, kHalf, 2>(task, v, all + first, part);
    if (v < task.vectors) score_heads<Words, kHalf, 1>(task, v, all + first, part);
    for (int k = 0; k < kBlock; ++k) task.out[first + k] = sum_lanes(part[k]);
  }
}
