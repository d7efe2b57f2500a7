// C ABI of libsluice_ops: one argument struct and one function per operator.
//
// Every field is eight bytes wide (pointer, int64 or double), so that the layout is the same for every caller; `size`
// must be sizeof the struct and is checked. All tensors are dense and row-major. Functions return 0,
// SLUICE_INVALID (an argument is wrong) or SLUICE_FAILED (no memory, no thread), the latter two with a message for users
// in sluice_ops_last_error() (per calling thread).
#pragma once

#include <stdint.h>

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

enum { SLUICE_OK = 0, SLUICE_INVALID = 1, SLUICE_FAILED = 2 };
enum { SLUICE_FLOAT32 = 0, SLUICE_BFLOAT16 = 1, SLUICE_FLOAT16 = 2, SLUICE_INT8 = 3 };

typedef struct {
  int64_t size;
  const void* query;            // [rows, heads, dims] dtype
  const void* weights;          // [rows, heads] weights_dtype
  const void* key_cache;        // [blocks, block_size, 1, dims] dtype
  const int32_t* block_table;   // [requests, max_blocks]
  const int32_t* query_ends;    // [requests], cumulative
  const int32_t* key_lens;      // [requests], length seen by the request's last row
  int32_t* topk_ids;            // out [rows, topk]
  const uint16_t* query_scale;  // [rows, heads] float16, null unless dtype is int8
  const uint16_t* key_scale;    // [blocks, block_size, 1] float16, likewise
  int64_t rows, heads, dims, requests, blocks, block_size, max_blocks, topk;
  int64_t dtype, weights_dtype, threads;
} sluice_indexer_args;

typedef struct {
  int64_t size;
  const void* query_nope;       // [rows, heads, latent] dtype
  const void* query_rope;       // [rows, heads, rope] dtype
  const void* ckv_cache;        // [blocks, block_size, 1, latent] dtype
  const void* rope_cache;       // [blocks, block_size, 1, rope] dtype
  const int32_t* block_table;   // [requests, max_blocks]
  const int32_t* query_ends;    // [requests], cumulative
  const int32_t* topk_ids;      // [rows, topk], negative: no entry
  void* out;                    // out [rows, heads, latent] dtype
  double scale;
  int64_t rows, heads, latent, rope, requests, blocks, block_size, max_blocks, topk;
  int64_t dtype, threads;
} sluice_attention_args;

typedef struct {
  int64_t size;
  const int32_t* topk_ids;      // [rows, topk]
  const int32_t* query_ends;    // [requests], cumulative; null: one row per request
  const int32_t* stable_prefix; // [requests]
  const int64_t* generation;    // [requests]
  const int32_t* row_index;     // [requests], negative: request is skipped
  int64_t* last_generation;     // in/out [state_rows]
  int32_t* slot_to_token;       // in/out [state_rows, capacity]
  int32_t* last_used;           // in/out [state_rows, capacity], by the row's clock
  int32_t* clock;               // in/out [state_rows]
  int32_t* slots;               // out [rows, topk]
  int32_t* miss_ids;            // out [requests, miss_capacity]
  int32_t* miss_slots;          // out [requests, miss_capacity]
  int32_t* miss_counts;         // out [requests]
  int32_t* hit_counts;          // out [requests], places of the top-k, not distinct positions
  int64_t rows, topk, requests, miss_capacity, state_rows, capacity, threads;
} sluice_residency_args;

typedef struct {
  int64_t size;
  const void* query_rope;       // [rows, heads, rope] dtype
  const void* query;            // [rows, heads, latent] dtype
  const int32_t* query_ends;    // [requests], cumulative
  const int32_t* kv_lens;       // [requests], logical HBM length of the request's last row
  const int32_t* cache_tokens;  // [requests]
  const int32_t* topk_dst_slots;    // [rows, topk]
  const int32_t* topk_src_ids;      // [rows, topk]
  const int32_t* topk_miss_counts;  // [rows]
  const int32_t* miss_src_ids;      // [requests, miss_capacity]
  const int32_t* miss_dst_slots;    // [requests, miss_capacity]
  const int32_t* miss_counts;       // [requests]
  const int32_t* hbm_block_table;   // [requests, hbm_max_blocks]
  const int32_t* dram_block_table;  // [requests, dram_max_blocks]
  void* hbm_rope;               // in/out [hbm_blocks, block_size, 1, rope] dtype
  void* hbm_ckv;                // in/out [hbm_blocks, block_size, 1, latent] dtype
  const void* dram_rope;        // [dram_blocks, block_size, rope] dtype
  const void* dram_ckv;         // [dram_blocks, block_size, latent] dtype
  void* out;                    // out [rows, heads, latent] dtype
  int64_t* copied_bytes;        // out [1] or null
  double scale;
  int64_t rows, heads, latent, rope, requests, topk, miss_capacity;
  int64_t hbm_blocks, dram_blocks, block_size, hbm_max_blocks, dram_max_blocks;
  int64_t dtype, threads, device;
} sluice_copy_attention_args;

typedef struct {
  int64_t size;
  const void* weights;          // [rows, heads] weights_dtype
  const uint16_t* query_scale;  // [rows, heads] float16, null unless dtype is int8
  const void* query;            // [rows, heads, dims] dtype
  const uint16_t* key_scale;    // [blocks, block_size, 1] float16, null unless dtype is int8
  const void* key_cache;        // [blocks, block_size, 1, dims] dtype
  const int32_t* block_table;   // [requests, max_blocks]
  const int32_t* query_ends;    // [requests], cumulative
  const int32_t* key_lens;      // [requests]
  const int32_t* stable_lens;   // [requests] L
  const int32_t* cache_tokens;  // [requests] C
  const int32_t* states;        // [requests] -3, -2 or -1
  const int32_t* pool_entries;  // [requests], distinct
  int32_t* slots_pool;          // in/out [pool_rows, pool_width]
  int32_t* topk_src_ids;        // out [rows, topk]
  int32_t* topk_dst_slots;      // out [rows, topk]
  int32_t* topk_miss_counts;    // out [rows]
  int32_t* miss_src_ids;        // out [requests, miss_capacity]
  int32_t* miss_dst_slots;      // out [requests, miss_capacity]
  int32_t* miss_counts;         // out [requests]
  float* topk_scores;           // out [rows, topk] or null
  int64_t rows, heads, dims, requests, blocks, block_size, max_blocks, topk;
  int64_t pool_rows, pool_width, miss_capacity, dtype, weights_dtype, threads;
} sluice_lim_args;

typedef struct {
  int64_t size;
  const void* weights;          // [rows, heads] weights_dtype
  const uint16_t* query_scale;  // [rows, heads] float16, null unless dtype is int8
  const void* query;            // [rows, heads, dims] dtype
  const uint16_t* key_scale;    // [blocks, block_size, 1] float16, null unless dtype is int8
  const void* key_cache;        // [blocks, block_size, 1, dims] dtype
  const int32_t* block_table;   // [requests, max_blocks]
  const int32_t* query_ends;    // [requests], cumulative
  const int32_t* key_lens;      // [requests]
  const int32_t* stable_lens;   // [requests] L
  const int32_t* cache_tokens;  // [requests] C
  const int32_t* states;        // [requests]
  const int32_t* topk_src_ids;  // [rows, topk]
  const int32_t* topk_dst_slots;    // [rows, topk]
  const float* topk_scores;     // [rows, topk] or null: computed
  int32_t* ids;                 // out [rows, topk]
  int32_t* slots;               // out [rows, topk]
  int64_t rows, heads, dims, requests, blocks, block_size, max_blocks, topk;
  int64_t dtype, weights_dtype, threads;
} sluice_tail_args;

typedef struct {
  int64_t size;
  const void* rows;             // [count, dims] dtype
  int8_t* values;               // out [count, dims]
  uint16_t* scales;             // out [count] float16
  int64_t count, dims, dtype, threads;
} sluice_quantise_args;

int sluice_lightning_indexer(const sluice_indexer_args* args);
int sluice_sparse_flash_attention(const sluice_attention_args* args);
int sluice_lru_residency(const sluice_residency_args* args);
int sluice_copy_sparse_flash_attention(const sluice_copy_attention_args* args);
int sluice_lightning_indexer_manage(const sluice_lim_args* args);
int sluice_select_with_tail(const sluice_tail_args* args);
int sluice_hadamard_quantise(const sluice_quantise_args* args);

// Message of the calling thread's last failure; valid until its next call.
const char* sluice_ops_last_error(void);

// Names of the instruction sets this machine can run, best first, separated by commas ("avx512,avx2,portable").
const char* sluice_ops_isas(void);

// Uses the named instruction set from now on (process-wide; "" = the best one).
int sluice_ops_select_isa(const char* name);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
