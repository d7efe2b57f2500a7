// Kernels for x86 with AVX2, FMA and F16C.
#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>

#include "kernels.h"
#include "sluice_ops.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define SLUICE_LANES 8
#define SLUICE_BLOCK 4
#define SLUICE_ISA_NAME "avx2"

namespace sluice {
namespace {
#include "kernels_impl.h"
}  // namespace
extern const Kernels kAvx2Kernels;
const Kernels kAvx2Kernels = kTable;
}  // namespace sluice

#pragma GCC pop_options
#endif
