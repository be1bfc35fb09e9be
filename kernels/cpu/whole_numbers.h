// Keys and values as whole numbers of 8 or 4 bits, their codes, with a scale for each head of each
// token. In 4 bits they have an offset too, since all codes count: x = scale * code + offset.
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

// Returns the bytes that a token has beside its codes: a scale and an offset in bfloat16.
constexpr int beside_bytes(int bits) { return bits == 8 ? 2 : 4; }

// Products of pairs of 16-bit integers.
struct CodePairs {
  using Sum = Ints;
  static Ints multiply_add(Ints sum, Words a, Words b) { return add_products(sum, a, b); }
};

// Loads words of 8 or 4 codes as pairs. Codes of a word with even numbers come first, so that one shift
// moves both codes of a pair.
template <int kBits>
struct Codes {
  using Stored = uint32_t;
  static constexpr int kPack = 32 / kBits, kLane = 1, kWords = kPack / 2;

  // Returns the first bit of a code in its word.
  static constexpr int bit(int code) { return (code % 2 * kWords + code / 2) * kBits; }

  Words load(const Stored* from) const { return ::load<Words>(from); }
  Words word(Words loaded, int i) const {
    return (Words)((Shorts)loaded << (16 - kBits - kBits * i) >> (16 - kBits));
  }
};

// Returns the number's upper half, rounded up to one that is not smaller or to the nearest.
inline uint16_t bfloat16_above(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return x == x ? (bits + 0xffff) >> 16 : 0x7fc0;
}
inline uint16_t nearest_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
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
  uint16_t scale, offset;
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
inline void encode(float* x, int count, int bits, bool is_key, Coded& to) {
  if (is_key) spread(x, count);
  std::fill_n(x + count, kLanes, *x);
  Floats low = load<Floats>(x), high = low, nothing{};
  for (int i = 0; i < count; i += kLanes) {
    const Floats some = load<Floats>(x + i);
    low = min(some, low), high = max(some, high), nothing += some * 0.f;
  }
  const float least = -reduce_max(-low), greatest = reduce_max(high);
  const bool whole = bits == 8;
  float scale = whole ? std::max(-least, greatest) / 127 : (greatest - least) / 15;
  to.scale = bfloat16_above(std::max(scale, 0x1p-126f) + reduce_add(nothing));
  scale = from_bfloat16(to.scale);
  to.offset = whole ? 0 : nearest_bfloat16((least + greatest) * .5f + scale * .5f);
  const Floats offset = broadcast(from_bfloat16(to.offset));
  const Floats first = broadcast(-float(1 << (bits - 1))), last = -1.f - first;
  typedef int8_t Chars __attribute__((vector_size(kLanes)));
  for (int i = 0; i < count; i += kLanes) {
    const Floats code = min(max((load<Floats>(x + i) - offset) / scale, first), last);
    store(to.codes + i, __builtin_convertvector(round_to_ints(code), Chars));
  }
}
