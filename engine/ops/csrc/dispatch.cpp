// Chooses the kernels at run time.
#include <atomic>
#include <cstring>
#include <string>

#include "error.h"
#include "kernels.h"
#include "sluice_ops.h"

namespace sluice {

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx512DotKernels;
#endif

namespace {

struct Supported {
  const Kernels* tables[4] = {};
  int count = 0;
  std::string names;

  Supported() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) add(kAvx512DotKernels);
    if (avx512) add(kAvx512Kernels);
    if (avx2) add(kAvx2Kernels);
#endif
    add(kPortableKernels);
  }

  void add(const Kernels& table) {
    tables[count++] = &table;
    names += names.empty() ? table.name : std::string(",") + table.name;
  }
};

const Supported& supported() {
  static const Supported instance;
  return instance;
}

std::atomic<const Kernels*> selected{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* table = selected.load(std::memory_order_acquire);
  return table ? *table : *supported().tables[0];
}

}  // namespace sluice

extern "C" const char* sluice_ops_isas(void) { return sluice::supported().names.c_str(); }

extern "C" int sluice_ops_select_isa(const char* name) {
  const auto& all = sluice::supported();
  if (name == nullptr || *name == '\0') {
    sluice::selected.store(nullptr, std::memory_order_release);
    return SLUICE_OK;
  }
  for (int i = 0; i < all.count; ++i) {
    if (std::strcmp(all.tables[i]->name, name) == 0) {
      sluice::selected.store(all.tables[i], std::memory_order_release);
      return SLUICE_OK;
    }
  }
  return sluice::invalid("instruction set '%s' cannot run here; legal: %s", name, all.names.c_str());
}
