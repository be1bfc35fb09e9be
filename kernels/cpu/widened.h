// Products with weights of few bits for many rows: each panel is dequantized once, for all rows.
#pragma once

#include <atomic>
#include <cstdint>

#include "linear.h"
#include "outputs.h"
#include "prepare_rows.h"

// Sets y = rows * weights + bias. `widen(panel, words)` dequantizes a panel to `depth` words of kind T
// for each output.
template <class T, class Element, class Widen>
void multiply_widened(const Rows& rows, int64_t depth, const LinearLayer& layer, Element* y,
                      int threads, Widen widen) {
  struct alignas(64) Line {
    uint32_t words[kLineWords];
  };
  const int64_t panels = num_panels(layer);
  const Outputs<Element> out{y, layer};
  std::atomic<int64_t> free{0};
#pragma omp parallel num_threads(threads)
  {
    uint32_t* const widened = scratch<Line>((depth * kPanel + kLineWords - 1) / kLineWords)->words;
    PanelProducts<T> products;
    for (int64_t panel = free++; panel < panels; panel = free++) {
      widen(panel, widened);
      products.run(rows, widened, depth, widened,
                   [&](int64_t row, const Floats* sums) { out.write(row, panel, sums); });
    }
  }
}
