// Finishes and stores the results of a linear layer: bias, adapters, gate and residual.
#pragma once

#include <cstdint>

#include "activation.h"
#include "linear.h"
#include "prepare_rows.h"

inline int64_t num_panels(const LinearLayer& layer) {
  const int outputs = layer.gated ? kLanes : kPanel;
  return (layer.outputs + outputs - 1) / outputs;
}

// Adds `factors` times the rows of a panel of `up`, `kVectors` vectors of each row.
template <int kVectors, class Element>
void add_panel(const float* factors, const Element* up, int64_t rank, Floats* sums) {
  Floats odd[kVectors] = {};
  int64_t k = 0;
  for (; k + 2 <= rank; k += 2, up += 2 * kVectors * kLanes)
    for (int j = 0; j < kVectors; j++) {
      sums[j] += factors[k] * load_first_floats(up + j * kLanes, kLanes);
      odd[j] += factors[k + 1] * load_first_floats(up + (kVectors + j) * kLanes, kLanes);
    }
  for (int j = 0; j < kVectors; j++) {
    if (k < rank) odd[j] += factors[k] * load_first_floats(up + j * kLanes, kLanes);
    sums[j] += odd[j];
  }
}

// Adds the product of a row's adapter, whose matrices have the type `Element`, to a panel's
// outputs.
template <class Element>
void add_low_rank(const LowRankSums& adapters, int64_t row, int64_t panel, Floats& left,
                         Floats& right) {
  const LowRankBatch& batch = *adapters.batch;
  const int32_t adapter = batch.adapters[row];
  if (adapter < 0) return;
  Floats sums[kPanelVectors] = {left, right};
  for (int64_t i = 0; i < adapters.num_parts; i++) {
    const LowRankPart& part = adapters.parts[i];
    const int64_t at = panel - part.panel;
    if (at < 0 || at >= part.panels) continue;
    const LowRankRecord& record = batch.records[part.layer * batch.num_adapters + adapter];
    const float* factors = adapters.inner + (row * adapters.num_parts + i) * batch.max_rank;
    const auto* up = static_cast<const Element*>(record.up) + at * record.rank * part.lanes;
    if (part.lanes == kPanel)
      add_panel<kPanelVectors>(factors, up, record.rank, sums);
    else
      add_panel<1>(factors, up, record.rank, sums + part.lane / kLanes);
  }
  left = sums[0];
  right = sums[1];
}

// Writes the results of rows of type `Row`, in that type or in float32.
template <class Row, class Element = Row>
struct Outputs {
  Element* first;
  const LinearLayer& layer;

  // Stores a row's products with a panel's weights, without the bias.
  __attribute__((always_inline)) void write(int64_t row, int64_t panel,
                                            const Floats* products) const {
    const float* bias = layer.bias + panel * kPanel;
    Floats left = products[0] + load<Floats>(bias);
    Floats right = products[1] + load<Floats>(bias + kLanes);
    if (layer.adapted) add_low_rank<Row>(*layer.adapted, row, panel, left, right);
    if (layer.gated) return put(row, panel * kLanes, times_sigmoid(left, left) * right);
    put(row, panel * kPanel, left);
    put(row, panel * kPanel + kLanes, right);
  }

 private:
  void put(int64_t row, int64_t column, Floats values) const {
    if (column >= layer.outputs) return;
    const int64_t left = layer.outputs - column;
    if (layer.residual) {
      const Row* residual = static_cast<const Row*>(layer.residual) + row * layer.residual_stride;
      values = rounded<Element>(values) + load_first_floats(residual + column, left);
    }
    store_first_floats(first + row * layer.outputs + column, left, values);
  }
};
