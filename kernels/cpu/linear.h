// The product of rows of activations and packed weights, blocked for registers and caches.
//
// Weights are in panels of kPanel outputs: for each word of inputs (2 of 16 bits, 4 of 8 bits), the
// panel's outputs are contiguous. A panel is prefetched once, during the work on the one before,
// and stays in the core's cache for all rows.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "vector.h"

// Whether to build the kernels for linear layers and their shims in aoti.cpp: they need vector
// instructions that multiply bfloat16 in pairs and bytes in fours.
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)
#define OCTAVO_HAS_LINEAR 1
#else
#define OCTAVO_HAS_LINEAR 0
#endif

constexpr int kPanelVectors = 2;
constexpr int kPanel = kPanelVectors * kLanes;
constexpr int kTileRows = 12;  // two sums each; with an element and weights, 32 registers
constexpr int kLineWords = 16;

// Calls store(row, panel, sums) with each row's sums of each panel.
//
// T::Sum is a vector of sums; T::multiply_add adds the products of two words' elements to it. The
// next free thread takes the next panel, as other processes may slow some threads.
template <class T, class Store>
class Linear {
 public:
  Linear(const uint32_t* rows, int64_t num_rows, int64_t row_stride, const uint32_t* panels,
         int64_t num_panels, int64_t depth, Store store)
      : rows_(rows), num_rows_(num_rows), row_stride_(row_stride), panels_(panels),
        num_panels_(num_panels), depth_(depth), store_(store) {}

  // Calls prepare(row) for each row before any product.
  template <class Prepare>
  void run(int threads, Prepare prepare) {
    std::atomic<int64_t> free{0};
#pragma omp parallel num_threads(threads)
    {
      if constexpr (!std::is_same_v<Prepare, std::nullptr_t>) {
#pragma omp for  // ends when all rows are prepared
        for (int64_t row = 0; row < num_rows_; row++) prepare(row);
      }
      for (int64_t panel = free++, next; panel < num_panels_; panel = next) {
        next = free++;
        run_panel(panel, std::min(next, num_panels_ - 1));
      }
    }
  }

 private:
  void run_panel(int64_t panel, int64_t next) const {
    const int64_t tiles = (num_rows_ + kTileRows - 1) / kTileRows;
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t row = num_rows_ * tile / tiles;
      const int rows = num_rows_ * (tile + 1) / tiles - row;
      const uint32_t* ahead = panels_ + next * depth_ * kPanel;
      // Prefetch the next panel in the first tile, or half of it in each of the first two.
      if (tiles == 1)
        run_tile<kPanel / kLineWords>(rows, row, panel, ahead);
      else if (tile < 2)
        run_tile<kPanel / kLineWords / 2>(rows, row, panel, ahead + tile * depth_ * kPanel / 2);
      else
        run_tile<0>(rows, row, panel, ahead);
    }
  }

  template <int kLines>
  void run_tile(int rows, int64_t row, int64_t panel, const uint32_t* ahead) const {
    switch (rows) {
      case 1: return multiply<1, kLines>(row, panel, ahead);
      case 2: return multiply<2, kLines>(row, panel, ahead);
      case 3: return multiply<3, kLines>(row, panel, ahead);
      case 4: return multiply<4, kLines>(row, panel, ahead);
      case 5: return multiply<5, kLines>(row, panel, ahead);
      case 6: return multiply<6, kLines>(row, panel, ahead);
      case 7: return multiply<7, kLines>(row, panel, ahead);
      case 8: return multiply<8, kLines>(row, panel, ahead);
      case 9: return multiply<9, kLines>(row, panel, ahead);
      case 10: return multiply<10, kLines>(row, panel, ahead);
      case 11: return multiply<11, kLines>(row, panel, ahead);
      case 12: return multiply<12, kLines>(row, panel, ahead);
    }
  }

  template <int kRows, int kLines>
  void multiply(int64_t row, int64_t panel, const uint32_t* ahead) const {
    const uint32_t* a = rows_ + row * row_stride_;
    const uint32_t* b = panels_ + panel * depth_ * kPanel;
    typename T::Sum sums[kRows][kPanelVectors] = {};
    for (int64_t k = 0; k < depth_; k++) {
#pragma GCC unroll 2
      for (int line = 0; line < kLines; line++)
        __builtin_prefetch(ahead + (k * kLines + line) * kLineWords, 0, 2);
      const Words left = load<Words>(b + k * kPanel);
      const Words right = load<Words>(b + k * kPanel + kLanes);
#pragma GCC unroll 12
      for (int i = 0; i < kRows; i++) {
        const Words element = broadcast(a[i * row_stride_ + k]);
        sums[i][0] = T::multiply_add(sums[i][0], element, left);
        sums[i][1] = T::multiply_add(sums[i][1], element, right);
      }
    }
#pragma GCC unroll 12
    for (int i = 0; i < kRows; i++) store_(row + i, panel, sums[i]);
  }

  const uint32_t* rows_;
  int64_t num_rows_, row_stride_;
  const uint32_t* panels_;
  int64_t num_panels_, depth_;
  Store store_;
};

// A layer; the same as in linear.py.
struct LinearLayer {
  const void* panels;
  const float* bias;  // per output of each panel
  int64_t inputs, outputs;
  // If set, panels have kLanes outputs of a gate and then the kLanes of the up projection; each
  // output is silu(gate) * up.
  int gated;
  float epsilon;
  const uint16_t* norm;      // weights of an RMSNorm of the inputs, or null
  const uint16_t* residual;  // added to outputs that are not gated, or null
  int64_t residual_stride;
};

// Factors of 8-bit weights and activations; the same as in linear.py.
struct Scales {
  const float* factors;   // per input
  const float* outputs;   // per output of each panel
  const float* row_sums;  // per output, the sum of its scaled weights
};
