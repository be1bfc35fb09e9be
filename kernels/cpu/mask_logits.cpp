// Makes the tokens that a bit mask excludes impossible.

#include <algorithm>
#include <cstdint>

#include "operators.h"
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

// Masks rows. Bit i % 32 of word i / 32 of a row's mask allows token i.
void mask_logits(const View& logits, const View& rows, const View& masks) {
  require(logits.has_whole_rows(), "rows of logits must be contiguous");
  const int64_t words = masks.sizes[1], count = rows.sizes[0];
  with_dtype(dtype_number(logits.dtype), [&](auto type) {
    using Type = decltype(type);
#pragma omp parallel for num_threads(num_threads()) if (count > 1) schedule(dynamic)
    for (int64_t i = 0; i < count; i++)
      mask_row<Type>(logits.as<typename Type::Stored>() + rows.as<int64_t>()[i] * logits.strides[0],
                     logits.sizes[1], masks.as<const uint32_t>() + i * words, words);
  });
}
OCTAVO_OPERATOR(mask_logits)

}  // namespace
