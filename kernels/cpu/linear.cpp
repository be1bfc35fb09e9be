// Linear layers: bfloat16 and float32 weights, and 8-bit weights with activations quantized at run
// time.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "linear.h"
#include "outputs.h"
#include "prepare_rows.h"
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
void pack_words(const uint8_t* from, int64_t row_bytes, int rows, int64_t first, int64_t end,
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

}  // namespace

// y = x * weights + bias. Inputs and the rows' stride must be even.
extern "C" void octavo_linear(const uint16_t* x, int64_t rows, int64_t row_stride,
                              const LinearLayer* layer, uint16_t* y, int threads) {
  linear(x, rows, row_stride, *layer, y, threads);
}

// The same in float32, for any number of inputs and stride.
extern "C" void octavo_linear_float32(const float* x, int64_t rows, int64_t row_stride,
                                      const LinearLayer* layer, float* y, int threads) {
  linear(x, rows, row_stride, *layer, y, threads);
}

// Like octavo_linear, but y is float32.
extern "C" void octavo_linear_wide(const uint16_t* x, int64_t rows, int64_t row_stride,
                                   const LinearLayer* layer, float* y, int threads) {
  linear(x, rows, row_stride, *layer, y, threads);
}

// y = (x * factors) * (weights * scales) + bias, with x * factors in bytes. Inputs must be a
// multiple of 4.
extern "C" void octavo_linear_int8(const uint16_t* x, int64_t rows, int64_t row_stride,
                                   const LinearLayer* layer, const Scales* scales, uint16_t* y,
                                   int threads) {
  constexpr bool kAsTheyAre = Fours::kParts == 1 && Fours::kOffset == 0;
  const int64_t depth = layer->inputs / 4, stride = depth * Fours::kParts;
  uint8_t* const bytes = scratch<uint8_t>(rows * layer->inputs);
  uint32_t* const words = kAsTheyAre ? nullptr : scratch<uint32_t>(rows * stride);
  Range* const ranges = scratch<Range>(rows);
  auto prepare = [=](int64_t row) {
    uint8_t* const to = bytes + row * layer->inputs;
    ranges[row] = round_row(x + row * row_stride, *layer, scales->factors, to);
    if (words) take_apart<Fours>(to, depth, words + row * stride);
  };
  const Outputs<uint16_t> out{y, *layer};
  auto store = [&](int64_t row, int64_t panel, const Ints* sums) {
    Floats values[kPanelVectors];
    to_floats(sums, ranges[row], scales->outputs + panel * kPanel,
              scales->row_sums + panel * kPanel, values);
    out.write(row, panel, values);
  };
  const void* prepared = words ? static_cast<const void*>(words) : bytes;
  multiply<Fours>(prepared, rows, stride, *layer, depth, threads, prepare, store);
}

// Packs a weight's rows, of `words` words each, into panels; see linear.h. Outputs are padded with
// zeros to whole panels.
extern "C" void octavo_pack_words(const uint8_t* rows, int64_t row_bytes, int64_t outputs,
                                  int64_t words, uint32_t* panels, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t output = 0; output < outputs; output += kPanel)
    for (int64_t k = 0; k < words; k += kLineWords)
      pack_words(rows + output * row_bytes, row_bytes, std::min<int64_t>(outputs - output, kPanel),
                 k, std::min(k + kLineWords, words), panels + output * words);
}

// Returns the number of outputs of a panel.
extern "C" int octavo_panel_outputs() { return kPanel; }
