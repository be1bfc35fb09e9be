// Finds the greatest element of each row.

#include <algorithm>
#include <cstdint>

#include "operators.h"
#include "vector.h"

namespace {

constexpr int kMaxima = 4;  // at a time: independent, so none waits for the previous one

template <class Type>
int64_t argmax_row(const typename Type::Stored* row, int64_t columns) {
  typename Type::Stored few[kLanes];
  if (columns < kLanes) {  // padding repeats the first element, so it is never the result
    for (int64_t i = 0; i < kLanes; i++) few[i] = row[i < columns ? i : 0];
    row = few;
    columns = kLanes;
  }
  const int64_t last = columns - kLanes;  // the last vector may overlap the previous one
  Floats maxima[kMaxima];
  for (Floats& most : maxima) most = Type::load_floats(row);
  for (int64_t i = 0; i < columns; i += kMaxima * kLanes)
#pragma GCC unroll 4
    for (int k = 0; k < kMaxima; k++)
      maxima[k] = max(maxima[k], Type::load_floats(row + std::min(i + k * kLanes, last)));
  Floats most = maxima[0];
  for (const Floats& other : maxima) most = max(most, other);
  const float greatest = reduce_max(most);
  for (int64_t i = 0; i < columns; i += kLanes) {
    const int64_t first = std::min(i, last);
    const Ints equal = Type::load_floats(row + first) == broadcast(greatest);
    for (int lane = 0; lane < kLanes; lane++)
      if (equal[lane]) return first + lane;
  }
  return 0;  // a row of NaN has no greatest element
}

// Sets `columns` to the column of each row's greatest element, the first on a tie.
void argmax(const View& rows, const View& columns) {
  const int64_t count = rows.sizes[0];
  with_dtype(dtype_number(rows.dtype), [&](auto type) {
    using Type = decltype(type);
#pragma omp parallel for num_threads(num_threads()) if (count > 1)
    for (int64_t row = 0; row < count; row++)
      columns.as<int64_t>()[row] = argmax_row<Type>(
          rows.as<const typename Type::Stored>() + row * rows.strides[0], rows.sizes[1]);
  });
}
OCTAVO_OPERATOR(argmax)

}  // namespace
