#include "error.h"

#include <cstdarg>
#include <cstdio>

#include "sluice_ops.h"

namespace {
thread_local char message[512] = "";
}

namespace sluice {

int invalid(const char* format, ...) {
  va_list values;
  va_start(values, format);
  std::vsnprintf(message, sizeof message, format, values);
  va_end(values);
  return SLUICE_INVALID;
}

int failed(const char* reason) {
  std::snprintf(message, sizeof message, "%s", reason);
  return SLUICE_FAILED;
}

}  // namespace sluice

extern "C" const char* sluice_ops_last_error(void) { return message; }
