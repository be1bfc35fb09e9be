// Adds products of low rank to rows of a batch, of which each has its own pair of matrices.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "vector.h"

namespace {

constexpr int kTileRows = 16;   // at most; as TILE_ROWS in low_rank.py
constexpr int kTogether = 4;    // rows of a matrix that are read together

// A layer's matrices of one adapter; as make_record in low_rank.py.
struct Record {
  const void* down;  // [rank, inputs]
  const void* up;    // [rank, outputs]
  int64_t rank;
  double scale;
};

// Rows of one adapter; as LowRankBatch.tiles.
struct Tile {
  int32_t adapter, begin, end;
};

template <class Type>
Floats load_some(const typename Type::Stored* from, int64_t count) {
  if (count >= kLanes) return Type::load_floats(from);
  typename Type::Stored few[kLanes] = {};
  std::copy(from, from + count, few);
  return Type::load_floats(few);
}

template <class Type>
void store_some(typename Type::Stored* to, int64_t count, Floats values) {
  if (count >= kLanes) return Type::store_floats(to, values);
  typename Type::Stored few[kLanes];
  Type::store_floats(few, values);
  std::copy(few, few + count, to);
}

// Multiplies a row by `kCount` rows of a matrix that are `width` elements apart.
template <class Type, int kCount>
void multiply_down(const float* x, const typename Type::Stored* matrix, int64_t width,
                   float* products) {
  Floats sums[kCount] = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    const Floats inputs = load<Floats>(x + i);  // padded with zeros
    for (int k = 0; k < kCount; k++)
      sums[k] += inputs * load_some<Type>(matrix + k * width + i, width - i);
  }
  for (int k = 0; k < kCount; k++) products[k] = reduce_add(sums[k]);
}

// Adds `kCount` rows of a matrix, each times a factor.
template <class Type, int kCount>
void multiply_up(const float* factors, const typename Type::Stored* matrix, int64_t width,
                 float* sums) {
  for (int64_t i = 0; i < width; i += kLanes) {
    Floats sum = load<Floats>(sums + i);
    for (int k = 0; k < kCount; k++)
      sum += factors[k] * load_some<Type>(matrix + k * width + i, width - i);
    store(sums + i, sum);
  }
}

struct Rows {
  const void* x;
  void* out;
  const int32_t* rows;
  int64_t x_stride, out_stride, inputs, outputs;
};

template <class Type, class Out>
void add_tile(const Rows& given, const Tile& tile, const Record& record,
              std::vector<float>& memory) {
  using Stored = typename Type::Stored;
  const int count = tile.end - tile.begin;
  const int64_t rank = record.rank;
  const int64_t inputs = (given.inputs + kLanes - 1) / kLanes * kLanes;
  const int64_t outputs = (given.outputs + kLanes - 1) / kLanes * kLanes;
  memory.assign(count * (inputs + outputs + rank), 0.f);
  float *x = memory.data(), *sums = x + count * inputs, *inner = sums + count * outputs;
  for (int row = 0; row < count; row++) {
    const auto* from = static_cast<const Stored*>(given.x) +
                       given.rows[tile.begin + row] * given.x_stride;
    for (int64_t i = 0; i < inputs; i += kLanes)
      store(x + row * inputs + i, load_some<Type>(from + i, given.inputs - i));
  }
  const auto *down = static_cast<const Stored*>(record.down),
             *up = static_cast<const Stored*>(record.up);
  int64_t k = 0;
  for (; k + kTogether <= rank; k += kTogether)
    for (int row = 0; row < count; row++)
      multiply_down<Type, kTogether>(x + row * inputs, down + k * given.inputs, given.inputs,
                                     inner + row * rank + k);
  for (; k < rank; k++)
    for (int row = 0; row < count; row++)
      multiply_down<Type, 1>(x + row * inputs, down + k * given.inputs, given.inputs,
                             inner + row * rank + k);
  for (k = 0; k + kTogether <= rank; k += kTogether)
    for (int row = 0; row < count; row++)
      multiply_up<Type, kTogether>(inner + row * rank + k, up + k * given.outputs, given.outputs,
                                   sums + row * outputs);
  for (; k < rank; k++)
    for (int row = 0; row < count; row++)
      multiply_up<Type, 1>(inner + row * rank + k, up + k * given.outputs, given.outputs,
                           sums + row * outputs);
  const float scale = record.scale;
  for (int row = 0; row < count; row++) {
    auto* to = static_cast<typename Out::Stored*>(given.out) +
               given.rows[tile.begin + row] * given.out_stride;
    for (int64_t i = 0; i < given.outputs; i += kLanes) {
      const int64_t left = given.outputs - i;
      const Floats sum = load_some<Out>(to + i, left) + scale * load<Floats>(sums + row * outputs + i);
      store_some<Out>(to + i, left, sum);
    }
  }
}

template <class Type, class Out>
void add_tiles(const Rows& rows, const Tile* tiles, int64_t num_tiles, const Record* records,
               int threads) {
#pragma omp parallel num_threads(threads) if (num_tiles > 1)
  {
    std::vector<float> memory;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num_tiles; i++) {
      const Record& record = records[tiles[i].adapter];
      if (record.rank) add_tile<Type, Out>(rows, tiles[i], record, memory);
    }
  }
}

}  // namespace

// Adds to each row of `out`, [rows][outputs], of `dtype` or float32 if `wide`, the product of its
// adapter's matrices with the row of `x`, [rows][inputs]. `dtype` as in cache.h.
extern "C" void octavo_add_low_rank(const void* x, int64_t x_stride, int64_t inputs, void* out,
                                    int64_t out_stride, int64_t outputs, int dtype, int wide,
                                    const int32_t* rows, const Tile* tiles, int64_t num_tiles,
                                    const Record* records, int threads) {
  const auto run = dtype == 0   ? add_tiles<Float32, Float32>
                   : dtype == 1 ? (wide ? add_tiles<Float16, Float32> : add_tiles<Float16, Float16>)
                   : wide       ? add_tiles<BFloat16, Float32>
                                : add_tiles<BFloat16, BFloat16>;
  run({x, out, rows, x_stride, out_stride, inputs, outputs}, tiles, num_tiles, records, threads);
}
