// Copies whole blocks within a cache or between two caches.

#include <cstdint>
#include <cstring>

// `pairs` is [num_pairs][2]: source and destination block. Blocks are contiguous.
extern "C" void octavo_copy_blocks(
    const char* source, char* destination, const int64_t* pairs, int64_t num_pairs,
    int64_t block_bytes, int threads) {
#pragma omp parallel for num_threads(threads) if (num_pairs > 1)
  for (int64_t i = 0; i < num_pairs; i++)
    std::memcpy(destination + pairs[2 * i + 1] * block_bytes,
                source + pairs[2 * i] * block_bytes, block_bytes);
}
