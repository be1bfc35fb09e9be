// Linear layers: bfloat16 weights, 8-bit weights with activations quantized at run time, and 4-bit
// weights for a few rows.
//
// They need vector instructions that multiply bfloat16 in pairs and bytes in fours. With a matrix
// unit (AMX) oneDNN is faster, and linear.py does not use these.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "linear.h"

#if OCTAVO_HAS_LINEAR

namespace {

constexpr float kTiny = 1e-8f;  // avoids division by zero

struct Pairs {  // of bfloat16
  using Sum = Floats;
  static Sum multiply_add(Sum sum, Words a, Words b) {
    return BFloat16::multiply_add(sum, a, b);
  }
};

struct Fours {  // of bytes, unsigned and signed
  using Sum = Ints;
  static Sum multiply_add(Sum sum, Words a, Words b) {
    return (Sum)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
  }
};

// The sums over a group of inputs of 4-bit weights, for a few rows.
//
// A weight is q * scale + zero, with q from -8 to 7 and a scale and a zero per output and group of
// inputs. bfloat16 represents q exactly. So the kernel sums q's products over a group first, and
// multiplies the sum by the scale once.
// A panel's group is kPanelVectors times four vectors of 4-bit numbers, then the scales, then the
// zeros. Lane h of an output's two in vector t has, from its low bits up, the weights of inputs
// 8 t + h, 8 t + h + 2, ...
struct Group {
  static constexpr int kInputs = 32;
  static constexpr int kNibbles = kPanel * kInputs / 2;  // bytes
  static constexpr int kBytes = kNibbles + 2 * kPanel * 2;
};
constexpr int kFewRows = 4;  // twice two sums each, besides the operands

// The values of q as bfloat16, twice, as the fifth bit of an index is ignored.
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

__mmask16 first_lanes(int64_t count) { return count < kLanes ? (1u << count) - 1 : 0xffff; }

Floats load_first(const uint16_t* from, __mmask16 mask) {
  const __m512i half = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
  return (Floats)_mm512_slli_epi32(half, 16);
}

// Rounds to bfloat16 where the model does, so that near ties come out the same.
Floats rounded(Floats x) {
  const __m256i half = (__m256i)_mm512_cvtneps_pbh((__m512)x);
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

Floats silu(Floats x) {
  const Floats power = x * -1.4426950f;  // of 2; clamped against overflow
  return x / (1 + exp2((Floats)_mm512_min_ps((__m512)power, _mm512_set1_ps(126))));
}

void store_first(uint16_t* to, __mmask16 mask, Floats values) {
  _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh((__m512)values));
}

void store_first(float* to, __mmask16 mask, Floats values) {
  _mm512_mask_storeu_ps(to, mask, (__m512)values);
}

// Writes results in bfloat16 or float32.
template <class Element>
struct Outputs {
  Element* first;
  const LinearLayer& layer;

  // Stores a row's products with a panel's weights, including the bias.
  void write(int64_t row, int64_t panel, Floats left, Floats right) const {
    if (layer.gated) return put(row, panel * kLanes, silu(left) * right);
    put(row, panel * kPanel, left);
    put(row, panel * kPanel + kLanes, right);
  }

 private:
  void put(int64_t row, int64_t column, Floats values) const {
    if (column >= layer.outputs) return;
    const __mmask16 mask = first_lanes(layer.outputs - column);
    if (layer.residual)
      values = rounded(values) +
               load_first(layer.residual + row * layer.residual_stride + column, mask);
    store_first(first + row * layer.outputs + column, mask, values);
  }
};

int64_t num_panels(const LinearLayer& layer) {
  const int outputs = layer.gated ? kLanes : kPanel;
  return (layer.outputs + outputs - 1) / outputs;
}

// RMSNorm (Zhang and Sennrich, 2019): a row divided by its root mean square, times weights.
float inverse_rms(const uint16_t* row, const LinearLayer& layer) {
  Floats squares{};
  for (int64_t i = 0; i < layer.inputs; i += kLanes) {
    const Floats x = load_first(row + i, first_lanes(layer.inputs - i));
    squares += x * x;
  }
  return 1 / std::sqrt(reduce_add(squares) / layer.inputs + layer.epsilon);
}

void norm_row(const uint16_t* row, const LinearLayer& layer, uint16_t* to) {
  const float inverse = inverse_rms(row, layer);
  for (int64_t i = 0; i < layer.inputs; i += kLanes) {
    const __mmask16 mask = first_lanes(layer.inputs - i);
    store_first(to + i, mask,
                rounded(load_first(row + i, mask) * inverse) * load_first(layer.norm + i, mask));
  }
}

// A thread's buffer for prepared rows, kept between calls.
template <class Element>
Element* scratch(int64_t count) {
  thread_local std::vector<Element> memory;
  if (static_cast<int64_t>(memory.size()) < count) memory.resize(count);
  return memory.data();
}

// A row in bytes: an element is (byte - zero) * step.
struct Range {
  float step, zero;
};

// A row's inputs times their factors, before rounding.
struct Factored {
  const uint16_t* row;
  const uint16_t* norm;
  const float* factors;
  int64_t count;

  Floats at(int64_t i) const {
    const __mmask16 mask = first_lanes(count - i);
    const Floats x = load_first(row + i, mask) * (Floats)_mm512_maskz_loadu_ps(mask, factors + i);
    return norm ? x * load_first(norm + i, mask) : x;
  }
};

Range round_row(const uint16_t* row, const LinearLayer& layer, const float* factors,
                uint8_t* bytes) {
  const Factored x{row, layer.norm, factors, layer.inputs};
  Floats least{}, greatest{};  // the range always includes zero
  for (int64_t i = 0; i < x.count; i += kLanes) {
    least = (Floats)_mm512_min_ps((__m512)least, (__m512)x.at(i));
    greatest = (Floats)_mm512_max_ps((__m512)greatest, (__m512)x.at(i));
  }
  const float low = _mm512_reduce_min_ps((__m512)least);
  const float step = std::max((reduce_max(greatest) - low) / 255, kTiny);
  const __m512i zero = _mm512_cvtps_epi32(_mm512_set1_ps(-low / step));
  const Floats inverse = broadcast(1 / step);
  for (int64_t i = 0; i < x.count; i += kLanes) {
    const __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32((__m512)(x.at(i) * inverse)), zero);
    const __m128i byte = _mm512_cvtusepi32_epi8(_mm512_max_epi32(whole, _mm512_setzero_si512()));
    _mm_mask_storeu_epi8(bytes + i, first_lanes(x.count - i), byte);
  }
  // A norm divides the whole row, which is the same as dividing the step.
  const float scale = layer.norm ? inverse_rms(row, layer) : 1;
  return {step * scale, (float)_mm_cvtsi128_si32(_mm512_castsi512_si128(zero))};
}

template <class T, class Prepare, class Store>
void multiply(const void* rows, int64_t num_rows, int64_t row_words, const LinearLayer& layer,
              int64_t depth, int threads, Prepare prepare, Store store) {
  Linear<T, Store>(static_cast<const uint32_t*>(rows), num_rows, row_words,
                   static_cast<const uint32_t*>(layer.panels), num_panels(layer), depth, store)
      .run(threads, prepare);
}

template <class Element>
void linear(const uint16_t* x, int64_t rows, int64_t row_stride, const LinearLayer& layer,
            Element* y, int threads) {
  const Outputs<Element> out{y, layer};
  auto store = [&](int64_t row, int64_t panel, const Floats* sums) {
    const float* bias = layer.bias + panel * kPanel;
    out.write(row, panel, sums[0] + load<Floats>(bias), sums[1] + load<Floats>(bias + kLanes));
  };
  const int64_t depth = layer.inputs / 2;
  if (!layer.norm)
    return multiply<Pairs>(x, rows, row_stride / 2, layer, depth, threads, nullptr, store);
  uint16_t* const normed = scratch<uint16_t>(rows * layer.inputs);
  auto prepare = [=, &layer](int64_t row) {
    norm_row(x + row * row_stride, layer, normed + row * layer.inputs);
  };
  multiply<Pairs>(normed, rows, depth, layer, depth, threads, prepare, store);
}

}  // namespace

// y = x * weights + bias. Inputs and the rows' stride must be even.
extern "C" void octavo_linear(const uint16_t* x, int64_t rows, int64_t row_stride,
                              const LinearLayer* layer, uint16_t* y, int threads) {
  linear(x, rows, row_stride, *layer, y, threads);
}

// The same, with y in float32.
extern "C" void octavo_linear_wide(const uint16_t* x, int64_t rows, int64_t row_stride,
                                   const LinearLayer* layer, float* y, int threads) {
  linear(x, rows, row_stride, *layer, y, threads);
}

// y = (x * factors) * (weights * scales) + bias, with x * factors in bytes. Inputs must be a
// multiple of 4.
extern "C" void octavo_linear_int8(const uint16_t* x, int64_t rows, int64_t row_stride,
                                   const LinearLayer* layer, const Scales* scales, uint16_t* y,
                                   int threads) {
  uint8_t* const bytes = scratch<uint8_t>(rows * layer->inputs);
  Range* const ranges = scratch<Range>(rows);
  auto prepare = [=](int64_t row) {
    ranges[row] = round_row(x + row * row_stride, *layer, scales->factors,
                            bytes + row * layer->inputs);
  };
  const Outputs<uint16_t> out{y, *layer};
  auto store = [&](int64_t row, int64_t panel, const Ints* sums) {
    Floats values[kPanelVectors];
    for (int j = 0; j < kPanelVectors; j++) {
      const int64_t at = panel * kPanel + j * kLanes;
      const Floats product =
          __builtin_convertvector(sums[j], Floats) * load<Floats>(scales->outputs + at);
      const Floats shift = load<Floats>(scales->row_sums + at) * ranges[row].zero;
      values[j] = (product - shift) * ranges[row].step + load<Floats>(layer->bias + at);
    }
    out.write(row, panel, values[0], values[1]);
  };
  const int64_t depth = layer->inputs / 4;
  multiply<Fours>(bytes, rows, depth, *layer, depth, threads, prepare, store);
}

// y = x * weights + bias: with 4-bit weights for few rows, which are bound by memory, else with the
// same weights in 8 bits, as in octavo_linear_int8. Inputs must be whole groups.
extern "C" void octavo_linear_int4(const uint16_t* x, int64_t rows, int64_t row_stride,
                                   const uint8_t* nibbles, const LinearLayer* layer,
                                   const Scales* scales, uint16_t* y, int threads) {
  if (rows > kFewRows) return octavo_linear_int8(x, rows, row_stride, layer, scales, y, threads);
  if (layer->norm) {
    uint16_t* const normed = scratch<uint16_t>(rows * layer->inputs);
    for (int64_t row = 0; row < rows; row++)
      norm_row(x + row * row_stride, *layer, normed + row * layer->inputs);
    x = normed;
    row_stride = layer->inputs;
  }
  const int64_t groups = layer->inputs / Group::kInputs;
  float* const sums = scratch<float>(rows * groups);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t group = 0; group < groups; group++) {
      const uint16_t* at = x + row * row_stride + group * Group::kInputs;
      sums[row * groups + group] =
          reduce_add(BFloat16::load_floats(at) + BFloat16::load_floats(at + kLanes));
    }
  const Few few{reinterpret_cast<const uint32_t*>(x), row_stride / 2, sums, groups};
  const int64_t panels = num_panels(*layer);
  const Outputs<uint16_t> out{y, *layer};
  std::atomic<int64_t> free{0};
#pragma omp parallel num_threads(threads)
  for (int64_t panel = free++, next; panel < panels; panel = next) {
    next = free++;
    const uint8_t* at = nibbles + panel * groups * Group::kBytes;
    const uint8_t* ahead = nibbles + std::min(next, panels - 1) * groups * Group::kBytes;
    auto store = [&](int row, const Floats* values) {
      const float* bias = layer->bias + panel * kPanel;
      out.write(row, panel, values[0] + load<Floats>(bias),
                values[1] + load<Floats>(bias + kLanes));
    };
    switch (rows) {
      case 1: multiply_groups<1>(few, at, ahead, store); break;
      case 2: multiply_groups<2>(few, at, ahead, store); break;
      case 3: multiply_groups<3>(few, at, ahead, store); break;
      case 4: multiply_groups<4>(few, at, ahead, store); break;
    }
  }
}

#endif

// Returns whether the functions above exist.
extern "C" int octavo_has_linear() { return OCTAVO_HAS_LINEAR; }
