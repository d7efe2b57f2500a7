// sluice_lightning_indexer: top-k source positions of every query row.
#include "error.h"
#include "select.h"
#include "sluice_ops.h"

namespace sluice {
namespace {

int run(const sluice_indexer_args& a) {
  if (check_query_ends("query_ends", a.query_ends, a.requests, a.rows, true)) return SLUICE_INVALID;
  return select_topk(IndexBatch::of(a, a.weights_dtype), {nullptr, true, a.topk_ids, nullptr, nullptr, 0});
}

}  // namespace
}  // namespace sluice

extern "C" int sluice_lightning_indexer(const sluice_indexer_args* args) {
  return sluice::enter(args, sluice::run);
}
