// Linear layers: bfloat16 weights, and 8-bit ones with activations rounded as they come.
//
// For CPUs whose vectors multiply bfloat16 and bytes in pairs and fours, and which have
// no matrix unit: there oneDNN knows better.

#include <cstdint>
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

}  // namespace

extern "C" int octavo_has_linear() { return 1; }

// y = x * weights + bias. Inputs and the rows' stride must be even; bias has an element
// for each output of each panel.
extern "C" void octavo_linear(const uint16_t* x, int64_t rows, int64_t row_stride,
                              const void* panels, const float* bias, int64_t inputs,
                              int64_t outputs, uint16_t* y, int threads) {
  const Outputs out{y, outputs};
  auto store = [=](int64_t row, int64_t panel, const Floats* sums) {
    for (int j = 0; j < kPanelVectors; j++) {
      const int64_t column = panel * kPanel + j * kLanes;
      out.write(row, column, sums[j] + load<Floats>(bias + column));
    }
  };
  multiply<Pairs>(x, rows, row_stride / 2, panels, outputs, inputs / 2, threads, store);
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

#else

extern "C" int octavo_has_linear() { return 0; }

#endif
