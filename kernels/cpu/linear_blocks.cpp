// Linear layers and embeddings of weights in GGUF's block formats.
//
// Rows are rounded to bytes, group by group, and multiplied by the weights' codes. A group's sum is
// exact, and groups are added in the same order for one row and for many: so a row's products do
// not depend on other rows. For rows in float32, panels are widened to float32.

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "blocks.h"
#include "linear_call.h"
#include "outputs.h"
#include "streams.h"

namespace {

// Rounds rows to bytes, group by group, in buffers of this thread.
template <class K>
GroupedRows prepare(const uint16_t* x, int64_t rows, int64_t row_stride, const LinearLayer& layer,
                int threads) {
  const int64_t groups = layer.inputs / K::kGroup;
  const int64_t stride = layer.inputs / 4 * CodeSum<K>::kParts;
  float* const sums = scratch<float>(2 * rows * groups);
  float* const steps = sums + rows * groups;
  uint32_t* const words = scratch<uint32_t>(rows * stride);
#pragma omp parallel for num_threads(threads) if (rows > kTileBlockRows)
  for (int64_t row = 0; row < rows; row++) {
    const uint16_t* from = x + row * row_stride;
    if (layer.norm) {
      uint16_t* const normed = scratch<uint16_t>(layer.inputs);
      norm_row(from, layer, normed);
      from = normed;
    }
    prepare_row<K>(from, groups, words + row * stride, sums + row * groups, steps + row * groups);
  }
  return {words, stride, sums, steps, groups};
}

template <class K, class Element>
void multiply(const uint16_t* x, int64_t rows, int64_t row_stride, const LinearLayer& layer,
              Element* y, int threads) {
  const GroupedRows few = prepare<K>(x, rows, row_stride, layer, threads);
  const auto* weights = static_cast<const uint8_t*>(layer.panels);
  const int64_t panels = num_panels(layer);
  const int64_t panel_bytes = layer.inputs / kBlock / K::kUnitBlocks * K::kUnitBytes;
  const Outputs<uint16_t, Element> out{y, layer};
  if constexpr (K::kStreams)
    if (rows <= kTileBlockRows)
      return stream_panels(panels, threads, [&](int64_t panel) {
        const uint8_t* const at = weights + panel * panel_bytes;
        multiply_blocks<K, kFirstCache>(
            rows, few, at, at + kStreamBytes,
            [&](int row, const Floats* values) { out.write(row, panel, values); });
      });
  const int64_t tiles = (rows + kTileBlockRows - 1) / kTileBlockRows;
  std::atomic<int64_t> free{0};
#pragma omp parallel num_threads(threads)
  for (int64_t panel = free++, next; panel < panels; panel = next) {
    next = free++;
    const uint8_t* at = weights + panel * panel_bytes;
    const uint8_t* ahead = weights + std::min(next, panels - 1) * panel_bytes;
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t row = rows * tile / tiles;
      const int count = rows * (tile + 1) / tiles - row;
      const GroupedRows tile_rows{few.words + row * few.stride, few.stride,
                                  few.sums + row * few.groups,
                        few.steps + row * few.groups, few.groups};
      multiply_blocks<K, kSecondCache>(
          count, tile_rows, at, tile ? at : ahead,
          [&](int i, const Floats* values) { out.write(row + i, panel, values); });
    }
  }
}

// Rows in float32: each panel is dequantized once, for all rows.
template <class K>
void multiply_wide(const float* x, int64_t rows, int64_t row_stride, const LinearLayer& layer,
                   float* y, int threads) {
  struct alignas(64) Line {
    uint32_t words[kLineWords];
  };
  const auto* weights = static_cast<const uint8_t*>(layer.panels);
  const int64_t panels = num_panels(layer);
  const int64_t panel_bytes = layer.inputs / kBlock / K::kUnitBlocks * K::kUnitBytes;
  const Outputs<float> out{y, layer};
  float* const normed = layer.norm ? scratch<float>(rows * layer.inputs) : nullptr;
  const Rows prepared{reinterpret_cast<const uint32_t*>(normed ? normed : x), rows,
                      normed ? layer.inputs : row_stride};
  std::atomic<int64_t> free{0};
#pragma omp parallel num_threads(threads)
  {
    if (normed) {
#pragma omp for  // a barrier: all rows are normed
      for (int64_t row = 0; row < rows; row++)
        norm_row(x + row * row_stride, layer, normed + row * layer.inputs);
    }
    const int64_t lines = (layer.inputs * kPanel + kLineWords - 1) / kLineWords;
    uint32_t* const widened = scratch<Line>(lines)->words;
    PanelProducts<Singles> products;
    for (int64_t panel = free++; panel < panels; panel = free++) {
      widen_blocks<K>(weights + panel * panel_bytes, layer.inputs, widened);
      products.run(prepared, widened, layer.inputs, widened,
                   [&](int64_t row, const Floats* sums) { out.write(row, panel, sums); });
    }
  }
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

// The inputs must be a multiple of the format's unit: 32, or 256 of a "K" format. `wide`: outputs are
// float32, as those of rows in float32 are anyway.
void linear_blocks(const Result& result, const LinearCall& call, int64_t format, bool wide) {
  wide |= call.is_float32;
  void* const y =
      call.make(result, wide ? aoti_torch_dtype_float32() : aoti_torch_dtype_bfloat16());
  const LinearLayer& layer = call.layer;
  with_format(format, [&](auto kind) {
    using K = decltype(kind);
    if (call.is_float32)
      multiply_wide<K>(call.x_of<float>(), call.rows, call.row_stride, layer, static_cast<float*>(y),
                       call.threads);
    else if (wide)
      multiply<K>(call.x_of(), call.rows, call.row_stride, layer, static_cast<float*>(y), call.threads);
    else
      multiply<K>(call.x_of(), call.rows, call.row_stride, layer, static_cast<uint16_t*>(y), call.threads);
  });
}

// y = x * weights + bias. Results have the type of x.
void packed_linear_blocks(const Result& result, const View& x, int64_t outputs, const View& blocks,
                          const View& bias, int64_t format, int64_t gated, int64_t adapted,
                          const View* norm, double epsilon, const View* residual) {
  const Stopwatch stopwatch(spent.linear);
  linear_blocks(result, {x, outputs, blocks, bias, gated, adapted, norm, epsilon, residual}, format,
                false);
}
OCTAVO_OPERATOR(packed_linear_blocks)

void packed_linear_blocks_wide(const Result& result, const View& x, int64_t outputs,
                               const View& blocks, const View& bias, int64_t format,
                               int64_t adapted) {
  const Stopwatch stopwatch(spent.linear);
  linear_blocks(result, {x, outputs, blocks, bias, 0, adapted}, format, true);
}
OCTAVO_OPERATOR(packed_linear_blocks_wide)

// Sets each row of the result, `width` elements, to the weights of an output.
template <class Element>
void embed(const Result& result, const View& ids, int64_t width, const View& blocks, int64_t format,
           int32_t dtype) {
  const Stopwatch stopwatch(spent.linear);
  const int64_t count = ids.sizes[0], stride = ids.strides[0];
  const auto* outputs = ids.as<const int64_t>();
  for (int64_t i = 0; i < count; i++)
    if (uint64_t(outputs[i * stride]) >= uint64_t(blocks.sizes[0] * kPanel))
      throw std::out_of_range("a token is outside of the vocabulary");
  auto* const out = static_cast<Element*>(result.make({count, width}, dtype));
  with_format(format, [&](auto kind) {
#pragma omp parallel for num_threads(num_threads())
    for (int64_t i = 0; i < count; i++)
      widen_output<decltype(kind)>(blocks.as<uint8_t>(), width, outputs[i * stride], out + i * width);
  });
}

void packed_embedding(const Result& result, const View& ids, int64_t width, const View& blocks,
                      int64_t format) {
  embed<uint16_t>(result, ids, width, blocks, format, aoti_torch_dtype_bfloat16());
}
OCTAVO_OPERATOR(packed_embedding)

void packed_embedding_wide(const Result& result, const View& ids, int64_t width,
                           const View& blocks, int64_t format) {
  embed<float>(result, ids, width, blocks, format, aoti_torch_dtype_float32());
}
OCTAVO_OPERATOR(packed_embedding_wide)

}  // namespace
