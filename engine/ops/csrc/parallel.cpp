#include "parallel.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

namespace sluice {
namespace {

struct Job {
  const std::function<void(int64_t)>* work;
  int64_t units;
  std::atomic<int64_t> next{0};
  std::mutex failure_lock;
  std::exception_ptr failure;

  void drain() {
    try {
      for (int64_t unit; (unit = next.fetch_add(1)) < units;) (*work)(unit);
    } catch (...) {
      std::lock_guard<std::mutex> hold(failure_lock);
      if (!failure) failure = std::current_exception();
      next.store(units);
    }
  }
};

// Helpers sleep until a job with free seats is posted. They are detached and the pool is never destroyed, so process
// exit does not wait for them.
class Pool {
 public:
  std::mutex busy;
  const pid_t owner = getpid();

  void run(Job& job, int64_t helpers) {
    {
      std::lock_guard<std::mutex> hold(lock_);
      for (; started_ < helpers; ++started_) std::thread([this] { serve(); }).detach();
      job_ = &job;
      seats_ = helpers;
    }
    wake_.notify_all();
    job.drain();
    std::unique_lock<std::mutex> hold(lock_);
    seats_ = 0;
    idle_.wait(hold, [this] { return running_ == 0; });
    job_ = nullptr;
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> hold(lock_);
    for (;;) {
      wake_.wait(hold, [this] { return seats_ > 0; });
      --seats_;
      ++running_;
      Job* job = job_;
      hold.unlock();
      job->drain();
      hold.lock();
      if (--running_ == 0) idle_.notify_all();
    }
  }

  std::mutex lock_;
  std::condition_variable wake_, idle_;
  Job* job_ = nullptr;
  int64_t seats_ = 0, running_ = 0, started_ = 0;
};

Pool& pool() {
  static std::atomic<Pool*> current{nullptr};
  Pool* found = current.load();
  while (found == nullptr || found->owner != getpid()) {
    Pool* fresh = new Pool;
    if (current.compare_exchange_strong(found, fresh)) return *fresh;
    delete fresh;
  }
  return *found;
}

}  // namespace

void parallel_for(int64_t threads, int64_t units, const std::function<void(int64_t)>& work) {
  const int64_t helpers = std::min(threads, units) - 1;
  if (helpers > 0) {
    Pool& shared = pool();
    std::unique_lock<std::mutex> mine(shared.busy, std::try_to_lock);
    if (mine.owns_lock()) {
      Job job;
      job.work = &work;
      job.units = units;
      shared.run(job, helpers);
      if (job.failure) std::rethrow_exception(job.failure);
      return;
    }
  }
  for (int64_t unit = 0; unit < units; ++unit) work(unit);
}

}  // namespace sluice
