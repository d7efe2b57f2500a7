// Top-k selection for a batch, shared by the indexer and the fused indexer.
#pragma once

#include <cstdint>

#include "sluice_ops.h"

namespace sluice {

// What the rows of each request may select from: if searched is null or searched[i] < 0, row r of request i sees
// [0, key_lens[i] - (query_ends[i] - 1 - r)), else every row of it sees [0, searched[i]).
int select_topk(const sluice_indexer_args& args, const int32_t* searched);

}  // namespace sluice
