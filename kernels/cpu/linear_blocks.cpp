// Linear layers and embeddings of weights in GGUF's block formats.
//
// A few rows are bound by reading the weights: rows become bytes, group by group, and the weights'
// codes are multiplied as they are. For more rows, a panel is widened to bfloat16 at a time. Rows in
// float32 stay so: a panel is widened to float32.

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "blocks.h"
#include "outputs.h"
#include "streams.h"
#include "widened.h"

namespace {

constexpr int kMostFewRows = 8;

// Prepares a few rows, in buffers of this thread.
template <class K>
FewRows prepare(const uint16_t* x, int64_t rows, int64_t row_stride, const LinearLayer& layer) {
  const int64_t groups = layer.inputs / K::kGroup;
  const int64_t stride = layer.inputs / 4 * CodeSum<K>::kParts;
  uint16_t* const normed = layer.norm ? scratch<uint16_t>(layer.inputs) : nullptr;
  float* const sums = scratch<float>(2 * rows * groups);
  float* const steps = sums + rows * groups;
  uint32_t* const words = scratch<uint32_t>(rows * stride);
  for (int64_t row = 0; row < rows; row++) {
    const uint16_t* from = x + row * row_stride;
    if (normed) {
      norm_row(from, layer, normed);
      from = normed;
    }
    prepare_row<K>(from, groups, words + row * stride, sums + row * groups, steps + row * groups);
  }
  return {words, stride, sums, steps, groups};
}

template <class K, class Element>
void multiply_with_few(const uint16_t* x, int64_t rows, int64_t row_stride,
                       const LinearLayer& layer, Element* y, int threads) {
  const FewRows few = prepare<K>(x, rows, row_stride, layer);
  const auto* weights = static_cast<const uint8_t*>(layer.panels);
  const int64_t panels = num_panels(layer);
  const int64_t panel_bytes = layer.inputs / kBlock / K::kUnitBlocks * K::kUnitBytes;
  const Outputs<Element> out{y, layer};
  if constexpr (K::kStreams)
    if (rows <= kFewBlockRows)
      return stream_panels(panels, threads, [&](int64_t panel) {
        const uint8_t* const at = weights + panel * panel_bytes;
        multiply_blocks<K, kFirstCache>(
            rows, few, at, at + kStreamBytes,
            [&](int row, const Floats* values) { out.write(row, panel, values); });
      });
  std::atomic<int64_t> free{0};
#pragma omp parallel num_threads(threads)
  for (int64_t panel = free++, next; panel < panels; panel = next) {
    next = free++;
    const uint8_t* at = weights + panel * panel_bytes;
    const uint8_t* ahead = weights + std::min(next, panels - 1) * panel_bytes;
    for (int64_t row = 0; row < rows; row += kFewBlockRows) {
      const FewRows own{few.words + row * few.stride, few.stride, few.sums + row * few.groups,
                        few.steps + row * few.groups, few.groups};
      const int count = std::min<int64_t>(kFewBlockRows, rows - row);
      multiply_blocks<K, kSecondCache>(
          count, own, at, row ? at : ahead,
          [&](int i, const Floats* values) { out.write(row + i, panel, values); });
    }
  }
}

// T is the kind of words that weights are dequantized to, `depth` for each output.
template <class K, class T, class Element>
void multiply_with_many(const Rows& rows, int64_t depth, const LinearLayer& layer, Element* y,
                        int threads) {
  const auto* weights = static_cast<const uint8_t*>(layer.panels);
  const int64_t panel_bytes = layer.inputs / kBlock / K::kUnitBlocks * K::kUnitBytes;
  multiply_widened<T>(rows, depth, layer, y, threads, [=, &layer](int64_t panel, uint32_t* widened) {
    widen_blocks<K, T>(weights + panel * panel_bytes, layer.inputs, widened);
  });
}

template <class K, class Element>
void multiply(const uint16_t* x, int64_t rows, int64_t row_stride, const LinearLayer& layer,
              Element* y, int threads) {
  if (rows <= kMostFewRows)
    return multiply_with_few<K>(x, rows, row_stride, layer, y, threads);
  multiply_with_many<K, Pairs>(prepare_pairs(x, rows, row_stride, layer, threads),
                               layer.inputs / 2, layer, y, threads);
}

// Stores the weights of one output.
template <class K, class Element>
void widen_output(const uint8_t* panels, int64_t inputs, int64_t output, Element* y) {
  const int64_t panel_bytes = inputs / kBlock / K::kUnitBlocks * K::kUnitBytes;
  const int j = output % kPanel / kLanes, lane = output % kLanes;
  for_each_weight<K>(panels + output / kPanel * panel_bytes, inputs, j, j + 1,
                     [=](int64_t input, int, const Floats* values) {
                       for (int n = 0; n < 4; n++) {
                         if constexpr (sizeof(Element) == 2)
                           y[input + n] = BFloat16::narrow(values[n])[lane];
                         else
                           y[input + n] = values[n][lane];
                       }
                     });
}

}  // namespace

// y = x * weights + bias. The number of inputs must be a multiple of the format's unit: 32, or 256 of
// a "K" format. With rows in float32, the layer may have neither a norm nor a residual.
extern "C" void octavo_linear_blocks(const void* x, int64_t rows, int64_t row_stride,
                                     const LinearLayer* layer, int64_t format, int64_t elements,
                                     void* y, int threads) {
  with_format(format, [&](auto own) {
    using K = decltype(own);
    const auto* narrow = static_cast<const uint16_t*>(x);
    if (elements == kNarrowBlocks)
      multiply<K>(narrow, rows, row_stride, *layer, static_cast<uint16_t*>(y), threads);
    else if (elements == kWideOutputBlocks)
      multiply<K>(narrow, rows, row_stride, *layer, static_cast<float*>(y), threads);
    else
      multiply_with_many<K, Singles>({static_cast<const uint32_t*>(x), rows, row_stride},
                                     layer->inputs, *layer, static_cast<float*>(y), threads);
  });
}

// Sets each row of y, `inputs` in bfloat16 or, if `wide`, float32, to the weights of an output. The
// outputs must be within the panels.
extern "C" void octavo_embed_blocks(const int64_t* outputs, int64_t rows, const uint8_t* panels,
                                    int64_t inputs, int64_t format, int64_t wide, void* y,
                                    int threads) {
  with_format(format, [&](auto own) {
    using K = decltype(own);
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
      if (wide)
        widen_output<K>(panels, inputs, outputs[row], static_cast<float*>(y) + row * inputs);
      else
        widen_output<K>(panels, inputs, outputs[row], static_cast<uint16_t*>(y) + row * inputs);
    }
  });
}
