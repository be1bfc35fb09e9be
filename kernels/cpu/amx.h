// Products of tiles of 16 rows x 16 words with a panel, on Intel's matrix unit (AMX).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "words.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define OCTAVO_HAS_AMX 1

// Asks Linux for the matrix unit's registers; returns whether this process may use them.
extern "C" int octavo_allow_amx();

constexpr int kMatrixRows = 32;   // two tiles
constexpr int kMatrixWords = 16;  // per row of a tile
constexpr int kLeastMatrixRows = 8;

// Completes stores before the matrix unit reads memory: the compiler does not know what it reads.
inline void before_tiles() { asm volatile("" ::: "memory"); }

// A thread's use of the matrix unit. Tiles 0 to 3 hold the sums of 2 x 16 rows and 2 x 16 outputs,
// tiles 4 and 5 the rows, tiles 6 and 7 the weights.
class MatrixUnit {
 public:
  ~MatrixUnit() {
    if (rows_) _tile_release();
  }

  // Sets `sums` to the products of `rows` rows, at most kMatrixRows, with a panel of 32 outputs,
  // over kMatrixWords * steps words. Strides are in words. If `ahead` is not null, prefetches as
  // many of its bytes as it reads from the panel.
  template <class T>
  void multiply(const uint32_t* a, int64_t stride, int rows, const uint32_t* panel, int64_t steps,
                const uint32_t* ahead, typename T::Sum (&sums)[kMatrixRows][2]) {
    configure(rows);
    before_tiles();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; step++) {
      const uint32_t* b = panel + step * kStepWords;
      if (ahead)
        for (int line = 0; line < kStepWords; line += 16)
          __builtin_prefetch(ahead + step * kStepWords + line, 0, 2);
      _tile_loadd(6, b, 2 * sizeof(Words));
      _tile_loadd(7, b + kLanes, 2 * sizeof(Words));
      _tile_loadd(4, a + step * kMatrixWords, 4 * stride);
      if constexpr (std::is_same_v<typename T::Sum, Floats>) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
      } else {
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
      }
      if (rows <= 16) continue;
      _tile_loadd(5, a + 16 * stride + step * kMatrixWords, 4 * stride);
      if constexpr (std::is_same_v<typename T::Sum, Floats>) {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      } else {
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
      }
    }
    _tile_stored(0, &sums[0][0], sizeof sums[0]);
    _tile_stored(1, &sums[0][1], sizeof sums[0]);
    if (rows <= 16) return;
    _tile_stored(2, &sums[16][0], sizeof sums[0]);
    _tile_stored(3, &sums[16][1], sizeof sums[0]);
  }

 private:
  static constexpr int kStepWords = kMatrixWords * 2 * kLanes;

  void configure(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    const int upper = std::min(rows, 16), lower = std::max(rows - 16, 1);
    const int counts[8] = {upper, upper, lower, lower, upper, lower, kMatrixWords, kMatrixWords};
    for (int tile = 0; tile < 8; tile++) {
      config.row_bytes[tile] = 64;
      config.rows[tile] = counts[tile];
    }
    before_tiles();
    _tile_loadconfig(&config);
  }

  int rows_ = 0;
};

#else
#define OCTAVO_HAS_AMX 0
#endif
