// Keys and values as whole numbers of 8 or 4 bits, their codes, with a scale for each head of each
// token. In 4 bits they have an offset too, since all codes count: x = scale * code + offset.
//
// Attention multiplies codes as 16-bit integers, whose sums are exact: queries and the softmax's
// weights are rounded to 16 bits, each row with its own unit. The scales of keys multiply logits, and
// those of values the weights. So a product takes a shift or two for each pair of codes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vector.h"
#include "words.h"

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
  int8_t codes[576 + kLanes];
  uint16_t scale, offset;
};

// Rounds `count` elements of T, a multiple of 8. NaN and infinity make the scale NaN.
template <class T>
void encode(const typename T::Stored* from, int count, int bits, Coded& to) {
  typename T::Stored all[576 + kLanes];
  std::memcpy(all, from, count * sizeof *from);
  std::fill_n(all + count, kLanes, *from);
  Floats low = T::load_floats(all), high = low, nothing{};
  for (int i = 0; i < count; i += kLanes) {
    const Floats x = T::load_floats(all + i);
    low = min(x, low), high = max(x, high), nothing += x * 0.f;
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
    const Floats code = min(max((T::load_floats(all + i) - offset) / scale, first), last);
    store(to.codes + i, __builtin_convertvector(round_to_ints(code), Chars));
  }
}
