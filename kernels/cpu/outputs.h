// The results of a linear layer: its bias, gate and residual, and where they go.
#pragma once

#include <cstdint>

#include "activation.h"
#include "linear.h"
#include "prepare_rows.h"

inline int64_t num_panels(const LinearLayer& layer) {
  const int outputs = layer.gated ? kLanes : kPanel;
  return (layer.outputs + outputs - 1) / outputs;
}

// Writes results in bfloat16 or float32.
template <class Element>
struct Outputs {
  Element* first;
  const LinearLayer& layer;

  // Stores a row's products with a panel's weights, without the bias.
  void write(int64_t row, int64_t panel, const Floats* products) const {
    const float* bias = layer.bias + panel * kPanel;
    const Floats left = products[0] + load<Floats>(bias);
    const Floats right = products[1] + load<Floats>(bias + kLanes);
    if (layer.gated) return put(row, panel * kLanes, times_sigmoid(left, left) * right);
    put(row, panel * kPanel, left);
    put(row, panel * kPanel + kLanes, right);
  }

 private:
  void put(int64_t row, int64_t column, Floats values) const {
    if (column >= layer.outputs) return;
    const int64_t left = layer.outputs - column;
    if (layer.residual) {
      const uint16_t* residual = layer.residual + row * layer.residual_stride + column;
      values = rounded(values) + load_first_floats(residual, left);
    }
    Element* to = first + row * layer.outputs + column;
    if constexpr (sizeof(Element) == 2)
      store_first(to, left, BFloat16::narrow(values));
    else
      store_first(to, left, values);
  }
};
