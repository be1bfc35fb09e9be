// Prepares rows for products: normed, rounded to bytes, or unchanged.
//
// Elements are uint16_t, which is bfloat16 here, or float.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "linear.h"

// A thread's buffer for prepared rows, kept between calls. Each type has its own.
template <class Element>
Element* scratch(int64_t count) {
  thread_local std::vector<Element> memory;
  if (static_cast<int64_t>(memory.size()) < count) memory.resize(count);
  return memory.data();
}

inline Floats load_first_floats(const uint16_t* from, int64_t count) {
  return BFloat16::widen(load_first<Halves>(from, count));
}
inline Floats load_first_floats(const float* from, int64_t count) {
  return load_first<Floats>(from, count);
}
inline void store_first_floats(uint16_t* to, int64_t count, Floats x) {
  store_first(to, count, BFloat16::narrow(x));
}
inline void store_first_floats(float* to, int64_t count, Floats x) { store_first(to, count, x); }

// Rounds to elements where the model does, so that near ties end the same way.
template <class Element>
Floats rounded(Floats x) {
  return sizeof(Element) == 2 ? BFloat16::widen(BFloat16::narrow(x)) : x;
}

// RMSNorm (Zhang and Sennrich, 2019): a row divided by its root mean square, times weights.
template <class Element>
float inverse_rms(const Element* row, const LinearLayer& layer) {
  Floats squares{};
  for (int64_t i = 0; i < layer.inputs; i += kLanes) {
    const Floats x = load_first_floats(row + i, layer.inputs - i);
    squares += x * x;
  }
  return 1 / std::sqrt(reduce_add(squares) / layer.inputs + layer.epsilon);
}

template <class Element>
void norm_row(const Element* row, const LinearLayer& layer, Element* to) {
  const auto* weights = static_cast<const Element*>(layer.norm);
  const Floats inverse = broadcast(inverse_rms(row, layer));
  for (int64_t i = 0; i < layer.inputs; i += kLanes) {
    const int64_t left = layer.inputs - i;
    const Floats x = rounded<Element>(load_first_floats(row + i, left) * inverse);
    store_first_floats(to + i, left, x * load_first_floats(weights + i, left));
  }
}

// A row in bytes: an element is (byte - zero) * step.
struct Range {
  float step, zero;
};

// A row's inputs times their factors, before rounding.
struct Factored {
  const uint16_t* row;
  const uint16_t* norm;
  const float* factors;
  int64_t count;

  Floats at(int64_t i) const {
    const int64_t left = count - i;
    const Floats x = load_first_floats(row + i, left) * load_first<Floats>(factors + i, left);
    return norm ? x * load_first_floats(norm + i, left) : x;
  }
};

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

inline Range round_row(const uint16_t* row, const LinearLayer& layer, const float* factors,
                       uint8_t* bytes) {
  constexpr float kTiny = 1e-8f;  // avoids division by zero
  const Factored x{row, static_cast<const uint16_t*>(layer.norm), factors, layer.inputs};
  Floats least{}, greatest{};  // the range always includes zero
  for (int64_t i = 0; i < x.count; i += kLanes) {
    least = min(least, x.at(i));
    greatest = max(greatest, x.at(i));
  }
  const float low = -reduce_max(-least);
  const float step = std::max((reduce_max(greatest) - low) / 255, kTiny);
  const Ints zero = round_to_ints(broadcast(-low / step));
  const Floats inverse = broadcast(1 / step);
  for (int64_t i = 0; i < x.count; i += kLanes) {
    Ints whole = round_to_ints(x.at(i) * inverse) + zero;
    whole = whole < 0 ? Ints{} : whole;
    whole = whole > 255 ? broadcast(255) : whole;
    store_first(bytes + i, x.count - i, __builtin_convertvector(whole, Bytes));
  }
  // Dividing a whole row by its norm equals dividing the step.
  const float scale = layer.norm ? inverse_rms(row, layer) : 1;
  return {step * scale, static_cast<float>(zero[0])};
}

// Converts products of a row's bytes and a panel's weights to float32. `scales` and `row_sums` are
// the panel's; see packed_linear_int8.
inline void to_floats(const Ints* sums, const Range& range, const float* scales,
                      const float* row_sums, Floats* values) {
  for (int j = 0; j < kPanelVectors; j++) {
    const Floats product =
        __builtin_convertvector(sums[j], Floats) * load<Floats>(scales + j * kLanes);
    const Floats shift = load<Floats>(row_sums + j * kLanes) * (range.zero - Fours::kOffset);
    values[j] = (product - shift) * range.step;
  }
}
