// The call of a linear layer's operator.
#pragma once

#include "linear.h"
#include "operators.h"
#include "prepare_rows.h"

// Multiplies each row, bfloat16 or, if `wide`, float32, by its adapter's down projection, LoRA's A,
// of the same type. Stores the products in `inner`; LowRankSums describes its layout. Returns false
// if no adapter of the batch adapts this layer.
bool multiply_down(const LowRankBatch& batch, const LowRankPart* parts, int64_t num_parts,
                   const void* x, bool wide, int64_t rows, int64_t row_stride,
                   const LinearLayer& layer, float* inner, int threads) HIDDEN;

// Rows that kernels can read, and the layer with its adapters. If `adapted` is not negative, it is the
// layer's number among adapted layers, and the layer adds the adapters' sums.
struct LinearCall {
  const void* x;
  int64_t rows, row_stride;
  LinearLayer layer;
  bool is_float32;
  int threads = num_threads();

  LinearCall(const View& x, int64_t outputs, const View& panels, const View& bias,
             int64_t gated = 0, int64_t adapted = -1, const View* norm = nullptr,
             double epsilon = 0, const View* residual = nullptr)
      : x(x.data), rows(x.sizes[0]), row_stride(x.strides[0]),
        layer{panels.data, bias.as<float>(), x.sizes[1], outputs, gated != 0,
              static_cast<float>(epsilon), nullptr, nullptr, 0, nullptr},
        is_float32(x.is_float32()) {
    require(is_float32 || x.dtype == aoti_torch_dtype_bfloat16(),
            "rows must be bfloat16 or float32");
    if (!x.has_whole_rows() || (!is_float32 && row_stride % 2)) copy(x);
    if (norm) layer.norm = norm->data;
    if (residual) {
      require(residual->has_whole_rows(), "rows of a residual must be contiguous");
      layer.residual = residual->data;
      layer.residual_stride = residual->strides[0];
    }
    if (adapted >= 0 && adapters) adapt(adapted);
  }
  LinearCall(const LinearCall&) = delete;
  LinearCall& operator=(const LinearCall&) = delete;

  // The rows of bfloat16, or of another type.
  template <class Element = uint16_t>
  const Element* x_of() const {
    return static_cast<const Element*>(x);
  }
  // Returns memory for the results.
  template <class Element = void>
  Element* make(const Result& result, int32_t dtype) const {
    return static_cast<Element*>(result.make({rows, layer.outputs}, dtype));
  }

 private:
  void copy(const View& strided) {
    const int64_t bytes = bytes_of(strided.dtype), width = layer.inputs + layer.inputs % 2;
    copied_ = allocate(rows * width * bytes);
    auto* to = static_cast<char*>(copied_.get());
    for (int64_t row = 0; row < rows; row++)
      for (int64_t i = 0; i < layer.inputs; i++)
        std::memcpy(to + (row * width + i) * bytes,
                    strided.as<char>() + (row * strided.strides[0] + i * strided.strides[1]) * bytes,
                    bytes);
    x = to;
    row_stride = width;
  }
  void adapt(int64_t number) {
    require(number < adapters->num_layers, "there are no adapters of such a layer");
    const LowRankLayer& adapted = adapters->layers[number];
    const LowRankBatch& batch = adapted.of_logits ? adapters->logits : adapters->tokens;
    if (rows != batch.num_rows)
      throw std::invalid_argument("adapters are for " + std::to_string(batch.num_rows) +
                                  " rows, but the layer has " + std::to_string(rows));
    struct Inner {  // kernels have their own buffer of floats
      float value;
    };
    auto* const inner =
        reinterpret_cast<float*>(scratch<Inner>(rows * adapted.num_parts * batch.max_rank));
    sums_ = {&batch, adapted.parts, adapted.num_parts, inner};
    if (multiply_down(batch, adapted.parts, adapted.num_parts, x, is_float32, rows, row_stride, layer,
                      inner, threads))
      layer.adapted = &sums_;
  }

  LowRankSums sums_{};
  Memory copied_;
};
