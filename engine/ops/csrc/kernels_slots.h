// Passes over the slots of a hot buffer; part of kernels_impl.h.

// Scalar code without branches, but for the vectors of 16, which use gathers and compression.
int64_t match_slots(const SlotTask& task) {
  int64_t hits = 0;
  int32_t oldest = task.now;
#if SLUICE_LANES == 16
  const __m512i stable = _mm512_set1_epi32(task.stable), now = _mm512_set1_epi32(task.now);
  __m512i slot = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i least = now;
  int64_t s = 0;
  for (; s + 16 <= task.capacity; s += 16, slot = _mm512_add_epi32(slot, _mm512_set1_epi32(16))) {
    const __m512i token = _mm512_loadu_si512(task.token + s);
    const __mmask16 held = _mm512_cmplt_epu32_mask(token, stable);
    const __mmask16 stale = _mm512_cmpge_epi32_mask(token, stable);
    if (stale) {
      _mm512_mask_storeu_epi32(task.token + s, stale, _mm512_set1_epi32(-1));
      _mm512_mask_storeu_epi32(task.used + s, stale, _mm512_setzero_si512());
    }
    const __m512i word = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), held, _mm512_srli_epi32(token, 5),
                                                     task.wanted, 4);
    const __m512i bit = _mm512_sllv_epi32(_mm512_set1_epi32(1), _mm512_and_si512(token, _mm512_set1_epi32(31)));
    const __mmask16 hit = _mm512_mask_test_epi32_mask(held, word, bit);
    const __m512i used = _mm512_mask_mov_epi32(_mm512_loadu_si512(task.used + s), hit, now);
    _mm512_storeu_si512(task.used + s, used);
    least = _mm512_min_epi32(least, used);
    _mm512_storeu_si512(task.hit_tokens + hits, _mm512_maskz_compress_epi32(hit, token));
    _mm512_storeu_si512(task.hit_slots + hits, _mm512_maskz_compress_epi32(hit, slot));
    hits += __builtin_popcount(hit);
  }
  oldest = _mm512_reduce_min_epi32(least);
#else
  int64_t s = 0;
#endif
  for (; s < task.capacity; ++s) {
    const int32_t token = task.token[s];
    if (token >= task.stable) task.token[s] = -1, task.used[s] = 0;
    const bool held = static_cast<uint32_t>(token) < static_cast<uint32_t>(task.stable);
    const int32_t at = held ? token : 0;
    const bool hit = held & (static_cast<uint32_t>(task.wanted[at >> 5]) >> (at & 31) & 1u);
    task.used[s] = hit ? task.now : task.used[s];
    oldest = task.used[s] < oldest ? task.used[s] : oldest;
    task.hit_tokens[hits] = token;
    task.hit_slots[hits] = static_cast<int32_t>(s);
    hits += hit;
  }
  *task.oldest = oldest;
  return hits;
}

int64_t list_up_to(const int32_t* used, int64_t count, int32_t limit, int32_t* slots) {
  int64_t found = 0, s = 0;
#if SLUICE_LANES == 16
  __m512i slot = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; s + 16 <= count; s += 16, slot = _mm512_add_epi32(slot, _mm512_set1_epi32(16))) {
    const __mmask16 listed = _mm512_cmple_epi32_mask(_mm512_loadu_si512(used + s), _mm512_set1_epi32(limit));
    _mm512_storeu_si512(slots + found, _mm512_maskz_compress_epi32(listed, slot));
    found += __builtin_popcount(listed);
  }
#endif
  for (; s < count; ++s) {
    slots[found] = static_cast<int32_t>(s);
    found += used[s] <= limit;
  }
  return found;
}
