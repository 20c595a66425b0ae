#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>
#ifndef _WIN32
#include <pthread.h>
#endif

namespace {

struct Pool {
  std::mutex use;  // one loop at a time
  std::mutex mutex;
  std::condition_variable wake, done;
  int64_t threads = 0, wanted = 0, busy = 0, generation = 0, items = 0;
  std::atomic<int64_t> next{0};
  const std::function<void(int64_t, int64_t)>* body = nullptr;

  void work(int64_t worker) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) (*body)(i, worker);
  }

  void serve(int64_t worker) {
    int64_t seen = 0;
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex);
      wake.wait(lock, [&] { return generation != seen; });
      seen = generation;
      if (worker >= wanted) continue;
      lock.unlock();
      work(worker);
      lock.lock();
      if (--busy == 0) done.notify_one();
    }
  }

  void run(int64_t count, int64_t use_threads, const std::function<void(int64_t, int64_t)>& f) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      for (; threads < use_threads - 1; ++threads) {
        // A worker only joins loops published after it was made, so it starts with the generation of now.
        std::thread([this, worker = threads + 1] { serve(worker); }).detach();
      }
      body = &f;
      items = count;
      next.store(0, std::memory_order_relaxed);
      wanted = use_threads;
      busy = use_threads - 1;
      ++generation;
    }
    wake.notify_all();
    work(0);
    std::unique_lock<std::mutex> lock(mutex);
    done.wait(lock, [&] { return busy == 0; });
  }
};

using Team = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);
Team team = nullptr;

// One loop on torch's team: every thread that comes takes a worker number and then items.
struct Loop {
  const std::function<void(int64_t, int64_t)>& body;
  const int64_t items;
  std::atomic<int64_t> next{0}, workers{0};
  static void run(void* loop) {
    Loop& l = *static_cast<Loop*>(loop);
    int64_t worker = l.workers.fetch_add(1, std::memory_order_relaxed);
    for (int64_t i; (i = l.next.fetch_add(1, std::memory_order_relaxed)) < l.items;) l.body(i, worker);
  }
};

// Never destroyed: its threads are detached and may outlive static destructors. A forked child has none of the threads,
// so it starts afresh, without torch's team.
Pool* pool = new Pool;

#ifndef _WIN32
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] {
  pool = new Pool;
  team = nullptr;  // OpenMP does not survive a fork either
});
#endif

}  // namespace

void share_team(void* gomp_parallel) { team = reinterpret_cast<Team>(gomp_parallel); }

void parallel_for(int64_t items, int64_t threads, const std::function<void(int64_t, int64_t)>& body) {
  if (threads > items) threads = items;
  if (threads > 1 && team) {
    Loop loop{body, items};
    return team(Loop::run, &loop, (unsigned)threads, 0);
  }
  std::unique_lock<std::mutex> alone(pool->use, std::defer_lock);
  if (threads <= 1 || !alone.try_lock()) {
    for (int64_t i = 0; i < items; ++i) body(i, 0);
    return;
  }
  pool->run(items, threads, body);
}
