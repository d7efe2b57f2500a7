// sluice_copy_sparse_flash_attention (Copy-SFA): fetch the misses of a step from host memory, then attend.
#include <dlfcn.h>

#include <atomic>
#include <cstring>

#include "attend.h"
#include "error.h"
#include "paged.h"
#include "parallel.h"
#include "sluice_ops.h"

namespace sluice {
namespace {

using Args = sluice_copy_attention_args;

constexpr int64_t kCopiesPerUnit = 128;
constexpr int kHostToDevice = 0;

PagedRows hbm_table(const Args& a, int64_t request) {
  return {nullptr, 0, a.hbm_blocks, a.block_size, a.hbm_max_blocks, a.hbm_block_table + request * a.hbm_max_blocks};
}

PagedRows dram_table(const Args& a, int64_t request) {
  return {nullptr, 0, a.dram_blocks, a.block_size, a.dram_max_blocks, a.dram_block_table + request * a.dram_max_blocks};
}

// A list of (source position, hot slot) pairs of one request to be copied; a pair with a negative member is skipped.
struct CopyList {
  int64_t request;
  const int32_t* ids;
  const int32_t* slots;
  int64_t count;
};

// Returns the bytes copied.
int64_t copy_pairs(const Args& a, const CopyList& list, FirstFault& fault) {
  const PagedRows hbm = hbm_table(a, list.request), dram = dram_table(a, list.request);
  const size_t ckv_bytes = static_cast<size_t>(a.latent * element_bytes(a.dtype));
  const size_t rope_bytes = static_cast<size_t>(a.rope * element_bytes(a.dtype));
  int64_t copied = 0;
  for (int64_t i = 0; i < list.count; ++i) {
    if (list.ids[i] < 0 || list.slots[i] < 0) continue;
    const int64_t from = dram.row(list.ids[i]), to = hbm.row(list.slots[i]);
    if (from < 0 || to < 0) {
      fault.report(list.request, from < 0 ? list.ids[i] : list.slots[i]);
      continue;
    }
    std::memcpy(static_cast<char*>(a.hbm_ckv) + static_cast<size_t>(to) * ckv_bytes,
                static_cast<const char*>(a.dram_ckv) + static_cast<size_t>(from) * ckv_bytes, ckv_bytes);
    std::memcpy(static_cast<char*>(a.hbm_rope) + static_cast<size_t>(to) * rope_bytes,
                static_cast<const char*>(a.dram_rope) + static_cast<size_t>(from) * rope_bytes, rope_bytes);
    ++copied;
  }
  return copied * static_cast<int64_t>(ckv_bytes + rope_bytes);
}

// The misses of request i: its own list, or, if that is empty, the leading entries of its rows. (The selecting operator
// makes both name the same pairs; a residency that fills only the list is served too.)
int64_t copy_misses(const Args& a, FirstFault& fault) {
  thread_local Scratch memory;
  int64_t most = a.rows;
  for (int64_t i = 0; i < a.requests; ++i) most += a.miss_counts[i] / kCopiesPerUnit + 1;
  CopyList* lists = memory.take<CopyList>(most);
  int64_t count = 0, row = 0;
  for (int64_t i = 0; i < a.requests; ++i) {
    const int32_t* ids = a.miss_src_ids + i * a.miss_capacity;
    const int32_t* slots = a.miss_dst_slots + i * a.miss_capacity;
    for (int64_t first = 0; first < a.miss_counts[i]; first += kCopiesPerUnit)
      lists[count++] = {i, ids + first, slots + first, std::min(kCopiesPerUnit, a.miss_counts[i] - first)};
    for (; row < a.query_ends[i]; ++row)
      if (a.miss_counts[i] == 0 && a.topk_miss_counts[row] > 0)
        lists[count++] = {i, a.topk_src_ids + row * a.topk, a.topk_dst_slots + row * a.topk, a.topk_miss_counts[row]};
  }
  std::atomic<int64_t> bytes{0};
  parallel_for(a.threads, count, [&](int64_t unit) { bytes += copy_pairs(a, lists[unit], fault); });
  return bytes;
}

// Tells the emulated driver, where there is one in this process.
void report_copy(int64_t device, int64_t bytes) {
  using Count = int (*)(int device, int kind, uint64_t bytes);
  static std::atomic<Count> known{nullptr};
  Count count = known.load();
  if (count == nullptr) {
    count = reinterpret_cast<Count>(dlsym(RTLD_DEFAULT, "hostcann_count_copy"));
    known.store(count);
  }
  if (count != nullptr && bytes > 0) count(static_cast<int>(device), kHostToDevice, static_cast<uint64_t>(bytes));
}

void attend_row(const Args& a, int64_t request, int64_t row, int64_t head_begin, int64_t head_end, FirstFault& fault) {
  thread_local AttendSet set;
  const PagedRows table = hbm_table(a, request);
  const int64_t kept = a.cache_tokens[request], length = a.kv_lens[request];
  const int64_t visible = length == 0 ? 0 : length - (a.query_ends[request] - 1 - row);
  set.begin(a.hbm_max_blocks * a.block_size, a.topk + std::max<int64_t>(visible - kept, 0));
  auto add = [&](int64_t slot) {
    const int64_t cache_row = table.row(slot);
    if (cache_row < 0)
      fault.report(request, slot);
    else if (set.insert(slot))
      set.add(cache_row);
  };
  if (visible > 0) {
    const int32_t* slots = a.topk_dst_slots + row * a.topk;
    if (kept > 0)
      for (int64_t i = 0; i < a.topk; ++i)
        if (slots[i] >= 0) add(slots[i]);
    for (int64_t slot = kept; slot < visible; ++slot) add(slot);
  }
  const int64_t bytes = element_bytes(a.dtype), head = row * a.heads + head_begin;
  const LatentCache cache{static_cast<const char*>(a.hbm_ckv), static_cast<const char*>(a.hbm_rope), a.latent, a.rope,
                          a.dtype};
  attend(cache, set, static_cast<const char*>(a.query) + head * a.latent * bytes,
         static_cast<const char*>(a.query_rope) + head * a.rope * bytes, head_end - head_begin,
         static_cast<float>(a.scale), static_cast<char*>(a.out) + head * a.latent * bytes);
}

int check(const Args& a) {
  if (check_query_ends("actual_seq_lengths_query", a.query_ends, a.requests, a.rows, true)) return SLUICE_INVALID;
  for (int64_t i = 0; i < a.requests; ++i) {
    const long long at = i;
    if (a.miss_counts[i] < 0 || a.miss_counts[i] > a.miss_capacity)
      return invalid("miss_counts[%lld] is %d; legal: 0 to %lld", at, a.miss_counts[i],
                     static_cast<long long>(a.miss_capacity));
    if (a.cache_tokens[i] < 0) return invalid("num_cache_tokens[%lld] is %d; legal: 0 or more", at, a.cache_tokens[i]);
    if (a.kv_lens[i] < 0) return invalid("actual_seq_lengths_kv[%lld] is %d; legal: 0 or more", at, a.kv_lens[i]);
  }
  for (int64_t row = 0; row < a.rows; ++row)
    if (a.topk_miss_counts[row] < 0 || a.topk_miss_counts[row] > a.topk)
      return invalid("topk_miss_counts[%lld] is %d; legal: 0 to %lld", static_cast<long long>(row),
                     a.topk_miss_counts[row], static_cast<long long>(a.topk));
  return SLUICE_OK;
}

int run(const Args& a) {
  if (check(a)) return SLUICE_INVALID;
  FirstFault fault;
  const int64_t bytes = copy_misses(a, fault);
  if (a.copied_bytes != nullptr) *a.copied_bytes = bytes;
  report_copy(a.device, bytes);
  if (fault)
    return invalid("miss list of request %lld names position or slot %lld, for which its block table has no legal block",
                   static_cast<long long>(fault.where()), static_cast<long long>(fault.value()));

  thread_local Scratch owner_memory;
  int32_t* owner = owner_memory.take<int32_t>(a.rows);  // request of each row
  for (int64_t i = 0, row = 0; i < a.requests; ++i)
    for (; row < a.query_ends[i]; ++row) owner[row] = static_cast<int32_t>(i);
  const int64_t splits = head_splits(a.rows, a.heads, a.threads);
  parallel_for(a.threads, a.rows * splits, [&](int64_t unit) {
    const int64_t row = unit / splits, part = unit % splits;
    attend_row(a, owner[row], row, a.heads * part / splits, a.heads * (part + 1) / splits, fault);
  });
  if (fault)
    return invalid("request %lld attends to hot slot %lld, for which hbm_block_table has no legal block (width %lld)",
                   static_cast<long long>(fault.where()), static_cast<long long>(fault.value()),
                   static_cast<long long>(a.hbm_max_blocks));
  return SLUICE_OK;
}

}  // namespace
}  // namespace sluice

extern "C" int sluice_copy_sparse_flash_attention(const sluice_copy_attention_args* args) {
  return sluice::enter(args, sluice::run);
}
