// LayerNorm (Ba, Kiros and Hinton, 2016) of rows and GELU (Hendrycks and Gimpel, 2016) of elements,
// which encoders have between their products.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "activation.h"
#include "operators.h"
#include "prepare_rows.h"

namespace {

constexpr int64_t kElementsOfThread = 1 << 14;  // fewer do not pay for a thread

int threads_for(int64_t elements) {
  return std::min<int64_t>(num_threads(), std::max<int64_t>(elements / kElementsOfThread, 1));
}

int64_t count(const View& x) {
  int64_t elements = 1;
  for (int i = 0; i < x.dimensions; i++) elements *= x.sizes[i];
  return elements;
}

template <class Element>
void normalize_row(const Element* row, int64_t width, const Element* weights, const Element* bias,
                   float epsilon, Element* to) {
  Floats sums{};
  for (int64_t i = 0; i < width; i += kLanes) sums += load_first_floats(row + i, width - i);
  const Floats mean = broadcast(reduce_add(sums) / width);
  Floats squares{};
  float last = 0;
  int64_t at = 0;
  for (; at + kLanes <= width; at += kLanes) {
    const Floats x = load_first_floats(row + at, kLanes) - mean;
    squares += x * x;
  }
  for (; at < width; at++) {
    const float x = load_first_floats(row + at, 1)[0] - mean[0];
    last += x * x;
  }
  const Floats inverse = broadcast(1 / std::sqrt((reduce_add(squares) + last) / width + epsilon));
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t left = width - i;
    Floats x = (load_first_floats(row + i, left) - mean) * inverse;
    if (weights) x *= load_first_floats(weights + i, left);
    if (bias) x += load_first_floats(bias + i, left);
    store_first_floats(to + i, left, x);
  }
}

template <class Element>
void normalize(const View& x, const View* weight, const View* bias, float epsilon, void* out) {
  const int64_t width = x.sizes[x.dimensions - 1], rows = width ? count(x) / width : 0;
  const int threads = threads_for(rows * width);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; row++)
    normalize_row(x.as<const Element>() + row * width, width, maybe<Element>(weight),
                  maybe<Element>(bias), epsilon, static_cast<Element*>(out) + row * width);
}

// Norms the rows of a contiguous tensor, float32 or bfloat16; weights and bias have its type.
void layer_norm(const Result& result, const View& x, const View* weight, const View* bias,
                double epsilon) {
  void* const out = result.make(x.sizes, x.dimensions, x.dtype);
  const auto run = x.is_float32() ? normalize<float> : normalize<uint16_t>;
  run(x, weight, bias, epsilon, out);
}
OCTAVO_OPERATOR(layer_norm)

template <class Element, int kind>
void activate_all(const View& x, void* out) {
  const int64_t elements = count(x);
  const int threads = threads_for(elements);
  const auto* from = x.as<const Element>();
  auto* const to = static_cast<Element*>(out);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < elements; i += kLanes)
    store_first_floats(to + i, elements - i,
                       activate(load_first_floats(from + i, elements - i), kind, 1));
}

// Returns the GELU of a contiguous tensor, float32 or bfloat16; `tanh` approximates it so.
void gelu(const Result& result, const View& x, bool tanh) {
  void* const out = result.make(x.sizes, x.dimensions, x.dtype);
  if (x.is_float32())
    (tanh ? activate_all<float, kGeluTanh> : activate_all<float, kGelu>)(x, out);
  else
    (tanh ? activate_all<uint16_t, kGeluTanh> : activate_all<uint16_t, kGelu>)(x, out);
}
OCTAVO_OPERATOR(gelu)

}  // namespace
