// Linear layers of 4-bit weights.
//
// A few rows are bound by reading the weights. For more rows, there are the same weights in 8 bits
// too, or a panel is widened to bfloat16 at a time.

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "linear.h"
#include "nibbles.h"
#include "outputs.h"
#include "prepare_rows.h"
#include "streams.h"
#include "widened.h"

extern "C" void octavo_linear_int8(const uint16_t* x, int64_t rows, int64_t row_stride,
                                   const LinearLayer* layer, const Scales* scales, uint16_t* y,
                                   int threads);

namespace {

// Prepares a few rows, in buffers of this thread.
FewRows prepare(const uint16_t* x, int64_t rows, int64_t row_stride, const LinearLayer& layer) {
  const int64_t groups = layer.inputs / kGroupInputs;
  if (layer.norm) {
    uint16_t* const normed = scratch<uint16_t>(rows * layer.inputs);
    for (int64_t row = 0; row < rows; row++)
      norm_row(x + row * row_stride, layer, normed + row * layer.inputs);
    x = normed;
    row_stride = layer.inputs;
  }
  float* const sums = scratch<float>(2 * rows * groups);
  float* const steps = sums + rows * groups;
  uint32_t* const words = kRoundsRows ? scratch<uint32_t>(rows * layer.inputs / 2) : nullptr;
  for (int64_t row = 0; row < rows; row++)
    prepare_groups(x + row * row_stride, groups, words ? words + row * layer.inputs / 2 : nullptr,
                   sums + row * groups, steps + row * groups);
  if (words) return {words, layer.inputs / 2, sums, steps, groups};
  return {reinterpret_cast<const uint32_t*>(x), row_stride / 2, sums, steps, groups};
}

void multiply_with_few(const uint16_t* x, int64_t rows, int64_t row_stride, const uint8_t* nibbles,
                       const LinearLayer& layer, uint16_t* y, int threads) {
  const FewRows few = prepare(x, rows, row_stride, layer);
  const int64_t panels = num_panels(layer), panel_bytes = few.groups * GroupOf<Int4>::kBytes;
  const Outputs<uint16_t> out{y, layer};
  // A step of Qwen3-0.6B took 2 to 4% less time so on a Zen 4. For more rows there is no gain.
  if (rows == 1)
    return stream_panels(panels, threads, [&](int64_t panel) {
      const uint8_t* const at = nibbles + panel * panel_bytes;
      multiply_few<Int4, kFirstCache>(
          rows, few, at, at + kStreamBytes,
          [&](int row, const Floats* values) { out.write(row, panel, values); });
    });
  std::atomic<int64_t> free{0};
#pragma omp parallel num_threads(threads)
  for (int64_t panel = free++, next; panel < panels; panel = next) {
    next = free++;
    const uint8_t* at = nibbles + panel * panel_bytes;
    const uint8_t* ahead = nibbles + std::min(next, panels - 1) * panel_bytes;
    multiply_few<Int4>(rows, few, at, ahead,
                 [&](int row, const Floats* values) { out.write(row, panel, values); });
  }
}

void multiply_with_many(const uint16_t* x, int64_t rows, int64_t row_stride, const uint8_t* nibbles,
                        const LinearLayer& layer, uint16_t* y, int threads) {
  const int64_t groups = layer.inputs / kGroupInputs, panel_bytes = groups * GroupOf<Int4>::kBytes;
  multiply_widened<Pairs>(prepare_pairs(x, rows, row_stride, layer, threads), layer.inputs / 2, layer,
                          y, threads, [=](int64_t panel, uint32_t* widened) {
                            widen_panel(nibbles + panel * panel_bytes, groups, widened);
                          });
}

}  // namespace

// y = x * weights + bias: with 4-bit weights for few rows, which are bound by memory, else with the
// same weights in 8 bits, as in octavo_linear_int8. Inputs must be whole groups.
extern "C" void octavo_linear_int4(const uint16_t* x, int64_t rows, int64_t row_stride,
                                   const uint8_t* nibbles, const LinearLayer* layer,
                                   const Scales* scales, uint16_t* y, int threads) {
  if (rows > kFewRows) return octavo_linear_int8(x, rows, row_stride, layer, scales, y, threads);
  multiply_with_few(x, rows, row_stride, nibbles, *layer, y, threads);
}

// The same, with 4-bit weights alone, which are the layer's panels: for more rows, they are widened
// to bfloat16, which is what a weight is rounded to.
extern "C" void octavo_linear_nibbles(const uint16_t* x, int64_t rows, int64_t row_stride,
                                      const LinearLayer* layer, uint16_t* y, int threads) {
  const auto* nibbles = static_cast<const uint8_t*>(layer->panels);
  if (rows > kFewRows) multiply_with_many(x, rows, row_stride, nibbles, *layer, y, threads);
  else multiply_with_few(x, rows, row_stride, nibbles, *layer, y, threads);
}
