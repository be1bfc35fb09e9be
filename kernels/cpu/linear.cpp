// Linear layers: bfloat16 weights, and 8-bit weights with activations quantized at run time.

#include <algorithm>
#include <cstdint>

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

template <class Element>
void linear(const uint16_t* x, int64_t rows, int64_t row_stride, const LinearLayer& layer,
            Element* y, int threads) {
  const Outputs<Element> out{y, layer};
  auto store = [&](int64_t row, int64_t panel, const Floats* sums) { out.write(row, panel, sums); };
  const int64_t depth = layer.inputs / 2, stride = depth * Pairs::kParts;
  if (Pairs::kParts == 1 && !layer.norm)
    return multiply<Pairs>(x, rows, row_stride / 2, layer, depth, threads, nullptr, store);
  uint16_t* const normed = layer.norm ? scratch<uint16_t>(rows * layer.inputs) : nullptr;
  uint32_t* const words = Pairs::kParts == 1 ? nullptr : scratch<uint32_t>(rows * stride);
  auto prepare = [=, &layer](int64_t row) {
    const uint16_t* from = x + row * row_stride;
    if (normed) {
      norm_row(from, layer, normed + row * layer.inputs);
      from = normed + row * layer.inputs;
    }
    if (words) take_apart<Pairs>(from, depth, words + row * stride);
  };
  const void* prepared = words ? static_cast<const void*>(words) : normed;
  multiply<Pairs>(prepared, rows, stride, layer, depth, threads, prepare, store);
}

// Lays out words first to end - 1 of up to kPanel rows, with the rows of each side by side. Rows that
// there are not become zeros.
void pack_words(const uint8_t* from, int64_t row_bytes, int rows, int64_t first, int64_t end,
                uint32_t* to) {
  constexpr int kSquare = 4, kAheadBytes = 256;
  const int64_t squares = first + (end - first) / kSquare * kSquare;
  for (int row = 0; row < kPanel; row += kSquare) {
    const uint8_t* own[kSquare];
    uint32_t mask[kSquare];
    for (int i = 0; i < kSquare; i++) {
      const bool exists = row + i < rows;
      own[i] = from + (exists ? row + i : 0) * row_bytes;
      mask[i] = exists ? ~0u : 0;
      __builtin_prefetch(own[i] + first * 4 + kAheadBytes);
    }
    for (int64_t k = first; k < squares; k += kSquare) {
      Four square[kSquare];
#pragma GCC unroll 4
      for (int i = 0; i < kSquare; i++) square[i] = load<Four>(own[i] + k * 4) & mask[i];
      transpose(square);
#pragma GCC unroll 4
      for (int i = 0; i < kSquare; i++) store(to + (k + i) * kPanel + row, square[i]);
    }
    for (int64_t k = squares; k < end; k++)
      for (int i = 0; i < kSquare; i++)
        to[k * kPanel + row + i] = load<uint32_t>(own[i] + k * 4) & mask[i];
  }
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
  constexpr bool kAsTheyAre = Fours::kParts == 1 && Fours::kOffset == 0;
  const int64_t depth = layer->inputs / 4, stride = depth * Fours::kParts;
  uint8_t* const bytes = scratch<uint8_t>(rows * layer->inputs);
  uint32_t* const words = kAsTheyAre ? nullptr : scratch<uint32_t>(rows * stride);
  Range* const ranges = scratch<Range>(rows);
  auto prepare = [=](int64_t row) {
    uint8_t* const own = bytes + row * layer->inputs;
    ranges[row] = round_row(x + row * row_stride, *layer, scales->factors, own);
    if (words) take_apart<Fours>(own, depth, words + row * stride);
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

// Lays out a weight's rows, of `words` words each, in panels; see linear.h. Outputs are padded with
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
