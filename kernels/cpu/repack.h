// Transposes keys in K's layout to values in V's layout (see cache.h), in registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cache.h"
#include "vector.h"

typedef uint16_t Eight __attribute__((vector_size(16)));
typedef uint32_t Four __attribute__((vector_size(16)));

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype(a){__VA_ARGS__})
#endif

// Interleave the first or the last halves of two vectors.
inline Eight zip_low(Eight a, Eight b) { return SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
inline Eight zip_high(Eight a, Eight b) { return SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
inline Four zip_low(Four a, Four b) { return SHUFFLE(a, b, 0, 4, 1, 5); }
inline Four zip_high(Four a, Four b) { return SHUFFLE(a, b, 2, 6, 3, 7); }

#undef SHUFFLE

// Transposes a square, whose rows are vectors.
template <class Vector, int kCount>
inline void transpose(Vector (&rows)[kCount]) {
#pragma GCC unroll 3
  for (int step = 1; step < kCount; step *= 2) {
    Vector zipped[kCount];
#pragma GCC unroll 4
    for (int i = 0; i < kCount / 2; i++) {
      zipped[2 * i] = zip_low(rows[i], rows[i + kCount / 2]);
      zipped[2 * i + 1] = zip_high(rows[i], rows[i + kCount / 2]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kCount; i++) rows[i] = zipped[i];
  }
}

// Copies the first `dims` elements, a multiple of 8, of kMinBlock keys from K's layout to V's.
// Strides are in elements: from a word of the keys to the next, and from a row of values to the next.
template <class T, class Stored = typename T::Stored>
void repack(const Stored* from, int64_t from_stride, int dims, Stored* to, int64_t to_stride) {
  if constexpr (T::kPack == 1) {
    using Vector = std::conditional_t<sizeof(Stored) == 2, Eight, Four>;
    constexpr int kCount = sizeof(Vector) / sizeof(Stored);
    for (int key = 0; key < kMinBlock; key += kCount)
      for (int dim = 0; dim < dims; dim += kCount) {
        Vector square[kCount];
#pragma GCC unroll 8
        for (int i = 0; i < kCount; i++)
          square[i] = load<Vector>(from + (dim + i) * from_stride + key);
        transpose(square);
#pragma GCC unroll 8
        for (int i = 0; i < kCount; i++) store(to + (key + i) * to_stride + dim, square[i]);
      }
  } else {  // words of two elements of a key become words of one element of two keys
    for (int key = 0; key < kMinBlock; key += 4)
      for (int dim = 0; dim < dims; dim += 8) {
        Four square[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
          square[i] = load<Four>(from + (dim / 2 + i) * from_stride + key * 2);
        transpose(square);
#pragma GCC unroll 2
        for (int i = 0; i < 4; i += 2) {
          Stored* row = to + (key + i) / 2 * to_stride + dim * 2;
          store(row, zip_low((Eight)square[i], (Eight)square[i + 1]));
          store(row + 8, zip_high((Eight)square[i], (Eight)square[i + 1]));
        }
      }
  }
}
