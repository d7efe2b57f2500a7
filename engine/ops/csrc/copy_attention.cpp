// sluice_copy_sparse_flash_attention (Copy-SFA): fetch the misses of a step from host memory while attending.
//
// A miss is attended to where it lies in host memory, so no unit waits for another's copies: each unit (a row, or some
// heads of it) makes its share of its request's copies between its tiles, whose rows were prefetched before.
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

constexpr int64_t kCopiesAhead = 4;
constexpr int kHostToDevice = 0;

PagedRows hbm_table(const Args& a, int64_t request) {
  return {nullptr, 0, a.hbm_blocks, a.block_size, a.hbm_max_blocks, a.hbm_block_table + request * a.hbm_max_blocks};
}

PagedRows dram_table(const Args& a, int64_t request) {
  return {nullptr, 0, a.dram_blocks, a.block_size, a.dram_max_blocks, a.dram_block_table + request * a.dram_max_blocks};
}

LatentCache hbm_cache(const Args& a) {
  return {static_cast<const char*>(a.hbm_ckv), static_cast<const char*>(a.hbm_rope), a.latent, a.rope, a.dtype};
}

LatentCache dram_cache(const Args& a) {
  return {static_cast<const char*>(a.dram_ckv), static_cast<const char*>(a.dram_rope), a.latent, a.rope, a.dtype};
}

// The distinct slots every request fetches, and the host row of each; a slot named twice gets the last. Made from the
// request's own list or, if that is empty, from the leading entries of its rows. (The selecting operator makes both name
// the same pairs; a residency that fills only the list is served too.)
class Fetches {
 public:
  struct Pair {
    int64_t host_row, hot_row;
  };

  Fetches(const Args& a, FirstFault& fault) : a_(a), positions_(a.hbm_max_blocks * a.block_size) {
    int64_t room = 0;
    for (int64_t i = 0; i < a.requests; ++i) room += a.miss_counts[i];
    for (int64_t row = 0; row < a.rows; ++row) room += a.topk_miss_counts[row];
    Buffers& buffers = memory();
    pairs_ = buffers.pairs.take<Pair>(room);
    first_ = buffers.first.take<int64_t>(a.requests + 1);
    begin_marks(buffers);
    first_[0] = 0;
    for (int64_t i = 0, row = 0; i < a.requests; ++i) {
      first_[i + 1] = first_[i];
      add(i, a.miss_src_ids + i * a.miss_capacity, a.miss_dst_slots + i * a.miss_capacity, a.miss_counts[i], fault);
      for (; row < a.query_ends[i]; ++row)
        if (a.miss_counts[i] == 0)
          add(i, a.topk_src_ids + row * a.topk, a.topk_dst_slots + row * a.topk, a.topk_miss_counts[row], fault);
    }
  }

  const Pair* pairs(int64_t request) const { return pairs_ + first_[request]; }
  int64_t count(int64_t request) const { return first_[request + 1] - first_[request]; }
  int64_t total() const { return first_[a_.requests]; }
  // Host row that slot of the request is being fetched from, or -1.
  int64_t source(int64_t request, int64_t slot) const {
    const uint64_t mark = marks_[request * positions_ + slot];
    return mark >> 32 == epoch_ ? pairs_[static_cast<uint32_t>(mark) + first_[request]].host_row : -1;
  }

 private:
  struct Buffers {
    Scratch pairs, first, marks;
    uint64_t* mark = nullptr;
    int64_t size = 0;
    uint64_t epoch = 0;
  };
  static Buffers& memory() {
    thread_local Buffers buffers;
    return buffers;
  }

  // A mark is this call's epoch and the index of the slot's pair within its request; marks of older calls are void.
  void begin_marks(Buffers& buffers) {
    const int64_t size = a_.requests * positions_;
    if (size > buffers.size) {
      buffers.mark = buffers.marks.take<uint64_t>(size);
      buffers.size = size;
      buffers.epoch = 0;
    }
    if (buffers.epoch == 0 || buffers.epoch == 0xffffffffu) {
      std::fill(buffers.mark, buffers.mark + buffers.size, uint64_t{0});
      buffers.epoch = 0;
    }
    epoch_ = ++buffers.epoch;
    marks_ = buffers.mark;
  }

  void add(int64_t request, const int32_t* ids, const int32_t* slots, int64_t count, FirstFault& fault) {
    const PagedRows hbm = hbm_table(a_, request), dram = dram_table(a_, request);
    for (int64_t i = 0; i < count; ++i) {
      if (ids[i] < 0 || slots[i] < 0) continue;
      const int64_t host_row = dram.row(ids[i]), hot_row = hbm.row(slots[i]);
      if (host_row < 0 || hot_row < 0) {
        fault.report(request, host_row < 0 ? ids[i] : slots[i]);
        continue;
      }
      uint64_t& mark = marks_[request * positions_ + slots[i]];
      if (mark >> 32 == epoch_) {
        pairs_[first_[request] + static_cast<uint32_t>(mark)].host_row = host_row;
        continue;
      }
      mark = epoch_ << 32 | static_cast<uint64_t>(first_[request + 1] - first_[request]);
      pairs_[first_[request + 1]++] = {host_row, hot_row};
    }
  }

  const Args& a_;
  const int64_t positions_;
  Pair* pairs_;
  int64_t* first_;
  uint64_t* marks_;
  uint64_t epoch_;
};

// Makes copies [begin, end) of a request. Rows that this call attends to (in host memory) are `attended`: the copies are
// not read before the next step.
void copy_pairs(const Args& a, const Fetches::Pair* pairs, int64_t begin, int64_t end, bool attended) {
  const Kernels& kernel = kernels();
  const LatentCache host = dram_cache(a), hot = hbm_cache(a);
  const int64_t ckv_bytes = host.ckv_bytes(), rope_bytes = host.rope_bytes();
  auto prefetch = [](const char* row, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(row + line);
  };
  auto copy = [&](const char* from, const char* to, int64_t bytes) {
    if (attended)
      kernel.stream_row(from, const_cast<char*>(to), bytes);
    else
      std::memcpy(const_cast<char*>(to), from, static_cast<size_t>(bytes));
  };
  for (int64_t i = begin; i < end; ++i) {
    if (i + kCopiesAhead < end) {
      prefetch(host.ckv_row(pairs[i + kCopiesAhead].host_row), ckv_bytes);
      prefetch(host.rope_row(pairs[i + kCopiesAhead].host_row), rope_bytes);
    }
    copy(host.ckv_row(pairs[i].host_row), hot.ckv_row(pairs[i].hot_row), ckv_bytes);
    copy(host.rope_row(pairs[i].host_row), hot.rope_row(pairs[i].hot_row), rope_bytes);
  }
  if (attended) kernel.stream_end();
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

// What one row attends to: misses first, in host memory, then what is in the hot buffer.
void collect(const Args& a, const Fetches& fetches, int64_t request, int64_t row, AttendSet& set, FirstFault& fault) {
  const PagedRows table = hbm_table(a, request);
  const LatentCache hot = hbm_cache(a), host = dram_cache(a);
  const int64_t kept = a.cache_tokens[request], length = a.kv_lens[request];
  const int64_t visible = length == 0 ? 0 : length - (a.query_ends[request] - 1 - row);
  set.begin(a.hbm_max_blocks * a.block_size, a.topk + std::max<int64_t>(visible - kept, 0));
  if (visible <= 0) return;
  const int32_t* slots = a.topk_dst_slots + row * a.topk;
  for (const bool missing : {true, false}) {
    auto add = [&](int64_t slot) {
      const int64_t cache_row = table.row(slot);
      if (cache_row < 0) return fault.report(request, slot);
      const int64_t source = fetches.source(request, slot);
      if ((source >= 0) == missing && set.insert(slot)) set.add(missing ? host : hot, missing ? source : cache_row);
    };
    if (missing && fetches.count(request) == 0) continue;
    if (kept > 0)
      for (int64_t i = 0; i < a.topk; ++i)
        if (slots[i] >= 0) add(slots[i]);
    for (int64_t slot = kept; slot < visible; ++slot) add(slot);
  }
  set.end();
}

// Part `part` of `parts` of the request's copies is made along the way.
void attend_row(const Args& a, const Fetches& fetches, int64_t request, int64_t row, int64_t head_begin,
                int64_t head_end, int64_t part, int64_t parts, FirstFault& fault) {
  thread_local AttendSet set;
  collect(a, fetches, request, row, set, fault);
  const Fetches::Pair* pairs = fetches.pairs(request);
  const int64_t tiles = set.tiles();
  const int64_t first = fetches.count(request) * part / parts;
  const int64_t share = fetches.count(request) * (part + 1) / parts - first;
  const LatentCache cache = hbm_cache(a);
  const int64_t head = row * a.heads + head_begin;
  char* out = static_cast<char*>(a.out) + head * cache.ckv_bytes();
  if (tiles == 0) {
    copy_pairs(a, pairs, first, first + share, false);
    std::memset(out, 0, static_cast<size_t>((head_end - head_begin) * cache.ckv_bytes()));
    return;
  }
  RowAttention attention(cache, static_cast<const char*>(a.query) + head * cache.ckv_bytes(),
                         static_cast<const char*>(a.query_rope) + head * cache.rope_bytes(), head_end - head_begin,
                         static_cast<float>(a.scale));
  for (int64_t t = 0; t < tiles; ++t) {
    attention.attend(set, t);
    copy_pairs(a, pairs, first + share * t / tiles, first + share * (t + 1) / tiles, true);
  }
  attention.finish(out);
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
  const Fetches fetches(a, fault);
  if (fault)
    return invalid("miss list of request %lld names position or slot %lld, for which its block table has no legal block",
                   static_cast<long long>(fault.where()), static_cast<long long>(fault.value()));
  const LatentCache cache = hbm_cache(a);
  const int64_t bytes = fetches.total() * (cache.ckv_bytes() + cache.rope_bytes());
  if (a.copied_bytes != nullptr) *a.copied_bytes = bytes;
  report_copy(a.device, bytes);

  for (int64_t i = 0; i < a.requests; ++i)  // requests without a row have no unit
    if (a.query_ends[i] == (i ? a.query_ends[i - 1] : 0)) copy_pairs(a, fetches.pairs(i), 0, fetches.count(i), false);

  thread_local Scratch owner_memory;
  int32_t* owner = owner_memory.take<int32_t>(a.rows);  // request of each row
  for (int64_t i = 0, row = 0; i < a.requests; ++i)
    for (; row < a.query_ends[i]; ++row) owner[row] = static_cast<int32_t>(i);
  const HeadSplit split(a.rows, a.heads, a.threads);
  parallel_for(a.threads, a.rows * split.parts, [&](int64_t unit) {
    const int64_t row = unit / split.parts, part = unit % split.parts, request = owner[row];
    const int64_t begin = request ? a.query_ends[request - 1] : 0, rows = a.query_ends[request] - begin;
    attend_row(a, fetches, request, row, split.begin(part), split.end(part), (row - begin) * split.parts + part,
               rows * split.parts, fault);
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
