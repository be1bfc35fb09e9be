// Makes the tokens that a bit mask excludes impossible.

#include <algorithm>
#include <cstdint>

#include "row.h"

namespace {

constexpr int64_t kWordBits = 32;  // a multiple of the lanes

template <class Type>
void mask_row(typename Type::Stored* row, int64_t columns, const uint32_t* mask, int64_t words) {
  constexpr uint32_t kAll = kLanes == 32 ? ~0u : (1u << kLanes) - 1;
  for (int64_t i = 0; i < columns; i += kLanes) {
    const int64_t word = i / kWordBits;
    const uint32_t bits = word < words ? mask[word] >> (i % kWordBits) & kAll : 0;
    if (bits == kAll) continue;
    const Ints allowed = (broadcast(int32_t(bits)) >> kLane & 1) != 0;
    const int64_t count = std::min<int64_t>(columns - i, kLanes);
    typename Type::Stored few[kLanes] = {}, *some = row + i;
    if (count < kLanes) some = std::copy(some, some + count, few) - count;
    Type::store_floats(some, allowed ? Type::load_floats(some) : broadcast(kImpossible));
    if (count < kLanes) std::copy(few, few + count, row + i);
  }
}

template <class Type>
void mask_rows(void* logits, int64_t num_rows, int64_t stride, int64_t columns,
               const uint32_t* const* masks, int64_t words, int threads) {
  auto* first = static_cast<typename Type::Stored*>(logits);
#pragma omp parallel for num_threads(threads) if (num_rows > 1) schedule(dynamic)
  for (int64_t row = 0; row < num_rows; row++)
    if (masks[row]) mask_row<Type>(first + row * stride, columns, masks[row], words);
}

}  // namespace

// Masks the rows that have a mask; others have a null pointer. Bit i % 32 of word i / 32 allows token
// i. `dtype` as in cache.h.
extern "C" void octavo_mask_logits(void* logits, int64_t num_rows, int64_t stride, int64_t columns,
                                   int dtype, const uint32_t* const* masks, int64_t words,
                                   int threads) {
  const auto run = dtype == 0   ? mask_rows<Float32>
                   : dtype == 1 ? mask_rows<Float16>
                                : mask_rows<BFloat16>;
  run(logits, num_rows, stride, columns, masks, words, threads);
}
