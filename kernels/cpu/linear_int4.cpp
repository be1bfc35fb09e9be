// Linear layers of 4-bit weights, for a few rows: these are bound by reading the weights.
//
// A weight is q * scale + zero, with q from -8 to 7 and a scale and a zero per output and group of
// inputs. The kernel sums q's products over a group first, and multiplies the sum by the scale
// once.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "linear.h"
#include "outputs.h"
#include "prepare_rows.h"

extern "C" void octavo_linear_int8(const uint16_t* x, int64_t rows, int64_t row_stride,
                                   const LinearLayer* layer, const Scales* scales, uint16_t* y,
                                   int threads);

namespace {

// A panel's group is kPanelVectors times four vectors of 4-bit numbers, then the scales, then the
// zeros. Lane h of an output's two in vector t has, from its low bits up, the weights of inputs
// 8 t + h, 8 t + h + 2, ...; so its n-th numbers are those of the row's word 4 t + n.
struct Group {
  static constexpr int kInputs = 32;
  static constexpr int kWords = kInputs / 2;
  static constexpr int kNibbles = kPanel * kInputs / 2;  // bytes
  static constexpr int kBytes = kNibbles + 2 * kPanel * 2;
};
constexpr int kFewRows = 4;  // twice two sums each, besides the operands

// A few rows of words, and of each row's groups the sum and the value of a step; see below.
struct Few {
  const uint32_t* words;
  int64_t stride;
  const float* sums;
  const float* steps;
  int64_t groups;
};

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
float round_group(const uint16_t* from, uint32_t* words, float* sum) {
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
void multiply_groups(const Few& few, const uint8_t* panel, const uint8_t* ahead, Store store) {
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

float sum_of_group(const uint16_t* from) {
  Floats sum{};
  for (int i = 0; i < Group::kInputs; i += kLanes) sum += BFloat16::load_floats(from + i);
  return reduce_add(sum);
}

// Prepares a few rows, in buffers of this thread.
Few prepare(const uint16_t* x, int64_t rows, int64_t row_stride, const LinearLayer& layer) {
  const int64_t groups = layer.inputs / Group::kInputs;
  if (layer.norm) {
    uint16_t* const normed = scratch<uint16_t>(rows * layer.inputs);
    for (int64_t row = 0; row < rows; row++)
      norm_row(x + row * row_stride, layer, normed + row * layer.inputs);
    x = normed;
    row_stride = layer.inputs;
  }
  float* const sums = scratch<float>(2 * rows * groups);
  float* const steps = sums + rows * groups;
  uint32_t* const words = Numbers::kRoundsRows ? scratch<uint32_t>(rows * layer.inputs / 2) : nullptr;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t group = 0; group < groups; group++) {
      const uint16_t* from = x + row * row_stride + group * Group::kInputs;
      const int64_t at = row * groups + group;
      if (words)
        steps[at] = round_group(from, words + at * Group::kWords, sums + at);
      else
        sums[at] = sum_of_group(from);
    }
  if (words) return {words, layer.inputs / 2, sums, steps, groups};
  return {reinterpret_cast<const uint32_t*>(x), row_stride / 2, sums, steps, groups};
}

}  // namespace

// y = x * weights + bias: with 4-bit weights for few rows, which are bound by memory, else with the
// same weights in 8 bits, as in octavo_linear_int8. Inputs must be whole groups.
extern "C" void octavo_linear_int4(const uint16_t* x, int64_t rows, int64_t row_stride,
                                   const uint8_t* nibbles, const LinearLayer* layer,
                                   const Scales* scales, uint16_t* y, int threads) {
  if (rows > kFewRows) return octavo_linear_int8(x, rows, row_stride, layer, scales, y, threads);
  const Few few = prepare(x, rows, row_stride, *layer);
  const int64_t panels = num_panels(*layer), panel_bytes = few.groups * Group::kBytes;
  const Outputs<uint16_t> out{y, *layer};
  std::atomic<int64_t> free{0};
#pragma omp parallel num_threads(threads)
  for (int64_t panel = free++, next; panel < panels; panel = next) {
    next = free++;
    const uint8_t* at = nibbles + panel * panel_bytes;
    const uint8_t* ahead = nibbles + std::min(next, panels - 1) * panel_bytes;
    auto store = [&](int row, const Floats* values) { out.write(row, panel, values); };
    switch (rows) {
      case 1: multiply_groups<1>(few, at, ahead, store); break;
      case 2: multiply_groups<2>(few, at, ahead, store); break;
      case 3: multiply_groups<3>(few, at, ahead, store); break;
      case 4: multiply_groups<4>(few, at, ahead, store); break;
    }
  }
}
