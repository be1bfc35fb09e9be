// Products of a few rows and 4-bit weights.
//
// A weight is a 4-bit value times a scale; integers also have a zero. An output has a scale, and a
// zero, per group of inputs. The kernel first sums a group's products with the 4-bit values, then
// multiplies the sum by the scale.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear.h"
#include "prepare_rows.h"
#include "streams.h"

// A panel's group is kPanelVectors times four vectors of 4-bit numbers, then the scales, then the
// zeros. An output has two lanes in vector t. Lane h has, from its low bits up, the weights of
// inputs 8 t + h, 8 t + h + 2, ...; so its n-th value belongs to the row's word 4 t + n.
template <class NumberKind>
struct GroupOf {
  static constexpr int kWords = kGroupInputs / 2;
  static constexpr int kNibbles = kPanel * kGroupInputs / 2;  // bytes
  static constexpr int kBytes = kNibbles + kPanel * NumberKind::kScaleBytes;
};
constexpr int kFewRows = 4;  // 4 sums each fit in registers

#if defined(__AVX512BF16__)
constexpr bool kRoundsRows = false;
#else
constexpr bool kRoundsRows = true;  // to 16 bits, with a step size per group
#endif

// The types of 4-bit values. If rows are rounded, values are 16-bit integers, with kShift added.

// Integers q from -8 to 7, coded as q + 8; the scale and the zero are bfloat16.
struct Int4 {
  static constexpr int kScaleBytes = 4;
  static constexpr float kShift = 8;

  static constexpr float number(int code) { return code - 8; }
  static Words whole(Words codes) { return codes; }

  // The scale and the zero of the outputs of vector j.
  Int4(const uint8_t* scales, int j)
      : scale(BFloat16::load_floats(halves(scales) + j * kLanes)),
        zero(BFloat16::load_floats(halves(scales) + kPanel + j * kLanes)) {
    if (kRoundsRows) zero -= scale * kShift;
  }
  // Converts products with values to products with weights; takes the sum of the inputs.
  Floats weigh(Floats products, float sum) const { return products * scale + zero * sum; }

  Floats scale, zero;

 private:
  static const uint16_t* halves(const uint8_t* scales) {
    return reinterpret_cast<const uint16_t*>(scales);
  }
};

// Values of e2m1 in ascending order, as integers from 0; the scale is a power of two, stored as its
// exponent plus 127 (e8m0). Twice a value is an integer.
struct E2m1 {
  static constexpr int kScaleBytes = 1;
  static constexpr float kShift = 12;

  static constexpr float number(int code) {
    constexpr float kPositive[] = {0, .5, 1, 1.5, 2, 3, 4, 6};
    return code < 8 ? -kPositive[7 - code] : kPositive[code - 8];
  }
  // The codes are in the low bits of 16 bits each.
  static Words whole(Words codes) {
#if defined(__AVX512BW__)
    return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table()), (__m512i)codes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table()), (__m256i)codes);
#elif defined(__aarch64__)
    return (Words)vqtbl1q_u8(vld1q_u8(kWhole), (uint8x16_t)codes);
#else
    // Codes 0, 1, 2, 3, 4 are their own magnitudes; then steps are 2, and the last is 4.
    const Shorts steps = (Shorts)codes - 8;
    const Shorts places = steps < 0 ? -1 - steps : steps;
    const Shorts magnitudes =
        places + (places > 4 ? places - 4 : Shorts{}) + (places > 6 ? Shorts{} + 2 : Shorts{});
    return (Words)((steps < 0 ? -magnitudes : magnitudes) + 12);
#endif
  }

  E2m1(const uint8_t* scales, int j) {
    const Words exponents = __builtin_convertvector(load<Bytes>(scales + j * kLanes), Words);
    const Words bits = exponents << 23;
    scale = (Floats)(exponents == 0 ? broadcast(uint32_t{1} << 22) : bits);  // 2^-127 is subnormal
    if (kRoundsRows) scale *= .5f;
  }
  // Shifts before scaling, as a large scale would overflow.
  Floats weigh(Floats products, float sum) const {
    return (kRoundsRows ? products - kShift * sum : products) * scale;
  }

  Floats scale;

 private:
  alignas(16) static constexpr uint8_t kWhole[] = {0,  4,  6,  8,  9,  10, 11, 12,
                                                   12, 13, 14, 15, 16, 18, 20, 24};
#if defined(__x86_64__)
  static __m128i table() { return load<__m128i>(kWhole); }
#endif
};

#if defined(__AVX512BF16__)

// A table converts values to bfloat16, which represents them exactly.
template <class NumberKind>
struct Numbers {
  using Sum = Floats;

  Numbers() {
    alignas(64) uint16_t table[32];  // twice, as the fifth bit of an index is ignored
    for (int i = 0; i < 32; i++) {
      const float value = NumberKind::number(i % 16);
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      table[i] = bits >> 16;
    }
    values = _mm512_load_si512(table);
  }
  Words at(Words lanes, int n) const {
    return (Words)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)lanes, 4 * n), values);
  }
  static Sum multiply_add(Sum sum, Words row, Words numbers) {
    return BFloat16::multiply_add(sum, row, numbers);
  }
  static Floats to_floats(Sum sum, float) { return sum; }

  __m512i values;
};

#else

// Values and rows are integers.
template <class NumberKind>
struct Numbers {
  using Sum = Ints;

  Words at(Words lanes, int n) const { return NumberKind::whole((lanes >> (4 * n)) & 0x000f000f); }
  static Sum multiply_add(Sum sum, Words row, Words numbers) {
    return add_products(sum, row, numbers);
  }
  static Floats to_floats(Sum sum, float step) {
    return __builtin_convertvector(sum, Floats) * step;
  }
};

#endif

// Rounds a group of a row to 16 bits; returns the step size.
inline float round_group(const uint16_t* from, uint32_t* words, float* sum) {
  typedef int16_t Whole __attribute__((vector_size(kLanes * 2)));
  Floats magnitudes{}, total{};
  for (int i = 0; i < kGroupInputs; i += kLanes) {
    const Floats x = BFloat16::load_floats(from + i);
    magnitudes = max(magnitudes, max(x, -x));
  }
  const float step = std::max(reduce_max(magnitudes) / 32767, 1e-30f);
  for (int i = 0; i < kGroupInputs; i += kLanes) {
    const Ints whole = round_to_ints(BFloat16::load_floats(from + i) * (1 / step));
    store(words + i / 2, __builtin_convertvector(whole, Whole));
    total += __builtin_convertvector(whole, Floats);
  }
  *sum = reduce_add(total) * step;  // sum of the rounded values, to undo the shift
  return step;
}

template <class NumberKind, int kRows, class Store>
void multiply_groups(const GroupedRows& few, const uint8_t* panel, const uint8_t* ahead, Store store) {
  using Group = GroupOf<NumberKind>;
  const Numbers<NumberKind> numbers;
  Floats total[kRows][kPanelVectors] = {};
  for (int64_t group = 0; group < few.groups; group++) {
    const uint8_t* at = panel + group * Group::kBytes;
    for (int line = 0; line < Group::kBytes; line += 64)
      __builtin_prefetch(ahead + group * Group::kBytes + line, 0, kSecondCache);
    typename Numbers<NumberKind>::Sum sums[kRows][kPanelVectors] = {};
#pragma GCC unroll 4
    for (int t = 0; t < 4; t++) {
      Words lanes[kPanelVectors];
#pragma GCC unroll 2
      for (int j = 0; j < kPanelVectors; j++)
        lanes[j] = load<Words>(at + (4 * j + t) * sizeof(Words));
#pragma GCC unroll 4
      for (int n = 0; n < 4; n++) {
        Words weights[kPanelVectors];
#pragma GCC unroll 2
        for (int j = 0; j < kPanelVectors; j++) weights[j] = numbers.at(lanes[j], n);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; i++) {
          const Words element =
              broadcast(few.words[i * few.stride + group * Group::kWords + 4 * t + n]);
#pragma GCC unroll 2
          for (int j = 0; j < kPanelVectors; j++)
            sums[i][j] = Numbers<NumberKind>::multiply_add(sums[i][j], element, weights[j]);
        }
      }
    }
#pragma GCC unroll 2
    for (int j = 0; j < kPanelVectors; j++) {
      const NumberKind scales(at + Group::kNibbles, j);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; i++) {
        const int64_t index = i * few.groups + group;
        total[i][j] +=
            scales.weigh(Numbers<NumberKind>::to_floats(sums[i][j], few.steps[index]),
                         few.sums[index]);
      }
    }
  }
  for (int i = 0; i < kRows; i++) store(i, total[i]);
}

inline float sum_of_group(const uint16_t* from) {
  Floats sum{};
  for (int i = 0; i < kGroupInputs; i += kLanes) sum += BFloat16::load_floats(from + i);
  return reduce_add(sum);
}

// Prepares a row: its words if they are rounded, and each group's sum and step size.
inline void prepare_groups(const uint16_t* from, int64_t groups, uint32_t* words, float* sums,
                           float* steps) {
  for (int64_t group = 0; group < groups; group++) {
    const uint16_t* group_from = from + group * kGroupInputs;
    if constexpr (kRoundsRows)
      steps[group] = round_group(group_from, words + group * kGroupInputs / 2, sums + group);
    else
      sums[group] = sum_of_group(group_from);
  }
}

// Multiplies at most kFewRows rows by a panel; calls store(row, sums) for each.
template <class NumberKind, class Store>
void multiply_few(int rows, const GroupedRows& few, const uint8_t* panel, const uint8_t* ahead,
                  Store store) {
  switch (rows) {
    case 1: return multiply_groups<NumberKind, 1>(few, panel, ahead, store);
    case 2: return multiply_groups<NumberKind, 2>(few, panel, ahead, store);
    case 3: return multiply_groups<NumberKind, 3>(few, panel, ahead, store);
    case 4: return multiply_groups<NumberKind, 4>(few, panel, ahead, store);
  }
}
