// Linear layers: bfloat16 and float32 weights, and 8-bit weights with activations quantized at run
// time.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "linear_call.h"
#include "outputs.h"
#include "repack.h"

namespace {

template <class T, class Prepare, class Store>
void multiply(const void* words, int64_t rows, int64_t stride, const LinearLayer& layer,
              int64_t depth, int threads, Prepare prepare, Store store) {
  Linear<T, Store>({static_cast<const uint32_t*>(words), rows, stride},
                   static_cast<const uint32_t*>(layer.panels), num_panels(layer), depth, store)
      .run(threads, prepare);
}

// Lines whose addresses differ by a multiple of this share one small set of the first cache.
constexpr int kSetBytes = 4096;

// Weights have the rows' type. Rows are copied if a tile of them would not fit into the first
// cache: 48 rows of 4 or 8 KiB then take 7% less time on a Zen 4.
template <class Row, class Element>
void linear(const Row* x, int64_t rows, int64_t row_stride, const LinearLayer& layer, Element* y,
            int threads) {
  using Own = std::conditional_t<std::is_same_v<Row, float>, Singles, Pairs>;
  constexpr int kOfWord = sizeof(uint32_t) / sizeof(Row);
  const Outputs<Row, Element> out{y, layer};
  auto store = [&](int64_t row, int64_t panel, const Floats* sums) { out.write(row, panel, sums); };
  const int64_t depth = layer.inputs / kOfWord;
  const bool collide = rows > kTileRows && row_stride * sizeof(Row) % kSetBytes == 0;
  if (Own::kParts == 1 && !layer.norm && !collide)
    return multiply<Own>(x, rows, row_stride / kOfWord, layer, depth, threads, nullptr, store);
  const int64_t stride = depth * Own::kParts + kLineWords;
  uint32_t* const words = scratch<uint32_t>(rows * stride);
  auto prepare = [=, &layer](int64_t row) {
    const Row* from = x + row * row_stride;
    uint32_t* const to = words + row * stride;
    if (layer.norm) {
      Row* const normed = Own::kParts == 1 ? reinterpret_cast<Row*>(to) : scratch<Row>(layer.inputs);
      norm_row(from, layer, normed);
      from = normed;
    }
    if (static_cast<const void*>(from) != to) take_apart<Own>(from, depth, to);
  };
  multiply<Own>(words, rows, stride, layer, depth, threads, prepare, store);
}

// Packs words first to end - 1 of up to kPanel rows; a word's rows become adjacent. Missing rows
// become zeros.
void pack_panel(const uint8_t* from, int64_t row_bytes, int rows, int64_t first, int64_t end,
                uint32_t* to) {
  constexpr int kSquare = 4, kAheadBytes = 256;
  const int64_t squares = first + (end - first) / kSquare * kSquare;
  for (int row = 0; row < kPanel; row += kSquare) {
    const uint8_t* row_at[kSquare];
    uint32_t mask[kSquare];
    for (int i = 0; i < kSquare; i++) {
      const bool exists = row + i < rows;
      row_at[i] = from + (exists ? row + i : 0) * row_bytes;
      mask[i] = exists ? ~0u : 0;
      __builtin_prefetch(row_at[i] + first * 4 + kAheadBytes);
    }
    for (int64_t k = first; k < squares; k += kSquare) {
      Four square[kSquare];
#pragma GCC unroll 4
      for (int i = 0; i < kSquare; i++) square[i] = load<Four>(row_at[i] + k * 4) & mask[i];
      transpose(square);
#pragma GCC unroll 4
      for (int i = 0; i < kSquare; i++) store(to + (k + i) * kPanel + row, square[i]);
    }
    for (int64_t k = squares; k < end; k++)
      for (int i = 0; i < kSquare; i++)
        to[k * kPanel + row + i] = load<uint32_t>(row_at[i] + k * 4) & mask[i];
  }
}

// y = x * weights + bias.
void packed_linear(const Result& result, const View& x, int64_t outputs, const View& panels,
                   const View& bias, int64_t gated, int64_t adapted, const View* norm,
                   double epsilon, const View* residual) {
  const Stopwatch stopwatch(spent.linear);
  require(x.dtype == panels.dtype, "rows must have the weights' type");
  const LinearCall call(x, outputs, panels, bias, gated, adapted, norm, epsilon, residual);
  const auto run = [&](auto* rows, auto* y) {
    linear(rows, call.rows, call.row_stride, call.layer, y, call.threads);
  };
  if (call.is_float32)
    run(call.x_of<float>(), call.make<float>(result, x.dtype));
  else
    run(call.x_of(), call.make<uint16_t>(result, x.dtype));
}
OCTAVO_OPERATOR(packed_linear)

// The same for bfloat16, but y is float32.
void packed_linear_wide(const Result& result, const View& x, int64_t outputs, const View& panels,
                        const View& bias, int64_t adapted) {
  const Stopwatch stopwatch(spent.linear);
  const LinearCall call(x, outputs, panels, bias, 0, adapted);
  require(!call.is_float32, "rows must be bfloat16");
  linear(call.x_of(), call.rows, call.row_stride, call.layer,
         call.make<float>(result, aoti_torch_dtype_float32()), call.threads);
}
OCTAVO_OPERATOR(packed_linear_wide)

// y = (x * factors) * (weights * scales) + bias, with x * factors in bytes. Inputs must be a
// multiple of 4. `row_sums` has the sum of each output's scaled weights.
void packed_linear_int8(const Result& result, const View& x, int64_t outputs, const View& panels,
                        const View& bias, const View& factors, const View& scales,
                        const View& row_sums, int64_t gated, int64_t adapted, const View* norm,
                        double epsilon, const View* residual) {
  const Stopwatch stopwatch(spent.linear);
  const LinearCall call(x, outputs, panels, bias, gated, adapted, norm, epsilon, residual);
  require(!call.is_float32, "rows must be bfloat16");
  constexpr bool kAsTheyAre = Fours::kParts == 1 && Fours::kOffset == 0;
  const LinearLayer& layer = call.layer;
  const int64_t depth = layer.inputs / 4, stride = depth * Fours::kParts;
  uint8_t* const bytes = scratch<uint8_t>(call.rows * layer.inputs);
  uint32_t* const words = kAsTheyAre ? nullptr : scratch<uint32_t>(call.rows * stride);
  Range* const ranges = scratch<Range>(call.rows);
  auto prepare = [&, words, bytes](int64_t row) {
    uint8_t* const to = bytes + row * layer.inputs;
    ranges[row] = round_row(call.x_of() + row * call.row_stride, layer, factors.as<float>(), to);
    if (words) take_apart<Fours>(to, depth, words + row * stride);
  };
  const Outputs<uint16_t> out{call.make<uint16_t>(result, x.dtype), layer};
  auto store = [&](int64_t row, int64_t panel, const Ints* sums) {
    Floats values[kPanelVectors];
    to_floats(sums, ranges[row], scales.as<float>() + panel * kPanel,
              row_sums.as<float>() + panel * kPanel, values);
    out.write(row, panel, values);
  };
  const void* prepared = words ? static_cast<const void*>(words) : bytes;
  multiply<Fours>(prepared, call.rows, stride, layer, depth, call.threads, prepare, store);
}
OCTAVO_OPERATOR(packed_linear_int8)

// Packs a weight's rows, of whole words, into panels; see linear.h. Outputs are padded with zeros to
// whole panels.
void pack_words(const View& weight, const View& panels) {
  const int64_t outputs = weight.sizes[0], words = panels.sizes[1];
  const int64_t row_bytes = weight.strides[0] * words * sizeof(uint32_t) / weight.sizes[1];
  const auto* rows = weight.as<uint8_t>();
#pragma omp parallel for schedule(dynamic) num_threads(num_threads())
  for (int64_t output = 0; output < outputs; output += kPanel)
    for (int64_t k = 0; k < words; k += kLineWords)
      pack_panel(rows + output * row_bytes, row_bytes, std::min<int64_t>(outputs - output, kPanel),
                 k, std::min(k + kLineWords, words), panels.as<uint32_t>() + output * words);
}
OCTAVO_OPERATOR(pack_words)

}  // namespace

// Returns the number of outputs of a panel.
extern "C" int octavo_panel_outputs() { return kPanel; }
