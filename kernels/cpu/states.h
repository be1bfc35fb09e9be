// Functions that the kernels of stateful layers share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "fetcher.h"
#include "product.h"
#include "vector.h"

constexpr float kLog2OfE = 1.4426950408889634f;
constexpr int kFloatsPerLine = 16;

inline int num_vectors(int count) { return (count + kLanes - 1) / kLanes; }
inline int whole_vectors(int count) { return num_vectors(count) * kLanes; }

// Copies `count` elements as floats, with zeros up to a whole vector.
template <class T>
void widen(const typename T::Stored* from, int count, float* to) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, T::load_floats(from + i));
  if (i == count) return;
  typename T::Stored tail[kLanes] = {};
  std::memcpy(tail, from + i, (count - i) * sizeof *tail);
  store(to + i, T::load_floats(tail));
}

// Stores `count` floats, which are readable up to a whole vector.
template <class T>
void narrow(const float* from, int count, typename T::Stored* to) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) T::store_floats(to + i, load<Floats>(from + i));
  if (i == count) return;
  typename T::Stored tail[kLanes];
  T::store_floats(tail, load<Floats>(from + i));
  std::memcpy(to + i, tail, (count - i) * sizeof *tail);
}

// 2^x and e^x, at most 2^127.
inline Floats power_of_2(Floats x) { return exp2(min(x, broadcast(127.f))); }
inline Floats power_of_e(Floats x) { return power_of_2(x * kLog2OfE); }
inline float power_of_e(float x) { return power_of_e(broadcast(x))[0]; }

// log(1 + e^x), to 1e-6 of it. With u = e^-|x|, log(1 + u) = 2 atanh(u / (2 + u)).
inline Floats softplus(Floats x) {
  const Floats u = power_of_e(x > 0.f ? -x : x);
  const Floats s = u / (u + 2.f), square = s * s;  // at most 1/9
  Floats series = broadcast(1 / 15.f);
  series = series * square + 1 / 13.f;
  series = series * square + 1 / 11.f;
  series = series * square + 1 / 9.f;
  series = series * square + 1 / 7.f;
  series = series * square + 1 / 5.f;
  series = series * square + 1 / 3.f;
  series = series * square + 1.f;
  return max(x, Floats{}) + 2.f * s * series;
}

template <int kOdd, size_t... kIndex>
Floats every_other(Floats a, Floats b, std::index_sequence<kIndex...>) {
  return choose(a, b, std::index_sequence<2 * kIndex + kOdd...>());
}

// Returns column kColumn of kLanes rows of 3 elements, which three vectors hold.
template <int kColumn, size_t... kIndex>
Floats column_of_3(const Floats* rows, std::index_sequence<kIndex...>) {
  constexpr size_t two = 2 * kLanes;
  const Floats first = choose(
      rows[0], rows[1],
      std::index_sequence<(3 * kIndex + kColumn < two ? 3 * kIndex + kColumn : 0)...>());
  return choose(first, rows[2],
                std::index_sequence<(3 * kIndex + kColumn < two
                                         ? kIndex
                                         : 3 * kIndex + kColumn - two + kLanes)...>());
}

// Returns vector kVector of kLanes rows of 3 elements, given their columns.
template <int kVector, size_t... kIndex>
Floats rows_of_3(const Floats* columns, std::index_sequence<kIndex...>) {
  constexpr size_t first = kVector * kLanes;
  const Floats two = choose(
      columns[0], columns[1],
      std::index_sequence<(first + kIndex) / 3 + ((first + kIndex) % 3 == 1 ? kLanes : 0)...>());
  return choose(two, columns[2],
                std::index_sequence<((first + kIndex) % 3 == 2 ? kLanes + (first + kIndex) / 3
                                                               : kIndex)...>());
}

// Returns the sums of the lanes of kLanes vectors, which are overwritten.
inline Floats sum_lanes(Floats* vectors) {
  constexpr std::make_index_sequence<kLanes> lanes;
#pragma GCC unroll 4
  for (int count = kLanes / 2; count; count /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
      const Floats a = vectors[2 * i], b = vectors[2 * i + 1];
      vectors[i] = every_other<0>(a, b, lanes) + every_other<1>(a, b, lanes);
    }
  return vectors[0];
}

// A matrix of floats whose rows are whole vectors.
struct Matrix : Elements<Float32> {
  Matrix(const float* first, int64_t stride) : first(first), stride(stride) {}

  Words load(int row, int vector) const {
    return Elements::load(first + row * stride + vector * kLanes);
  }

  const float* first;
  int64_t stride;
};

// c = rescale * c + a * b, for `rows` rows of a and c; see product.h.
inline void multiply(int rows, int depth, const float* a, int a_stride, Matrix b, int columns,
                     float* c, int c_stride, const float* rescale) {
  Product<Float32, Matrix>(depth, reinterpret_cast<const uint32_t*>(a), a_stride, b, c, c_stride,
                           rescale, Fetcher(nullptr, 0, 0, 0, 1))
      .run(rows, columns);
}
