// RMSNorm (Zhang and Sennrich, 2019) of rows that no product norms: heads, and results that a layer
// adds to its input.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "operators.h"
#include "prepare_rows.h"

namespace {

constexpr int64_t kElementsOfThread = 1 << 14;  // fewer do not pay for a thread

template <class Element, class Weight>
void norm_row(const Element* row, int64_t width, const Weight* weights, float epsilon,
              bool rounds_first, Element* to) {
  Floats squares{};
  for (int64_t i = 0; i < width; i += kLanes) {
    const Floats x = load_first_floats(row + i, width - i);
    squares += x * x;
  }
  const Floats inverse = broadcast(1 / std::sqrt(reduce_add(squares) / width + epsilon));
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t left = width - i;
    Floats x = load_first_floats(row + i, left) * inverse;
    if (rounds_first) x = rounded<Element>(x);
    if (weights) x *= load_first_floats(weights + i, left);
    store_first_floats(to + i, left, x);
  }
}

// Returns the offset of a row in a strided tensor.
int64_t offset_of(int64_t row, int dimensions, const int64_t* sizes, const int64_t* strides) {
  int64_t offset = 0;
  for (int i = dimensions - 1; i >= 0; i--) {
    offset += row % sizes[i] * strides[i];
    row /= sizes[i];
  }
  return offset;
}

template <class Element, class Weight>
void norm_rows(const void* x, int dimensions, const int64_t* sizes, const int64_t* strides,
               const void* weights, float epsilon, bool rounds_first, void* out, int threads) {
  const int leading = dimensions - 1;
  const int64_t width = sizes[leading];
  int64_t rows = 1;
  for (int i = 0; i < leading; i++) rows *= sizes[i];
  const int64_t most = std::max<int64_t>(rows * width / kElementsOfThread, 1);
#pragma omp parallel for num_threads(std::min<int64_t>(threads, most)) if (most > 1)
  for (int64_t row = 0; row < rows; row++)
    norm_row(static_cast<const Element*>(x) + offset_of(row, leading, sizes, strides), width,
             static_cast<const Weight*>(weights), epsilon, rounds_first,
             static_cast<Element*>(out) + row * width);
}

// Norms the rows of a tensor, float32 or bfloat16, whose elements are adjacent, into a contiguous one.
// `rounds_first` also rounds to the elements' type before multiplying by the weights.
void rms_norm(const Result& result, const View& x, const View* weight, double epsilon,
              bool rounds_first) {
  require(x.has_whole_rows(), "rows must be contiguous");
  void* const out = result.make(x.sizes, x.dimensions, x.dtype);
  const bool wide_weight = weight && weight->is_float32();
  const auto run = x.is_float32()
                       ? (wide_weight ? norm_rows<float, float> : norm_rows<float, uint16_t>)
                       : (wide_weight ? norm_rows<uint16_t, float> : norm_rows<uint16_t, uint16_t>);
  run(x.data, x.dimensions, x.sizes, x.strides, maybe<void>(weight), epsilon, rounds_first, out,
      num_threads());
}
OCTAVO_OPERATOR(rms_norm)

}  // namespace
