// Linear layers: bfloat16 weights, 8-bit ones with activations rounded as they come, and
// 4-bit ones for a few rows.
//
// For CPUs whose vectors multiply bfloat16 and bytes in pairs and fours, and which have
// no matrix unit: there oneDNN knows better.

#include <cstdint>
#include <cstring>
#include <vector>

#include "linear.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && !defined(__AMX_TILE__)

namespace {

constexpr int64_t kMinParallelElements = 1 << 13;  // below which threads cost more
constexpr float kTiny = 1e-8f;                     // keeps a row of nothing from dividing by it

struct Pairs {  // of bfloat16
  using Sum = Floats;
  static Sum multiply_add(Sum sum, Words a, Words b) {
    return BFloat16::multiply_add(sum, a, b);
  }
};

struct Fours {  // of bytes, without a sign and with one
  using Sum = Ints;
  static Sum multiply_add(Sum sum, Words a, Words b) {
    return (Sum)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
  }
};

// The sums over a group of inputs of 4-bit weights, for a few rows.
//
// A weight is whole * scale + zero, with whole from -8 to 7 and a scale and a zero for
// each output and group of inputs: so a group's products are summed as bfloat16, which
// holds whole exactly, and scaled together. A panel's group is kPanelVectors times four
// vectors of 4-bit numbers, then the scales, then the zeros. Lane h of an output's two in
// vector t has, from its low bits up, the weights of inputs 8 t + h, 8 t + h + 2, ...
struct Group {
  static constexpr int kInputs = 32;
  static constexpr int kNibbles = kPanel * kInputs / 2;  // bytes
  static constexpr int kBytes = kNibbles + 2 * kPanel * 2;
};
constexpr int kFewRows = 4;  // twice two sums each, beside what they need

// The values of whole as bfloat16, twice: the fifth bit of an index does not count.
__m512i nibble_values() {
  alignas(64) uint16_t values[32];
  for (int i = 0; i < 32; i++) {
    const float value = i % 16 - 8;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    values[i] = bits >> 16;
  }
  return _mm512_load_si512(values);
}

// A few rows of bfloat16 in pairs, and the sum of each row's groups.
struct Few {
  const uint32_t* rows;
  int64_t row_stride;
  const float* sums;
  int64_t groups;
};

template <int kRows, class Store>
void multiply_groups(const Few& few, const uint8_t* panel, const uint8_t* ahead, Store store) {
  const __m512i values = nibble_values();
  Floats total[kRows][kPanelVectors] = {};
  for (int64_t group = 0; group < few.groups; group++) {
    const uint8_t* at = panel + group * Group::kBytes;
    for (int line = 0; line < Group::kBytes; line += 64)
      __builtin_prefetch(ahead + group * Group::kBytes + line, 0, 2);
    Floats sums[kRows][kPanelVectors] = {};
#pragma GCC unroll 4
    for (int t = 0; t < 4; t++) {
      __m512i lanes[kPanelVectors];
#pragma GCC unroll 2
      for (int j = 0; j < kPanelVectors; j++) lanes[j] = _mm512_loadu_si512(at + (4 * j + t) * 64);
#pragma GCC unroll 4
      for (int n = 0; n < 4; n++) {
        Words weights[kPanelVectors];
#pragma GCC unroll 2
        for (int j = 0; j < kPanelVectors; j++)
          weights[j] = (Words)_mm512_permutexvar_epi16(_mm512_srli_epi16(lanes[j], 4 * n), values);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; i++) {
          const Words element = broadcast(few.rows[i * few.row_stride + group * 16 + 4 * t + n]);
#pragma GCC unroll 2
          for (int j = 0; j < kPanelVectors; j++)
            sums[i][j] = BFloat16::multiply_add(sums[i][j], element, weights[j]);
        }
      }
    }
    const auto* scales = reinterpret_cast<const uint16_t*>(at + Group::kNibbles);
#pragma GCC unroll 2
    for (int j = 0; j < kPanelVectors; j++) {
      const Floats scale = BFloat16::load_floats(scales + j * kLanes);
      const Floats zero = BFloat16::load_floats(scales + kPanel + j * kLanes);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; i++)
        total[i][j] += sums[i][j] * scale + zero * few.sums[i * few.groups + group];
    }
  }
  for (int i = 0; i < kRows; i++) store(i, total[i]);
}

// Where results go: `width` bfloat16 a row.
struct Outputs {
  uint16_t* first;
  int64_t width;

  void write(int64_t row, int64_t column, Floats values) const {
    const int64_t left = width - column;
    if (left <= 0) return;
    const __mmask16 mask = left < kLanes ? (1u << left) - 1 : 0xffff;
    _mm256_mask_storeu_epi16(first + row * width + column, mask,
                             (__m256i)_mm512_cvtneps_pbh((__m512)values));
  }
};

// The same in float32.
struct WideOutputs {
  float* first;
  int64_t width;

  void write(int64_t row, int64_t column, Floats values) const {
    const int64_t left = width - column;
    if (left <= 0) return;
    const __mmask16 mask = left < kLanes ? (1u << left) - 1 : 0xffff;
    _mm512_mask_storeu_ps(first + row * width + column, mask, (__m512)values);
  }
};

// A row as bytes: an element is (byte - zero) * step.
struct Range {
  float step, zero;
};

Range round_row(const uint16_t* row, const float* factors, int64_t count, uint8_t* bytes) {
  Floats least{}, greatest{};  // zero itself is always within
  for (int64_t i = 0; i < count; i += kLanes) {
    const __mmask16 mask = count - i < kLanes ? (1u << (count - i)) - 1 : 0xffff;
    const __m512i half = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row + i));
    const Floats x =
        (Floats)_mm512_slli_epi32(half, 16) * (Floats)_mm512_maskz_loadu_ps(mask, factors + i);
    least = (Floats)_mm512_min_ps((__m512)least, (__m512)x);
    greatest = (Floats)_mm512_max_ps((__m512)greatest, (__m512)x);
  }
  const float low = _mm512_reduce_min_ps((__m512)least);
  const float step = std::max((reduce_max(greatest) - low) / 255, kTiny);
  const __m512i zero = _mm512_cvtps_epi32(_mm512_set1_ps(-low / step));
  const Floats inverse = broadcast(1 / step);
  for (int64_t i = 0; i < count; i += kLanes) {
    const __mmask16 mask = count - i < kLanes ? (1u << (count - i)) - 1 : 0xffff;
    const __m512i half = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row + i));
    const Floats x =
        (Floats)_mm512_slli_epi32(half, 16) * (Floats)_mm512_maskz_loadu_ps(mask, factors + i);
    const __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32((__m512)(x * inverse)), zero);
    const __m128i byte = _mm512_cvtusepi32_epi8(_mm512_max_epi32(whole, _mm512_setzero_si512()));
    _mm_mask_storeu_epi8(bytes + i, mask, byte);
  }
  return {step, (float)_mm_cvtsi128_si32(_mm512_castsi512_si128(zero))};
}

template <class T, class Store>
void multiply(const void* rows, int64_t num_rows, int64_t row_words, const void* panels,
              int64_t outputs, int64_t depth, int threads, Store store) {
  Linear<T, Store>(static_cast<const uint32_t*>(rows), num_rows, row_words,
                   static_cast<const uint32_t*>(panels), (outputs + kPanel - 1) / kPanel, depth,
                   store)
      .run(threads);
}

template <class Out>
void linear(const uint16_t* x, int64_t rows, int64_t row_stride, const void* panels,
            const float* bias, int64_t inputs, Out out, int threads) {
  auto store = [=](int64_t row, int64_t panel, const Floats* sums) {
    for (int j = 0; j < kPanelVectors; j++) {
      const int64_t column = panel * kPanel + j * kLanes;
      out.write(row, column, sums[j] + load<Floats>(bias + column));
    }
  };
  multiply<Pairs>(x, rows, row_stride / 2, panels, out.width, inputs / 2, threads, store);
}

}  // namespace

extern "C" int octavo_has_linear() { return 1; }

// y = x * weights + bias. Inputs and the rows' stride must be even; bias has an element
// for each output of each panel.
extern "C" void octavo_linear(const uint16_t* x, int64_t rows, int64_t row_stride,
                              const void* panels, const float* bias, int64_t inputs,
                              int64_t outputs, uint16_t* y, int threads) {
  linear(x, rows, row_stride, panels, bias, inputs, Outputs{y, outputs}, threads);
}

// The same, y in float32.
extern "C" void octavo_linear_wide(const uint16_t* x, int64_t rows, int64_t row_stride,
                                   const void* panels, const float* bias, int64_t inputs,
                                   int64_t outputs, float* y, int threads) {
  linear(x, rows, row_stride, panels, bias, inputs, WideOutputs{y, outputs}, threads);
}

// y = (x * factors) * (weights * scales) + bias, x * factors in bytes. Inputs must be a
// multiple of 4. A column's `row_sums` is the sum of its scaled weights.
extern "C" void octavo_linear_int8(const uint16_t* x, int64_t rows, int64_t row_stride,
                                   const void* panels, const float* factors,
                                   const float* scales, const float* row_sums,
                                   const float* bias, int64_t inputs, int64_t outputs,
                                   uint16_t* y, int threads) {
  thread_local std::vector<uint8_t> bytes;
  thread_local std::vector<Range> ranges;
  bytes.resize(rows * inputs);
  ranges.resize(rows);
  uint8_t* const to = bytes.data();
  Range* const range = ranges.data();
#pragma omp parallel for num_threads(threads) if (rows * inputs >= kMinParallelElements)
  for (int64_t row = 0; row < rows; row++)
    range[row] = round_row(x + row * row_stride, factors, inputs, to + row * inputs);
  const Outputs out{y, outputs};
  auto store = [=](int64_t row, int64_t panel, const Ints* sums) {
    for (int j = 0; j < kPanelVectors; j++) {
      const int64_t column = panel * kPanel + j * kLanes;
      const Floats product = __builtin_convertvector(sums[j], Floats) * load<Floats>(scales + column);
      const Floats shift = load<Floats>(row_sums + column) * range[row].zero;
      out.write(row, column, (product - shift) * range[row].step + load<Floats>(bias + column));
    }
  };
  multiply<Fours>(to, rows, inputs / 4, panels, outputs, inputs / 4, threads, store);
}

// y = x * weights + bias: 4-bit weights where rows are few and memory is the limit, else
// the same weights in 8 bits, as in octavo_linear_int8. Inputs must be whole groups.
extern "C" void octavo_linear_int4(const uint16_t* x, int64_t rows, int64_t row_stride,
                                   const uint8_t* nibbles, const void* panels,
                                   const float* factors, const float* scales,
                                   const float* row_sums, const float* bias, int64_t inputs,
                                   int64_t outputs, uint16_t* y, int threads) {
  if (rows > kFewRows)
    return octavo_linear_int8(x, rows, row_stride, panels, factors, scales, row_sums, bias,
                              inputs, outputs, y, threads);
  const int64_t groups = inputs / Group::kInputs;
  thread_local std::vector<float> sums;
  sums.resize(rows * groups);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t group = 0; group < groups; group++) {
      const uint16_t* at = x + row * row_stride + group * Group::kInputs;
      sums[row * groups + group] =
          reduce_add(BFloat16::load_floats(at) + BFloat16::load_floats(at + kLanes));
    }
  const Few few{reinterpret_cast<const uint32_t*>(x), row_stride / 2, sums.data(), groups};
  const int64_t num_panels = (outputs + kPanel - 1) / kPanel;
  const Outputs out{y, outputs};
  std::atomic<int64_t> free{0};
#pragma omp parallel num_threads(threads)
  for (int64_t panel = free++, next; panel < num_panels; panel = next) {
    next = free++;
    const uint8_t* at = nibbles + panel * groups * Group::kBytes;
    const uint8_t* ahead = nibbles + std::min(next, num_panels - 1) * groups * Group::kBytes;
    auto store = [=](int row, const Floats* values) {
      for (int j = 0; j < kPanelVectors; j++) {
        const int64_t column = panel * kPanel + j * kLanes;
        out.write(row, column, values[j] + load<Floats>(bias + column));
      }
    };
    switch (rows) {
      case 1: multiply_groups<1>(few, at, ahead, store); break;
      case 2: multiply_groups<2>(few, at, ahead, store); break;
      case 3: multiply_groups<3>(few, at, ahead, store); break;
      case 4: multiply_groups<4>(few, at, ahead, store); break;
    }
  }
}

#else

extern "C" int octavo_has_linear() { return 0; }

#endif
