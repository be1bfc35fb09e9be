// The product of rows of activations with packed weights, blocked for registers and caches.
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

#include "amx.h"
#include "low_rank.h"
#include "streams.h"
#include "words.h"

constexpr int kPanelVectors = 2;
constexpr int kPanel = kPanelVectors * kLanes;
#if defined(__x86_64__) && !defined(__AVX512F__)
constexpr int kTileRows = 6;  // two sums each; with the operands, 16 registers
#else
constexpr int kTileRows = 12;  // with 32 registers
#endif
constexpr int kLineWords = 16;
constexpr int kGroupInputs = 32;  // share a scale in 4 bits, as in linear.py

// Rows of words, packed for the products: T::kParts parts of each word; part i of all words begins
// at i * depth.
struct Rows {
  const uint32_t* words;
  int64_t count, stride;
};

// Rows for weights with scales per group of inputs: the inputs' words, rounded per group or
// unchanged, and each group's sum and step size.
struct GroupedRows {
  const uint32_t* words;
  int64_t stride;
  const float* sums;
  const float* steps;
  int64_t groups;
};

template <class T>
using Sums = typename T::Sum (*)[kPanelVectors];

// Sets `sums` to the products of kRows rows and a panel of `depth` words of each output. Prefetches
// kAhead lines of `ahead` for each word. T is a type of words; see words.h.
template <class T, int kRows, int kAhead>
__attribute__((noinline)) void multiply_tile(const uint32_t* a, int64_t stride, const uint32_t* b,
                                             int64_t depth, const uint32_t* ahead, Sums<T> sums) {
  typename T::Sum totals[kRows][kPanelVectors] = {};
  for (int64_t k = 0; k < depth; k++) {
#pragma GCC unroll 2
    for (int line = 0; line < kAhead; line++)
      __builtin_prefetch(ahead + (k * kAhead + line) * std::min(kLineWords, kPanel), 0, 2);
    const Words left = load<Words>(b + k * kPanel);
    const Words right = load<Words>(b + k * kPanel + kLanes);
#pragma GCC unroll 2
    for (int part = 0; part < T::kParts; part++) {
      const Words lefts = T::weight_part(left, part), rights = T::weight_part(right, part);
#pragma GCC unroll 12
      for (int i = 0; i < kRows; i++) {
        const Words element = broadcast(a[i * stride + part * depth + k]);
        totals[i][0] = T::multiply_add(totals[i][0], element, lefts);
        totals[i][1] = T::multiply_add(totals[i][1], element, rights);
      }
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kPanelVectors; j++) sums[i][j] = totals[i][j];
}

// The same for `rows` rows, at most kRows.
template <class T, int kAhead, int kRows = kTileRows>
void multiply_rows(int rows, const uint32_t* a, int64_t stride, const uint32_t* b, int64_t depth,
                   const uint32_t* ahead, Sums<T> sums) {
  if (rows == kRows) return multiply_tile<T, kRows, kAhead>(a, stride, b, depth, ahead, sums);
  if constexpr (kRows > 1)
    multiply_rows<T, kAhead, kRows - 1>(rows, a, stride, b, depth, ahead, sums);
}

// A thread's products of rows and panels, in registers or on the matrix unit.
template <class T>
class PanelProducts {
 public:
  // Calls store(row, sums) with each row's sums of a panel of `depth` words of each output.
  // Prefetches as many bytes of `ahead` as it reads from the panel.
  template <class Store>
  void run(const Rows& rows, const uint32_t* panel, int64_t depth, const uint32_t* ahead,
           Store store) {
#if OCTAVO_HAS_AMX
    if constexpr (T::kOnMatrixUnit)
      if (rows.count >= kLeastRows && octavo_allow_amx())
        return run_in_tiles(rows, panel, depth, ahead, store);
#endif
    const int64_t tiles = (rows.count + kTileRows - 1) / kTileRows;
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t row = rows.count * tile / tiles;
      const int count = rows.count * (tile + 1) / tiles - row;
      const uint32_t* a = rows.words + row * rows.stride;
      typename T::Sum sums[kTileRows][kPanelVectors];
      // Prefetch the next panel in the first tile, or half of it in each of the first two.
      if (tiles > 1 && tile < 2 && kLines > 1)
        multiply_rows<T, kLines / 2>(count, a, rows.stride, panel, depth,
                                     ahead + tile * depth * kPanel / 2, sums);
      else if (tile == 0)
        multiply_rows<T, kLines>(count, a, rows.stride, panel, depth, ahead, sums);
      else
        multiply_rows<T, 0>(count, a, rows.stride, panel, depth, ahead, sums);
      for (int i = 0; i < count; i++) store(row + i, sums[i]);
    }
  }

  // Does the same as `run` for a single row; prefetches the memory that follows.
  template <class Store>
  void stream(const Rows& rows, const uint32_t* panel, int64_t depth, Store store) {
#if OCTAVO_HAS_AMX
    if constexpr (T::kOnMatrixUnit && kLeastRows == 1)
      if (octavo_allow_amx()) return stream_in_tiles_order(rows.words, panel, depth, store);
#endif
    typename T::Sum sums[1][kPanelVectors];
    multiply_tile<T, 1, kLines>(rows.words, rows.stride, panel, depth,
                                panel + kStreamBytes / sizeof *panel, sums);
    store(0, sums[0]);
  }

 private:
  static constexpr int kLines = kPanel > kLineWords ? kPanel / kLineWords : 1;

#if OCTAVO_HAS_AMX
  // The matrix unit adds products of bfloat16 in another order than vectors do (Intel's Software
  // Developer's Manual, TDPBF16PS), so it multiplies all numbers of rows: a row's result must not
  // depend on the others. Sums of bytes are exact; vectors are faster for a few rows.
  static constexpr int kLeastRows =
      std::is_same_v<typename T::Sum, Floats> ? 1 : kLeastMatrixRows;

  template <class Store>
  void run_in_tiles(const Rows& rows, const uint32_t* panel, int64_t depth, const uint32_t* ahead,
                    Store store) {
    const int64_t tiles = (rows.count + kMatrixRows - 1) / kMatrixRows;
    const int64_t steps = depth / kMatrixWords;
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t row = rows.count * tile / tiles;
      const int count = rows.count * (tile + 1) / tiles - row;
      const uint32_t* a = rows.words + row * rows.stride;
      typename T::Sum sums[kMatrixRows][kPanelVectors];
      unit_.template multiply<T>(a, rows.stride, count, panel, steps, tile == 0 ? ahead : nullptr,
                                 sums);
      for (int i = 0; i < count; i++) {
        add_rest(a + i * rows.stride, panel, depth, sums[i]);
        store(row + i, sums[i]);
      }
    }
  }

  // Does the same as `run_in_tiles` for a single row, with vectors: memory is then read 10% faster.
  template <class Store>
  void stream_in_tiles_order(const uint32_t* a, const uint32_t* panel, int64_t depth,
                             Store store) {
    constexpr uint32_t kUpper = 0xffff0000;
    Floats sums[kPanelVectors] = {};
    for (int64_t first = 0; first + kMatrixWords <= depth; first += kMatrixWords) {
      Floats lower[kPanelVectors] = {}, upper[kPanelVectors] = {};  // apart, as the unit has them
#pragma GCC unroll 16
      for (int64_t k = first; k < first + kMatrixWords; k++) {
        const uint32_t* b = panel + k * kPanel;
        for (int line = 0; line < kPanel; line += kLineWords)
          __builtin_prefetch(b + kStreamBytes / sizeof *b + line, 0, kSecondCache);
        const Words element = broadcast(a[k]);
#pragma GCC unroll 2
        for (int j = 0; j < kPanelVectors; j++) {
          const Words weights = load<Words>(b + j * kLanes);
          lower[j] = Float32::multiply_add(lower[j], element << 16, weights << 16);
          upper[j] = Float32::multiply_add(upper[j], element & kUpper, weights & kUpper);
        }
      }
      for (int j = 0; j < kPanelVectors; j++) sums[j] += lower[j] + upper[j];
    }
    add_rest(a, panel, depth, sums);
    store(0, sums);
  }

  // Adds the products of a row's words after its last whole tile.
  static void add_rest(const uint32_t* a, const uint32_t* panel, int64_t depth,
                       typename T::Sum (&sums)[kPanelVectors]) {
    for (int64_t k = depth / kMatrixWords * kMatrixWords; k < depth; k++)
      for (int j = 0; j < kPanelVectors; j++)
        sums[j] = T::multiply_add(sums[j], broadcast(a[k]),
                                  load<Words>(panel + k * kPanel + j * kLanes));
  }

  MatrixUnit unit_;
#endif
};

// Calls store(row, panel, sums) with each row's sums of each panel.
//
// The next free thread takes the next panel, as other processes may slow some threads. A single row
// of bfloat16 streams panels: a step of Qwen3-0.6B took 7 to 30% less time with it on a Zen 4. A
// row of bytes did not always gain. All panels take one block of rows, which stays in the second
// cache, before the next block.
template <class T, class Store>
class Linear {
 public:
  // A panel has `depth` words of each output.
  Linear(const Rows& rows, const uint32_t* panels, int64_t num_panels, int64_t depth, Store store)
      : rows_(rows), panels_(panels), num_panels_(num_panels), depth_(depth), store_(store) {
    const int64_t row_bytes = std::max<int64_t>(depth * T::kParts * sizeof(uint32_t), 1);
    const int64_t most = std::max<int64_t>(kBlockBytes / row_bytes, kLeastBlockRows);
    blocks_ = std::max<int64_t>((rows.count + most - 1) / most, 1);
  }

  // Calls prepare(row) for each row before any product.
  template <class Prepare>
  void run(int threads, Prepare prepare) {
    const bool single = std::is_same_v<typename T::Sum, Floats> && rows_.count == 1;
    Streams streams(num_panels_, threads);
    std::atomic<int64_t> free{0};
#pragma omp parallel num_threads(threads)
    {
      PanelProducts<T> products;
      if constexpr (!std::is_same_v<Prepare, std::nullptr_t>) {
#pragma omp for  // a barrier: all rows are prepared
        for (int64_t row = 0; row < rows_.count; row++) prepare(row);
      }
      if (single)
        streams.run(omp_get_thread_num(), [&](int64_t panel) {
          products.stream(rows_, at(panel), depth_, store_of(0, panel));
        });
      else
        take_panels(products, free);
    }
  }

 private:
  static constexpr int64_t kBlockBytes = 512 << 10, kLeastBlockRows = 64;

  void take_panels(PanelProducts<T>& products, std::atomic<int64_t>& free) const {
    const int64_t all = blocks_ * num_panels_;
    for (int64_t item = free++, next; item < all; item = next) {
      next = free++;
      const int64_t block = item / num_panels_, panel = item % num_panels_;
      const int64_t row = rows_.count * block / blocks_;
      const Rows rows{rows_.words + row * rows_.stride,
                      rows_.count * (block + 1) / blocks_ - row, rows_.stride};
      products.run(rows, at(panel), depth_, at(std::min(next, all - 1) % num_panels_),
                   store_of(row, panel));
    }
  }
  auto store_of(int64_t first, int64_t panel) const {
    return [this, first, panel](int64_t row, const auto* sums) {
      store_(first + row, panel, sums);
    };
  }
  const uint32_t* at(int64_t panel) const { return panels_ + panel * depth_ * kPanel; }

  const Rows rows_;
  const uint32_t* panels_;
  int64_t num_panels_, depth_, blocks_;
  Store store_;
};

// Splits each word of a row into T::kParts words.
template <class T>
void take_apart(const void* row, int64_t depth, uint32_t* parts) {
  for (int part = 0; part < T::kParts; part++)
    for (int64_t k = 0; k < depth; k += kLanes) {
      const Words words = load_first<Words>(static_cast<const uint32_t*>(row) + k, depth - k);
      store_first(parts + part * depth + k, depth - k, T::row_part(words, part));
    }
}

// A layer. The norm and the residual are of the rows' type.
struct LinearLayer {
  const void* panels;
  const float* bias;  // per output of each panel
  int64_t inputs, outputs;
  // If set, panels have kLanes outputs of the gate, then kLanes of the up projection; each output
  // is silu(gate) * up.
  int gated;
  float epsilon;
  const void* norm;      // weights of an RMSNorm of the inputs, or null
  const void* residual;  // added to outputs that are not gated, or null
  int64_t residual_stride;
  const LowRankSums* adapted;  // added to the products first, or null
};
