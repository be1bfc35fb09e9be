// The product of rows of words with words in a cache, blocked for registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "fetcher.h"
#include "vector.h"

constexpr int kMicroRows = 6;  // the register block
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kMicroColumns = 4;  // vectors; 32 registers
#else
constexpr int kMicroColumns = 2;  // vectors; 16 registers
#endif

// Loads rows of elements of T as a matrix.
template <class T>
struct Elements {
  using Stored = typename T::Stored;
  static constexpr int kPack = T::kPack, kLane = kPack, kWords = 1;

  Words load(const Stored* from) const { return T::load_words(from); }
  Words word(Words loaded, int) const { return loaded; }
};

// c = rescale * c + unit * a * b, for `rows` rows and `columns` vectors of columns.
//
// a has `depth` words per row. b.load(k, j) loads vector j of row k of b, and of the kWords - 1 rows
// after it; b.word(loaded, i) is that of row k + i. rescale has one factor per row; if it is null, c
// counts as zero. So has unit, for sums of integers; if it is null, it counts as one. The fetcher takes
// a step for each row of b.
template <class T, class Matrix>
class Product {
 public:
  Product(int depth, const uint32_t* a, int a_stride, Matrix b, float* c, int c_stride,
          const float* rescale, const Fetcher& fetcher, const float* unit = nullptr)
      : depth_(depth), a_stride_(a_stride), c_stride_(c_stride), a_(a), b_(b), c_(c),
        rescale_(rescale), unit_(unit), fetcher_(fetcher) {}

  void run(int rows, int columns) const {
    int i = 0;
    for (; i + kMicroRows <= rows; i += kMicroRows) run_rows<kMicroRows>(i, columns);
    switch (rows - i) {
      case 5: return run_rows<5>(i, columns);
      case 4: return run_rows<4>(i, columns);
      case 3: return run_rows<3>(i, columns);
      case 2: return run_rows<2>(i, columns);
      case 1: return run_rows<1>(i, columns);
    }
  }

 private:
  template <int kRows>
  void run_rows(int row, int columns) const {
    int column = 0;
    for (; column + kMicroColumns <= columns; column += kMicroColumns)
      if (row == 0 && column == 0)
        run_block<kRows, kMicroColumns, true>(row, column);
      else
        run_block<kRows, kMicroColumns, false>(row, column);
    for (; column < columns; column++) run_block<kRows, 1, false>(row, column);
  }

  template <int kRows, int kColumns, bool kFetches>
  void run_block(int row, int column) const {
    const uint32_t* a = a_ + row * a_stride_;
    float* c = c_ + row * c_stride_ + column * kLanes;
    Fetcher fetcher = fetcher_;  // by value, to stay in registers
    typename T::Sum sum[kRows][kColumns] = {};
    if constexpr (!kOfIntegers)
      if (rescale_)
#pragma GCC unroll 8
        for (int i = 0; i < kRows; i++)
#pragma GCC unroll 8
          for (int j = 0; j < kColumns; j++)
            sum[i][j] = load<Floats>(c + i * c_stride_ + j * kLanes) * rescale_[row + i];
    for (int k = 0; k < depth_; k += Matrix::kWords) {
      Words loaded[kColumns];
#pragma GCC unroll 8
      for (int j = 0; j < kColumns; j++) loaded[j] = b_.load(k, column + j);
#pragma GCC unroll 4
      for (int word = 0; word < Matrix::kWords; word++) {
        if constexpr (kFetches) fetcher.step();
        Words vector[kColumns];
#pragma GCC unroll 8
        for (int j = 0; j < kColumns; j++) vector[j] = b_.word(loaded[j], word);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; i++) {
          Words element = broadcast(a[i * a_stride_ + k + word]);
#pragma GCC unroll 8
          for (int j = 0; j < kColumns; j++)
            sum[i][j] = T::multiply_add(sum[i][j], element, vector[j]);
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; i++)
#pragma GCC unroll 8
      for (int j = 0; j < kColumns; j++) put(c + i * c_stride_ + j * kLanes, sum[i][j], row + i);
  }

  __attribute__((always_inline)) void put(float* c, Floats sum, int) const { store(c, sum); }
  __attribute__((always_inline)) void put(float* c, Ints sum, int row) const {
    const Floats x = __builtin_convertvector(sum, Floats);
    store(c, unit_ ? load<Floats>(c) * rescale_[row] + x * unit_[row] : x);
  }

  static constexpr bool kOfIntegers = std::is_same_v<typename T::Sum, Ints>;
  int depth_, a_stride_, c_stride_;
  const uint32_t* a_;
  Matrix b_;
  float* c_;
  const float *rescale_, *unit_;
  const Fetcher fetcher_;
};
