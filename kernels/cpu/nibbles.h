// Products of a few rows and 4-bit weights.
//
// A weight is q * scale + zero, with q from -8 to 7 and a scale and a zero per output and group of
// inputs. The kernel sums q's products over a group first, and multiplies the sum by the scale
// once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear.h"

// A panel's group is kPanelVectors times four vectors of 4-bit numbers, then the scales, then the
// zeros. Lane h of an output's two in vector t has, from its low bits up, the weights of inputs
// 8 t + h, 8 t + h + 2, ...; so its n-th numbers are those of the row's word 4 t + n.
struct Group {
  static constexpr int kInputs = kGroupInputs;
  static constexpr int kWords = kInputs / 2;
  static constexpr int kNibbles = kPanel * kInputs / 2;  // bytes
  static constexpr int kBytes = kNibbles + 2 * kPanel * 2;
};
constexpr int kFewRows = 4;  // twice two sums each, besides the operands

#if defined(__AVX512BF16__)

// Numbers become bfloat16, which represents them exactly, by a table.
struct Numbers {
  using Sum = Floats;
  static constexpr bool kRoundsRows = false;
  static constexpr float kShift = 0;

  Numbers() {
    alignas(64) uint16_t table[32];  // twice, as the fifth bit of an index is ignored
    for (int i = 0; i < 32; i++) {
      const float value = i % 16 - 8;
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

// Numbers stay q + 8, from 0 to 15, in 16 bits, and so do rows, in steps of a group's own.
struct Numbers {
  using Sum = Ints;
  static constexpr bool kRoundsRows = true;
  static constexpr float kShift = -8;  // to q

  Words at(Words lanes, int n) const { return (lanes >> (4 * n)) & 0x000f000f; }
  static Sum multiply_add(Sum sum, Words row, Words numbers) {
    return add_products(sum, row, numbers);
  }
  static Floats to_floats(Sum sum, float step) {
    return __builtin_convertvector(sum, Floats) * step;
  }
};

#endif

// Rounds a group of a row to 16 bits; returns the value of a step.
inline float round_group(const uint16_t* from, uint32_t* words, float* sum) {
  typedef int16_t Whole __attribute__((vector_size(kLanes * 2)));
  Floats magnitudes{}, total{};
  for (int i = 0; i < Group::kInputs; i += kLanes) {
    const Floats x = BFloat16::load_floats(from + i);
    magnitudes = max(magnitudes, max(x, -x));
  }
  const float step = std::max(reduce_max(magnitudes) / 32767, 1e-30f);
  for (int i = 0; i < Group::kInputs; i += kLanes) {
    const Ints whole = round_to_ints(BFloat16::load_floats(from + i) * (1 / step));
    store(words + i / 2, __builtin_convertvector(whole, Whole));
    total += __builtin_convertvector(whole, Floats);
  }
  *sum = reduce_add(total) * step;  // of the rounded ones: products with q + 8 contain it 8 times
  return step;
}

template <int kRows, class Store>
void multiply_groups(const FewRows& few, const uint8_t* panel, const uint8_t* ahead, Store store) {
  const Numbers numbers;
  Floats total[kRows][kPanelVectors] = {};
  for (int64_t group = 0; group < few.groups; group++) {
    const uint8_t* at = panel + group * Group::kBytes;
    for (int line = 0; line < Group::kBytes; line += 64)
      __builtin_prefetch(ahead + group * Group::kBytes + line, 0, 2);
    typename Numbers::Sum sums[kRows][kPanelVectors] = {};
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
            sums[i][j] = Numbers::multiply_add(sums[i][j], element, weights[j]);
        }
      }
    }
    const auto* scales = reinterpret_cast<const uint16_t*>(at + Group::kNibbles);
#pragma GCC unroll 2
    for (int j = 0; j < kPanelVectors; j++) {
      const Floats scale = BFloat16::load_floats(scales + j * kLanes);
      const Floats zero =
          BFloat16::load_floats(scales + kPanel + j * kLanes) + scale * Numbers::kShift;
#pragma GCC unroll 4
      for (int i = 0; i < kRows; i++) {
        const int64_t own = i * few.groups + group;
        total[i][j] +=
            Numbers::to_floats(sums[i][j], few.steps[own]) * scale + zero * few.sums[own];
      }
    }
  }
  for (int i = 0; i < kRows; i++) store(i, total[i]);
}

inline float sum_of_group(const uint16_t* from) {
  Floats sum{};
  for (int i = 0; i < Group::kInputs; i += kLanes) sum += BFloat16::load_floats(from + i);
  return reduce_add(sum);
}

// Prepares a row: its words if they are rounded, and each group's sum and step.
inline void prepare_groups(const uint16_t* from, int64_t groups, uint32_t* words, float* sums,
                           float* steps) {
  for (int64_t group = 0; group < groups; group++) {
    const uint16_t* own = from + group * Group::kInputs;
    if constexpr (Numbers::kRoundsRows)
      steps[group] = round_group(own, words + group * Group::kWords, sums + group);
    else
      sums[group] = sum_of_group(own);
  }
}

// Calls store(row, sums) with each row's products with a panel, for at most kFewRows rows.
template <class Store>
void multiply_few(int rows, const FewRows& few, const uint8_t* panel, const uint8_t* ahead,
                  Store store) {
  switch (rows) {
    case 1: return multiply_groups<1>(few, panel, ahead, store);
    case 2: return multiply_groups<2>(few, panel, ahead, store);
    case 3: return multiply_groups<3>(few, panel, ahead, store);
    case 4: return multiply_groups<4>(few, panel, ahead, store);
  }
}

// Widens a panel's weights to words of two bfloat16 each, as in linear.h.
inline void widen_panel(const uint8_t* panel, int64_t groups, uint32_t* words) {
  for (int64_t group = 0; group < groups; group++) {
    const uint8_t* at = panel + group * Group::kBytes;
    const auto* scales = reinterpret_cast<const uint16_t*>(at + Group::kNibbles);
    for (int j = 0; j < kPanelVectors; j++) {
      const Floats scale = BFloat16::load_floats(scales + j * kLanes);
      const Floats zero = BFloat16::load_floats(scales + kPanel + j * kLanes) - scale * 8.f;
      const auto widen = [&](Words numbers) {
        const Floats weights = __builtin_convertvector((Ints)(numbers & 15), Floats) * scale + zero;
        return __builtin_convertvector(BFloat16::narrow(weights), Words);
      };
      for (int t = 0; t < 4; t++) {
        const Words lanes = load<Words>(at + (4 * j + t) * sizeof(Words));
        for (int n = 0; n < 4; n++)
          store(words + (group * Group::kWords + 4 * t + n) * kPanel + j * kLanes,
                widen(lanes >> (4 * n)) | widen(lanes >> (16 + 4 * n)) << 16);
      }
    }
  }
}
