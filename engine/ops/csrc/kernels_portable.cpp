// Kernels for any machine the compiler targets: SSE2 on x86, NEON (with fused multiply-add) on aarch64.
#include <type_traits>

#include "kernels.h"
#include "sluice_ops.h"

#define SLUICE_LANES 4
#define SLUICE_BLOCK 4
#define SLUICE_ISA_NAME "portable"

namespace sluice {
namespace {
#include "kernels_impl.h"
}  // namespace
extern const Kernels kPortableKernels;
const Kernels kPortableKernels = kTable;
}  // namespace sluice
