// RMSNorm (Zhang and Sennrich, 2019) of rows that no product norms: heads, and results that a layer
// adds to its input.

#include <algorithm>
#include <cmath>
#include <cstdint>

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

}  // namespace

// Norms the rows of a tensor, whose elements are adjacent, into a contiguous one.
//
// Elements are float32 if `wide`, else bfloat16, and so are weights, which may be null.
// `rounds_first` also rounds to the elements' type before multiplying by the weights.
extern "C" void octavo_rms_norm(const void* x, int dimensions, const int64_t* sizes,
                                const int64_t* strides, bool wide, const void* weights,
                                bool wide_weights, float epsilon, bool rounds_first, void* out,
                                int threads) {
  const auto run = wide ? (wide_weights ? norm_rows<float, float> : norm_rows<float, uint16_t>)
                        : (wide_weights ? norm_rows<uint16_t, float>
                                        : norm_rows<uint16_t, uint16_t>);
  run(x, dimensions, sizes, strides, weights, epsilon, rounds_first, out, threads);
}
