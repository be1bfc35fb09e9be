// Pins each thread of the pool to its own core.

#include <omp.h>
#include <sched.h>

// Pins thread i of the calling thread's pool to cpus[i]. Returns the number of pinned threads.
extern "C" int octavo_pin_threads(const int* cpus, int threads) {
  int pinned = 0;
#pragma omp parallel num_threads(threads) reduction(+ : pinned)
  {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpus[omp_get_thread_num()], &one);
    pinned = sched_setaffinity(0, sizeof one, &one) == 0;
  }
  return pinned;
}
