// Divides panels among threads so that each thread reads memory in order.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

// Distance from a thread's reads to its prefetches, in bytes.
constexpr int kStreamBytes = 4096;

// The cache level that __builtin_prefetch fills. Panels that are read again do not fit in the
// first.
enum Locality { kSecondCache = 2, kFirstCache = 3 };

// Gives each thread a range of adjacent panels. A thread that has finished its range takes panels of
// the other ranges, because other processes may slow some threads.
class Streams {
 public:
  Streams(int64_t panels, int threads) : panels_(panels), ranges_(std::min(threads, kMostRanges)) {
    for (int i = 0; i < ranges_; i++) next_[i].panel = begin(i);
  }

  // Calls run(panel) for each panel that no other thread has taken. `thread` is the number of the
  // calling thread.
  template <class Run>
  void run(int thread, Run run) {
    for (int i = 0; i < ranges_; i++) {
      const int range = (thread + i) % ranges_;
      const int64_t end = begin(range + 1);
      std::atomic<int64_t>& next = next_[range].panel;
      while (next.load(std::memory_order_relaxed) < end) {
        const int64_t panel = next.fetch_add(1, std::memory_order_relaxed);
        if (panel < end) run(panel);
      }
    }
  }

 private:
  static constexpr int kMostRanges = 64;
  struct alignas(64) Next {  // its own line: one thread alone writes it until it is done
    std::atomic<int64_t> panel;
  };

  int64_t begin(int range) const { return panels_ * range / ranges_; }

  const int64_t panels_;
  const int ranges_;
  Next next_[kMostRanges];
};

// Calls run(panel) for all panels, in several threads.
template <class Run>
void stream_panels(int64_t panels, int threads, Run run) {
  Streams streams(panels, threads);
#pragma omp parallel num_threads(threads)
  streams.run(omp_get_thread_num(), run);
}
