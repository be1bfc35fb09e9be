// Keeps each thread of the pool on a core of its own.

#include <omp.h>
#include <sched.h>

// The calling thread's pool: thread i goes to cpus[i]. Returns how many threads did.
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
