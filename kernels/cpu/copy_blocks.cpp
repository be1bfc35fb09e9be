// Copies blocks between or within caches.

#include <cstdint>
#include <cstring>

#include "operators.h"

namespace {

void copy_blocks(const View& source, const View& destination, const View& pairs,
                 int64_t block_bytes) {
  const auto* numbers = pairs.as<const int64_t>();
#pragma omp parallel for num_threads(num_threads()) if (pairs.sizes[0] > 1)
  for (int64_t i = 0; i < pairs.sizes[0]; i++)
    std::memcpy(destination.as<char>() + numbers[2 * i + 1] * block_bytes,
                source.as<char>() + numbers[2 * i] * block_bytes, block_bytes);
}
OCTAVO_OPERATOR(copy_blocks)

}  // namespace
