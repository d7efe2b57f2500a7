// Kernels for x86 with AVX-512 (F, BW, DQ, VL), BF16 and VNNI.
#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>

#include "kernels.h"
#include "sluice_ops.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c,prefer-vector-width=512")
#define SLUICE_HAS_DOT
#define SLUICE_LANES 16
#define SLUICE_BLOCK 8
#define SLUICE_ISA_NAME "avx512-dot"

namespace sluice {
namespace {
#include "kernels_impl.h"
}  // namespace
extern const Kernels kAvx512DotKernels;
const Kernels kAvx512DotKernels = kTable;
}  // namespace sluice

#pragma GCC pop_options
#endif
