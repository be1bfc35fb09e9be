// Rounds weights as engine/models/quantization/rounding.py defines.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "linear.h"
#include "operators.h"
#include "prepare_rows.h"

namespace {

constexpr int kTried = 4;             // numbers of steps from kMost down, as in LEVELS
constexpr int kMost = 15;
constexpr float kEpsilon = 1e-8f;
constexpr int kHalf = kGroupInputs / 2;
constexpr float kMagic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
typedef int8_t SignedBytes __attribute__((vector_size(kLanes)));
typedef uint8_t HalfGroup __attribute__((vector_size(kHalf)));

// A group's weights in 4 bits, (code - 8) * scale + zero; the scale and the zero are rounded to
// the type `Scale`.
template <class Scale>
struct RoundedGroup {
  alignas(64) uint8_t codes[kGroupInputs];
  uint16_t scale, zero;
};

// Returns the codes with the least squared error.
template <class Element, class Scale>
RoundedGroup<Scale> round_to_4_bits(const typename Element::Stored* from) {
  constexpr int kVectors = kGroupInputs / kLanes;
  Floats x[kVectors];
  for (int v = 0; v < kVectors; v++) x[v] = Element::load_floats(from + v * kLanes);
  Floats least = x[0], greatest = x[0];
#pragma GCC unroll 8
  for (int v = 1; v < kVectors; v++) least = min(least, x[v]), greatest = max(greatest, x[v]);
  const float low = -reduce_max(-least);
  Floats steps;
  for (int i = 0; i < kLanes; i++) steps[i] = kMost - i % kTried;
  uint16_t scales[kLanes], zeros[kLanes];
  Scale::store_floats(scales, max(broadcast(reduce_max(greatest) - low) / steps,
                                  broadcast(kEpsilon)));
  const Floats scale = Scale::load_floats(scales);
  Scale::store_floats(zeros, low + 8 * scale);
  const Floats zero = Scale::load_floats(zeros);

  alignas(64) uint8_t codes[kTried][kGroupInputs];
  float errors[kTried];
#pragma GCC unroll 4
  for (int i = 0; i < kTried; i++) {
    const Floats step = broadcast(scale[i]), middle = broadcast(zero[i]);
    Floats squares{};
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) {
      const Floats place = (x[v] - middle) / step + 8;
      const Floats rounded = min(max(place, Floats{}), broadcast(15.f)) + kMagic;
      const Floats distance = (rounded - kMagic - 8) * step + middle - x[v];
      squares += distance * distance;
      store(codes[i] + v * kLanes,
            __builtin_convertvector((Words)rounded - (Words)broadcast(kMagic), Bytes));
    }
    errors[i] = reduce_add(squares);
  }
  int best = -1;
  float least_error = std::numeric_limits<float>::infinity();
  for (int i = 0; i < kTried; i++)
    if (errors[i] < least_error && scale[i] > 0) least_error = errors[i], best = i;
  RoundedGroup<Scale> group{};
  if (best < 0) {  // all are equal
    Scale::store_floats(zeros, broadcast(low));
    group.zero = zeros[0];
    return group;
  }
  std::memcpy(group.codes, codes[best], sizeof group.codes);
  group.scale = scales[best];
  group.zero = zeros[best];
  return group;
}

// Stores a block of GGUF's Q4_1: the scale, the least weight, and the codes; the block's halves
// share bytes.
void store_q4_1(const RoundedGroup<Float16>& group, uint8_t* to) {
  uint16_t halves[kLanes] = {group.scale, group.zero};
  const Floats wide = Float16::load_floats(halves);
  Float16::store_floats(halves, broadcast(wide[1] - 8 * wide[0]));
  store(to, group.scale);
  store(to + 2, halves[0]);
  const auto low = load<HalfGroup>(group.codes), high = load<HalfGroup>(group.codes + kHalf);
  store(to + 4, low | high << 4);
}
constexpr int kQ41Bytes = 4 + kHalf;

template <class Element>
void round_rows_to_q4_1(const typename Element::Stored* weight, int64_t stride, int64_t outputs,
                   int64_t groups, uint8_t* rows, int threads) {
#pragma omp parallel for schedule(dynamic, 16) num_threads(threads)
  for (int64_t output = 0; output < outputs; output++)
    for (int64_t group = 0; group < groups; group++)
      store_q4_1(
          round_to_4_bits<Element, Float16>(weight + output * stride + group * kGroupInputs),
          rows + (output * groups + group) * kQ41Bytes);
}

// Loads at most `count` weights; the rest of the vector is zeros.
template <class Element>
Floats load_some(const typename Element::Stored* from, int64_t count) {
  if (count >= kLanes) return Element::load_floats(from);
  typename Element::Stored some[kLanes] = {};
  std::memcpy(some, from, count * sizeof *from);
  return Element::load_floats(some);
}

// Sets `bytes` to an output's weights times `factors`, in 127 steps; returns the step size. `sum`
// gets the sum of the bytes.
template <class Element>
float round_row(const typename Element::Stored* from, const float* factors, int64_t inputs,
                     int8_t* bytes, int32_t* sum) {
  const auto product = [=](int64_t i) {
    return load_some<Element>(from + i, inputs - i) * load_first<Floats>(factors + i, inputs - i);
  };
  Floats magnitudes{};
  for (int64_t i = 0; i < inputs; i += kLanes) {
    const Floats x = product(i);
    magnitudes = max(magnitudes, max(x, -x));
  }
  const float step = std::max(reduce_max(magnitudes), kEpsilon) / 127;
  Ints total{};
  for (int64_t i = 0; i < inputs; i += kLanes) {
    const Ints whole = round_to_ints(product(i) / step);
    total += whole;
    store_first(bytes + i, inputs - i, __builtin_convertvector(whole, SignedBytes));
  }
  *sum = 0;
  for (int i = 0; i < kLanes; i++) *sum += total[i];
  return step;
}

template <class Element>
void round_rows_to_bytes(const typename Element::Stored* weight, int64_t stride, int64_t outputs,
                    int64_t inputs, const float* factors, int8_t* bytes, float* scales, float* sums,
                    int threads) {
#pragma omp parallel for schedule(dynamic, 16) num_threads(threads)
  for (int64_t output = 0; output < outputs; output++) {
    int32_t sum;
    scales[output] = round_row<Element>(weight + output * stride, factors, inputs,
                                             bytes + output * inputs, &sum);
    sums[output] = sum * scales[output];
  }
}

// Sets `widest` to the greatest magnitude of each input's weights.
template <class Element>
void find_widest_of(const typename Element::Stored* weight, int64_t stride, int64_t outputs,
                 int64_t inputs, float* widest, int threads) {
  constexpr int64_t kInputs = 32 * kLanes;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t first = 0; first < inputs; first += kInputs) {
    Floats greatest[kInputs / kLanes] = {};
    const int64_t count = std::min(kInputs, inputs - first);
    for (int64_t output = 0; output < outputs; output++)
      for (int64_t i = 0; i < count; i += kLanes) {
        const Floats x =
            load_some<Element>(weight + output * stride + first + i, count - i);
        greatest[i / kLanes] = max(greatest[i / kLanes], max(x, -x));
      }
    std::memcpy(widest + first, greatest, count * sizeof *widest);
  }
}

// Calls function(weights, stride, outputs, Element{}) with a weight in bfloat16 or float32.
template <class Function>
void with_elements(const View& weight, Function function) {
  const int64_t stride = weight.strides[0], outputs = weight.sizes[0];
  require(weight.has_whole_rows(), "rows must be contiguous");
  if (weight.is_float32()) function(weight.as<const float>(), stride, outputs, Float32{});
  else function(weight.as<const uint16_t>(), stride, outputs, BFloat16{});
}

// Rounds a weight to rows of GGUF's Q4_1.
void round_to_q4_1(const View& weight, const View& rows) {
  const int64_t groups = weight.sizes[1] / kGroupInputs;
  with_elements(weight, [&](auto* from, int64_t stride, int64_t outputs, auto element) {
    round_rows_to_q4_1<decltype(element)>(from, stride, outputs, groups, rows.as<uint8_t>(),
                                     num_threads());
  });
}
OCTAVO_OPERATOR(round_to_q4_1)

// Rounds a weight times its inputs' factors to bytes, with a scale per output; also sets each
// output's scaled sum of bytes.
void round_to_bytes(const View& weight, const View& factors, const View& bytes, const View& scales,
                    const View& sums) {
  with_elements(weight, [&](auto* from, int64_t stride, int64_t outputs, auto element) {
    round_rows_to_bytes<decltype(element)>(from, stride, outputs, weight.sizes[1], factors.as<float>(),
                                      bytes.as<int8_t>(), scales.as<float>(), sums.as<float>(),
                                      num_threads());
  });
}
OCTAVO_OPERATOR(round_to_bytes)

// Sets `widest` to the greatest magnitude of each input's weights.
void find_widest(const View& weight, const View& widest) {
  with_elements(weight, [&](auto* from, int64_t stride, int64_t outputs, auto element) {
    find_widest_of<decltype(element)>(from, stride, outputs, weight.sizes[1], widest.as<float>(),
                                   num_threads());
  });
}
OCTAVO_OPERATOR(find_widest)

}  // namespace
