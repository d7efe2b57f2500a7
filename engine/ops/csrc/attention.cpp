// sluice_sparse_flash_attention: attention over selected source positions of a paged latent cache.
#include "attend.h"
#include "error.h"
#include "paged.h"
#include "parallel.h"
#include "sluice_ops.h"
#include "workspace.h"

namespace sluice {
namespace {

using Args = sluice_attention_args;

void attend_row(const Args& a, int64_t request, int64_t row, int64_t head_begin, int64_t head_end, FirstFault& fault) {
  thread_local AttendSet set;
  const PagedRows table{nullptr, 0, a.blocks, a.block_size, a.max_blocks, a.block_table + request * a.max_blocks};
  const LatentCache cache{static_cast<const char*>(a.ckv_cache), static_cast<const char*>(a.rope_cache), a.latent,
                          a.rope, a.dtype};
  const int32_t* ids = a.topk_ids + row * a.topk;
  set.begin(a.max_blocks * a.block_size, a.topk);
  for (int64_t i = 0; i < a.topk; ++i) {
    if (ids[i] < 0) continue;
    const int64_t cache_row = table.row(ids[i]);
    if (cache_row < 0) return fault.report(row, ids[i]);
    if (set.insert(ids[i])) set.add(cache, cache_row);
  }
  set.end();
  const int64_t head = row * a.heads + head_begin;
  RowAttention attention(cache, static_cast<const char*>(a.query_nope) + head * cache.ckv_bytes(),
                         static_cast<const char*>(a.query_rope) + head * cache.rope_bytes(), head_end - head_begin,
                         static_cast<float>(a.scale));
  for (int64_t t = 0; t < set.tiles(); ++t) attention.attend(set, t);
  attention.finish(static_cast<char*>(a.out) + head * cache.ckv_bytes());
}

int run(const Args& a) {
  if (check_query_ends("query_ends", a.query_ends, a.requests, a.rows, true)) return SLUICE_INVALID;
  thread_local Scratch owner_memory;
  int32_t* owner = owner_memory.take<int32_t>(a.rows);  // request of each row
  for (int64_t i = 0, row = 0; i < a.requests; ++i)
    for (; row < a.query_ends[i]; ++row) owner[row] = static_cast<int32_t>(i);
  FirstFault fault;
  const HeadSplit split(a.rows, a.heads, a.threads);
  parallel_for(a.threads, a.rows * split.parts, [&](int64_t unit) {
    const int64_t row = unit / split.parts, part = unit % split.parts;
    attend_row(a, owner[row], row, split.begin(part), split.end(part), fault);
  });
  if (fault)
    return invalid("topk_ids of row %lld name position %lld, for which block_table has no legal block (width %lld, "
                   "blocks 0 to %lld)",
                   static_cast<long long>(fault.where()), static_cast<long long>(fault.value()),
                   static_cast<long long>(a.max_blocks), static_cast<long long>(a.blocks - 1));
  return SLUICE_OK;
}

}  // namespace
}  // namespace sluice

extern "C" int sluice_sparse_flash_attention(const sluice_attention_args* args) {
  return sluice::enter(args, sluice::run);
}
