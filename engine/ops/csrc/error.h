// Errors for the caller of the C ABI.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

#include "sluice_ops.h"

namespace sluice {

// Stores the message for sluice_ops_last_error() of this thread; returns SLUICE_INVALID.
int invalid(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Stores the message like invalid(); returns SLUICE_FAILED.
int failed(const char* message);

// Body of every entry point: checks the struct's size and lets no exception cross the C ABI.
template <typename Args>
int enter(const Args* args, int (*run)(const Args&)) {
  if (args->size != sizeof *args)
    return invalid("argument struct has %lld bytes; this library was built for %lld", static_cast<long long>(args->size),
                   static_cast<long long>(sizeof *args));
  try {
    return run(*args);
  } catch (const std::exception& error) {
    return failed(error.what());
  }
}

// First bad value met by any worker of one call. Workers report and go on with other work; the caller turns it into a
// message. A report names the row (or request) and the value.
class FirstFault {
 public:
  void report(int64_t where, int64_t value) {
    bool none = false;
    if (claimed_.compare_exchange_strong(none, true)) {
      where_ = where;
      value_ = value;
    }
  }
  // The accessors are for the caller, after all workers have ended.
  explicit operator bool() const { return claimed_.load(); }
  int64_t where() const { return where_; }
  int64_t value() const { return value_; }

 private:
  std::atomic<bool> claimed_{false};
  int64_t where_ = 0;
  int64_t value_ = 0;
};

}  // namespace sluice
