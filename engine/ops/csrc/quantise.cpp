// sluice_hadamard_quantise: rotate rows and round them to int8, one half-precision scale per row.
#include <algorithm>
#include <cmath>

#include "error.h"
#include "kernels.h"
#include "paged.h"
#include "parallel.h"
#include "sluice_ops.h"
#include "workspace.h"

namespace sluice {
namespace {

using Args = sluice_quantise_args;

constexpr float kLargestHalf = 65504.0f;
constexpr int64_t kRowsPerUnit = 64;

// Same operations in the same order as the reference, so that both round alike.
void quantise_row(const Args& a, int64_t row, float* x) {
  const Kernels& kernel = kernels();
  kernel.widen(static_cast<const char*>(a.rows) + row * a.dims * element_bytes(a.dtype), a.dtype, x, a.dims);
  for (int64_t width = 1; width < a.dims; width *= 2)
    for (int64_t first = 0; first < a.dims; first += 2 * width)
      for (int64_t d = first; d < first + width; ++d) {
        const float low = x[d], high = x[d + width];
        x[d] = low + high;
        x[d + width] = low - high;
      }
  const float norm = static_cast<float>(1.0 / std::sqrt(static_cast<double>(a.dims)));
  float most = 0.0f;
  for (int64_t d = 0; d < a.dims; ++d) {
    x[d] *= norm;
    const float magnitude = std::fabs(x[d]);
    most = most >= magnitude || most != most ? most : magnitude;  // a NaN stays
  }
  const float wanted = most / 127.0f > kLargestHalf ? kLargestHalf : most / 127.0f;
  uint16_t half;
  kernel.narrow(&wanted, 1.0f, SLUICE_FLOAT16, &half, 1);
  float scale;
  kernel.widen(&half, SLUICE_FLOAT16, &scale, 1);
  a.scales[row] = half;
  int8_t* out = a.values + row * a.dims;
  for (int64_t d = 0; d < a.dims; ++d) {
    const float value = scale > 0.0f ? std::nearbyint(x[d] / scale) : 0.0f;
    out[d] = static_cast<int8_t>(std::min(std::max(value, -127.0f), 127.0f));
  }
}

int run(const Args& a) {
  const int64_t units = (a.count + kRowsPerUnit - 1) / kRowsPerUnit;
  parallel_for(a.threads, units, [&](int64_t unit) {
    thread_local Scratch memory;
    float* x = memory.take<float>(a.dims);
    for (int64_t row = unit * kRowsPerUnit; row < std::min((unit + 1) * kRowsPerUnit, a.count); ++row)
      quantise_row(a, row, x);
  });
  return SLUICE_OK;
}

}  // namespace
}  // namespace sluice

extern "C" int sluice_hadamard_quantise(const sluice_quantise_args* args) { return sluice::enter(args, sluice::run); }
