// Keys and values as whole numbers of 8 bits, their codes, with a scale for each head of each token.
//
// Attention multiplies codes as 16-bit integers, whose sums are exact: queries and the softmax's
// weights are rounded to 16 bits, each row with its own unit. The scales of keys multiply logits, and
// those of values the weights. So a product takes a shift or two for each pair of codes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "vector.h"
#include "words.h"

constexpr int kMaxKeyDim = 576;  // as in ops.py; values are not wider

constexpr int kScaleBytes = 2;  // a scale is a bfloat16

// Products of pairs of 16-bit integers.
struct CodePairs {
  using Sum = Ints;
  static Ints multiply_add(Ints sum, Words a, Words b) { return add_products(sum, a, b); }
};

// Loads words of 4 codes as pairs. Codes of a word with even numbers come first, so that one shift moves
// both codes of a pair.
struct Codes {
  using Stored = uint32_t;
  static constexpr int kPack = 4, kLane = 1, kWords = 2;

  // Returns the byte of a code in its word.
  static constexpr int place(int code) { return code % 2 * 2 + code / 2; }

  Words load(const Stored* from) const { return ::load<Words>(from); }
  Words word(Words loaded, int i) const { return (Words)((Shorts)loaded << (8 - 8 * i) >> 8); }
};

// Returns the number's upper half, rounded up to one that is not smaller.
inline uint16_t bfloat16_above(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return x == x ? (bits + 0xffff) >> 16 : 0x7fc0;
}
inline float from_bfloat16(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// A key or a value in codes.
struct Coded {
  int8_t codes[kMaxKeyDim + kLanes];
  uint16_t scale;
};

// Widens a head of `count` elements to floats, of which there is room for kLanes more.
template <class T>
void widen_head(const typename T::Stored* from, int count, float* to) {
  typename T::Stored rest[kLanes] = {};
  const int whole = count / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) store(to + i, T::load_floats(from + i));
  std::memcpy(rest, from + whole, (count - whole) * sizeof *rest);
  store(to + whole, T::load_floats(rest));
}

// Adds each element to the one whose index differs in bit kHalf, which keeps its sign where it has
// that bit.
template <int kHalf, size_t... kIndex>
Floats butterfly(Floats x, std::index_sequence<kIndex...>) {
  const Floats others = choose(x, x, std::index_sequence<(kIndex ^ kHalf)...>());
  return others + x * Floats{(kIndex & kHalf ? -1.f : 1.f)...};
}

template <int kHalf = 1>
void spread_within_vectors(float* x, int count, int part) {
  if (kHalf < part)
    for (int i = 0; i < count; i += kLanes)
      store(x + i, butterfly<kHalf>(load<Floats>(x + i), std::make_index_sequence<kLanes>()));
  if constexpr (2 * kHalf < kLanes) spread_within_vectors<2 * kHalf>(x, count, part);
}

// Multiplies each part of a head by the Hadamard matrix, which is its own inverse; there is room for
// kLanes more elements. Parts are as long as the greatest power of two that divides the head. This is
// done to keys and queries, whose products stay: few elements of keys are large, and it spreads them
// over all. Perplexity of an int8 cache grows by 0.03% with it and by 0.18% without.
inline void spread(float* x, int count) {
  const int part = count & -count;
  spread_within_vectors(x, count, part);
  for (int half = kLanes; half < part; half *= 2)
    for (int i = 0; i < count; i += 2 * half)
      for (int j = i; j < i + half; j += kLanes) {
        const Floats a = load<Floats>(x + j), b = load<Floats>(x + j + half);
        store(x + j, a + b);
        store(x + j + half, a - b);
      }
  const float unit = 1 / std::sqrt(double(part));
  for (int i = 0; i < count; i += kLanes) store(x + i, load<Floats>(x + i) * unit);
}

// Rounds `count` elements, a multiple of 8 with room for kLanes more. NaN and infinity make the scale
// NaN.
inline void encode(float* x, int count, bool is_key, Coded& to) {
  if (is_key) spread(x, count);
  std::fill_n(x + count, kLanes, *x);
  Floats greatest{}, nothing{};
  for (int i = 0; i < count; i += kLanes) {
    const Floats some = load<Floats>(x + i);
    greatest = max(max(some, -some), greatest), nothing += some * 0.f;
  }
  to.scale = bfloat16_above(std::max(reduce_max(greatest) / 127, 0x1p-126f) + reduce_add(nothing));
  const float scale = from_bfloat16(to.scale);
  typedef int8_t Chars __attribute__((vector_size(kLanes)));
  for (int i = 0; i < count; i += kLanes)
    store(to.codes + i,
          __builtin_convertvector(round_to_ints(load<Floats>(x + i) / scale), Chars));
}
