// The residency algorithm of the reference system, written down plainly from its description: the baseline of
// benchmarks/decode_ops.py. Compiled by it, not part of the product.
#include <cstdint>
#include <cstring>

// One row. mark and pos are workspaces of max_token entries (mark == epoch: the position is in this row's top-k, first
// at index pos), work one of 3 * capacity entries, miss_pos one of topk.
static void update_row(const int32_t* topk_ids, int32_t topk, int32_t stable, int32_t max_token, int32_t capacity,
                       int32_t* slot_to_token, int32_t* lru_slots, int32_t* current_slots, int32_t* miss_count,
                       int32_t* miss_tokens, int32_t* miss_slots, int32_t* mark, int32_t* pos, int32_t* work,
                       int32_t* miss_pos, int32_t* epoch) {
  std::memset(current_slots, 0xff, sizeof(int32_t) * topk);
  std::memset(miss_tokens, 0xff, sizeof(int32_t) * topk);
  std::memset(miss_slots, 0xff, sizeof(int32_t) * topk);
  *miss_count = 0;
  if (stable < 0) stable = 0;
  if (stable > max_token) stable = max_token;
  ++*epoch;
  for (int32_t i = 0; i < topk; ++i) {
    const int32_t token = topk_ids[i];
    if (token < 0 || token >= max_token || mark[token] == *epoch) continue;
    mark[token] = *epoch;
    pos[token] = i;
  }
  int32_t* evictable = work;
  int32_t* hits = work + capacity;
  int32_t* assigned = work + 2 * capacity;
  int32_t evictables = 0, hit_count = 0, assigned_count = 0, misses = 0;
  for (int32_t i = 0; i < capacity; ++i) {
    const int32_t slot = lru_slots[i];
    if (slot < 0 || slot >= capacity) continue;
    int32_t token = slot_to_token[slot];
    if (token >= stable) slot_to_token[slot] = token = -1;
    if (token >= 0 && mark[token] == *epoch) {
      current_slots[pos[token]] = slot;
      hits[hit_count++] = slot;
    } else {
      evictable[evictables++] = slot;
    }
  }
  for (int32_t i = 0; i < topk; ++i) {
    const int32_t token = topk_ids[i];
    if (token < 0 || token >= stable || current_slots[i] >= 0) continue;
    miss_pos[misses] = i;
    miss_tokens[misses++] = token;
  }
  for (; assigned_count < misses && assigned_count < evictables; ++assigned_count) {
    const int32_t slot = evictable[assigned_count];
    slot_to_token[slot] = miss_tokens[assigned_count];
    current_slots[miss_pos[assigned_count]] = slot;
    miss_slots[assigned_count] = slot;
    assigned[assigned_count] = slot;
  }
  *miss_count = assigned_count;
  int32_t* next = lru_slots;
  for (int32_t i = assigned_count; i < evictables; ++i) *next++ = evictable[i];
  for (int32_t i = 0; i < assigned_count; ++i) *next++ = assigned[i];
  for (int32_t i = 0; i < hit_count; ++i) *next++ = hits[i];
}

extern "C" void plain_residency(const int32_t* topk_ids, const int32_t* stable, int32_t rows, int32_t topk,
                                int32_t capacity, int32_t max_token, int32_t* slot_to_token, int32_t* lru_slots,
                                int32_t* current_slots, int32_t* miss_counts, int32_t* miss_tokens, int32_t* miss_slots,
                                int32_t* mark, int32_t* pos, int32_t* work, int32_t* miss_pos, int32_t* epoch) {
  for (int32_t row = 0; row < rows; ++row)
    update_row(topk_ids + row * topk, topk, stable[row], max_token, capacity, slot_to_token + row * capacity,
               lru_slots + row * capacity, current_slots + row * topk, miss_counts + row, miss_tokens + row * topk,
               miss_slots + row * topk, mark, pos, work, miss_pos, epoch);
}
