// Work sharing over a small pool of threads that stays alive between calls.
#pragma once

#include <cstdint>
#include <functional>

namespace sluice {

// Calls work(unit) once for every unit in [0, units), on at most `threads` threads including the caller, and returns
// when all have ended; the first exception is thrown again in the caller. The pool serves one call at a time: a call
// that finds it busy runs on its caller alone. Safe after fork (the child makes a pool of its own).
void parallel_for(int64_t threads, int64_t units, const std::function<void(int64_t)>& work);

}  // namespace sluice
