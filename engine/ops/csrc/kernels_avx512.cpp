// Kernels for x86 with AVX-512 (F, BW, DQ, VL).
#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>

#include "kernels.h"
#include "sluice_ops.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#define SLUICE_LANES 16
#define SLUICE_BLOCK 8
#define SLUICE_ISA_NAME "avx512"

namespace sluice {
namespace {
#include "kernels_impl.h"
}  // namespace
extern const Kernels kAvx512Kernels;
const Kernels kAvx512Kernels = kTable;
}  // namespace sluice

#pragma GCC pop_options
#endif
