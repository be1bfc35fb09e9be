// Pins each thread of the pool to a core.

#include <omp.h>
#include <sched.h>

// Pins thread i of the calling thread's pool to the CPUs from cpus[ends[i - 1]] to before
// cpus[ends[i]]; the first begins at cpus[0]. Returns the number of pinned threads.
extern "C" int octavo_pin_threads(const int* cpus, const int* ends, int threads) {
  int pinned = 0;
#pragma omp parallel num_threads(threads) reduction(+ : pinned)
  {
    const int thread = omp_get_thread_num();
    const int begin = thread ? ends[thread - 1] : 0, end = ends[thread];
    int most = 0;
    for (int i = begin; i < end; i++) most = cpus[i] > most ? cpus[i] : most;
    cpu_set_t* core = CPU_ALLOC(most + 1);  // a cpu_set_t ends at CPU 1023
    const size_t size = CPU_ALLOC_SIZE(most + 1);
    CPU_ZERO_S(size, core);
    for (int i = begin; i < end; i++) CPU_SET_S(cpus[i], size, core);
    pinned = sched_setaffinity(0, size, core) == 0;
    CPU_FREE(core);
  }
  return pinned;
}
