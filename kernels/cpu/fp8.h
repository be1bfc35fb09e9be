// The 8-bit floating-point types that a KV cache may be stored in (Micikevicius et al., "FP8 Formats
// for Deep Learning", 2022). CPUs cannot multiply them, so attention widens them.
//
// Products of bfloat16 pairs treat subnormal numbers as zeros, so the cache has none: writing
// rounds a number below the least normal one to that one or to zero.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "vector.h"

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

// The same numbers as in caches.py.
enum Fp8 : int32_t { kNotFp8 = 0, kE4M3 = 1, kE5M2 = 2 };

// A type's exponent bias and mantissa bits.
struct Fp8Format {
  int mantissa_bits, bias;
  float greatest;  // finite number

  float least_normal() const { return std::ldexp(1.f, 1 - bias); }
};
constexpr Fp8Format kE4M3Format{3, 7, 448.f};
constexpr Fp8Format kE5M2Format{2, 15, 57344.f};

inline const Fp8Format& format_of(Fp8 type) { return type == kE4M3 ? kE4M3Format : kE5M2Format; }

// Rounds to the nearest byte, ties to even; greater magnitudes become the greatest.
inline Bytes to_fp8(Floats x, const Fp8Format& format) {
  const int dropped = 23 - format.mantissa_bits;
  const Floats magnitude = min(max(x, -x), broadcast(format.greatest));
  const Ints bits = (Ints)magnitude;
  const Ints rounded = (bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)) >> dropped;
  const Ints normal = rounded - ((127 - format.bias) << format.mantissa_bits);
  const Floats least = broadcast(format.least_normal());
  const Ints small = magnitude > least * .5f ? broadcast(1 << format.mantissa_bits) : Ints{};
  const Ints finite = magnitude < least ? small : normal;
  const Words signs = (Words)x >> 24 & 0x80;
  return __builtin_convertvector((Words)(x == x ? finite : broadcast(0x7f)) | signs, Bytes);
}

// Rounds `count` elements of T, each divided by `scale`.
template <class T>
void to_fp8(const typename T::Stored* from, int count, float scale, Fp8 type, uint8_t* to) {
  const Fp8Format& format = format_of(type);
  int i = 0;
  for (; i + kLanes <= count; i += kLanes)
    store(to + i, to_fp8(T::load_floats(from + i) / scale, format));
  if (i == count) return;
  typename T::Stored rest[kLanes] = {};
  std::memcpy(rest, from + i, (count - i) * sizeof *from);
  const Bytes bytes = to_fp8(T::load_floats(rest) / scale, format);
  std::memcpy(to + i, &bytes, count - i);
}

// Widens bytes to elements of T.
//
// Where a word of a product has two elements, four bytes form a pack: first, third, second, fourth.
// So shifts turn each half of the pack into bfloat16. Exponents keep the bytes' smaller bias, so
// all values are too small by one power of two. The other factor of a product is scaled by
// 2^kGrown, so that products are not subnormal. `unit` compensates both.
template <class T>
class Fp8Widener {
  using Stored = typename T::Stored;

 public:
  static constexpr int kPack = T::kPack == 2 ? 4 : 1;
  static constexpr int kGrown = T::kPack == 2 ? 60 : 0;

  explicit Fp8Widener(Fp8 type)
      : format_(format_of(type)), more_(1 + format_.mantissa_bits),
        kept_(int16_t(0x8000 | 0x7f00 >> more_)) {}

  // Returns an element's place in its pack.
  static constexpr int place(int element) {
    return kPack == 1 ? 0 : element % 2 * 2 + element / 2;
  }

  // Returns the factor that compensates the products of packs.
  float unit() const { return std::ldexp(1.f, T::kPack == 2 ? bias_change() - kGrown : 0); }

  // Widens packs: the first two elements of each go to `first`, the other two to `second`. The number
  // of packs is a multiple of 4.
  void widen_packs(const uint8_t* from, int64_t packs, Stored* first, Stored* second) const {
    if (packs % 8)
      widen_packs<4>(from, packs, first, second);
    else
      widen_packs<8>(from, packs, first, second);
  }

  // Returns a vector's first or second words of packs.
  Words word(Words packs, int i) const {
    typedef int16_t Pairs __attribute__((vector_size(sizeof(Words))));
    const Pairs pairs = i == 0 ? (Pairs)packs << 8 : (Pairs)packs;
    return (Words)(pairs >> more_ & kept_);
  }

  // Widens bytes that are not packed.
  void widen(const uint8_t* from, int64_t count, Stored* to) const {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
      T::store_floats(to + i, to_floats(load<Bytes>(from + i)));
    if (i == count) return;
    Bytes rest{};
    Stored all[kLanes];
    std::memcpy(&rest, from + i, count - i);
    T::store_floats(all, to_floats(rest));
    std::memcpy(to + i, all, (count - i) * sizeof *all);
  }

 private:
  int bias_change() const { return 127 - format_.bias; }

  Floats to_floats(Bytes bytes) const {
    const Words wide = __builtin_convertvector(bytes, Words);
    const Words bits = (wide & 0x7f) << (23 - format_.mantissa_bits);
    const Floats magnitude = (Floats)bits * std::ldexp(1.f, bias_change());
    const Words signed_bits = (Words)magnitude | (wide & 0x80) << 24;
    const Floats value = (Floats)signed_bits;
    return magnitude > format_.greatest ? value - value / 0.f : value;
  }

  template <int kPacks>
  void widen_packs(const uint8_t* from, int64_t packs, Stored* first, Stored* second) const {
    typedef int16_t Pairs __attribute__((vector_size(4 * kPacks)));
    for (int64_t i = 0; i < packs; i += kPacks) {
      Pairs pairs;
      std::memcpy(&pairs, from + 4 * i, sizeof pairs);
      const Pairs low = (pairs << 8) >> more_ & kept_, high = pairs >> more_ & kept_;
      std::memcpy(first + 2 * i, &low, sizeof low);
      std::memcpy(second + 2 * i, &high, sizeof high);
    }
  }

  const Fp8Format format_;
  const int more_;  // surplus bits of bfloat16's exponent
  const int16_t kept_;
};
