// Low-rank products for the rows of a batch; each row may have its own pair of matrices.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "linear_call.h"

namespace {

constexpr int kTogether = 4;  // matrix rows that are read together
constexpr int64_t kShare = 16;  // matrix rows that a thread takes at a time

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

struct RowPointers {
  const void* x;
  void* out;
  const int32_t* rows;
  int64_t x_stride, out_stride, inputs, outputs;
};

template <class Type, class Out>
void add_tile(const RowPointers& call, const LowRankTile& tile, const LowRankRecord& record,
              std::vector<float>& memory) {
  using Stored = typename Type::Stored;
  const int count = tile.end - tile.begin;
  const int64_t rank = record.rank;
  const int64_t inputs = (call.inputs + kLanes - 1) / kLanes * kLanes;
  const int64_t outputs = (call.outputs + kLanes - 1) / kLanes * kLanes;
  memory.assign(count * (inputs + outputs + rank), 0.f);
  float *x = memory.data(), *sums = x + count * inputs, *inner = sums + count * outputs;
  for (int row = 0; row < count; row++) {
    const auto* from = static_cast<const Stored*>(call.x) +
                       call.rows[tile.begin + row] * call.x_stride;
    for (int64_t i = 0; i < inputs; i += kLanes)
      store(x + row * inputs + i, load_some<Type>(from + i, call.inputs - i));
  }
  const auto *down = static_cast<const Stored*>(record.down),
             *up = static_cast<const Stored*>(record.up);
  int64_t k = 0;
  for (; k + kTogether <= rank; k += kTogether)
    for (int row = 0; row < count; row++)
      multiply_down<Type, kTogether>(x + row * inputs, down + k * call.inputs, call.inputs,
                                     inner + row * rank + k);
  for (; k < rank; k++)
    for (int row = 0; row < count; row++)
      multiply_down<Type, 1>(x + row * inputs, down + k * call.inputs, call.inputs,
                             inner + row * rank + k);
  for (k = 0; k + kTogether <= rank; k += kTogether)
    for (int row = 0; row < count; row++)
      multiply_up<Type, kTogether>(inner + row * rank + k, up + k * call.outputs, call.outputs,
                                   sums + row * outputs);
  for (; k < rank; k++)
    for (int row = 0; row < count; row++)
      multiply_up<Type, 1>(inner + row * rank + k, up + k * call.outputs, call.outputs,
                           sums + row * outputs);
  const float scale = record.scale;
  for (int row = 0; row < count; row++) {
    auto* to = static_cast<typename Out::Stored*>(call.out) +
               call.rows[tile.begin + row] * call.out_stride;
    for (int64_t i = 0; i < call.outputs; i += kLanes) {
      const int64_t left = call.outputs - i;
      const Floats sum = load_some<Out>(to + i, left) + scale * load<Floats>(sums + row * outputs + i);
      store_some<Out>(to + i, left, sum);
    }
  }
}

template <class Type, class Out>
void add_tiles(const RowPointers& rows, const LowRankTile* tiles, int64_t num_tiles,
               const LowRankRecord* records,
               int threads) {
#pragma omp parallel num_threads(threads) if (num_tiles > 1)
  {
    std::vector<float> memory;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num_tiles; i++) {
      const LowRankRecord& record = records[tiles[i].adapter];
      if (record.rank) add_tile<Type, Out>(rows, tiles[i], record, memory);
    }
  }
}

// A packed layer's rows, bfloat16 or float32, prepared for the products.
template <class Element>
struct PackedRows {
  const Element* x;
  int64_t stride, inputs;
};

// Sets `inner`, [kCount] for each row of a tile and `stride` apart, to the rows' products with
// `kCount` rows of `down` times the scale.
template <int kCount, class Element>
void multiply_share(const PackedRows<Element>& packed, const LowRankBatch& batch,
                    const LowRankTile& tile,
                    const LowRankRecord& record, int64_t k, float* inner, int64_t stride) {
  const Element* down = static_cast<const Element*>(record.down) + k * packed.inputs;
  const Floats scale = broadcast(static_cast<float>(record.scale));
  for (int32_t place = tile.begin; place < tile.end; place++) {
    const int64_t row = batch.rows[place];
    const Element* x = packed.x + row * packed.stride;
    Floats sums[kCount] = {};
    for (int64_t i = 0; i < packed.inputs; i += kLanes) {
      const int64_t left = packed.inputs - i;
      const Floats values = load_first_floats(x + i, left);
      for (int j = 0; j < kCount; j++)
        sums[j] += values * load_first_floats(down + j * packed.inputs + i, left);
    }
    for (int j = 0; j < kCount; j++)
      inner[row * stride + k + j] = reduce_add(sums[j]) * scale[0];
  }
}

// Returns whether an adapter of the batch adapts a part of the layer.
bool is_adapted(const LowRankBatch& batch, const LowRankPart* parts, int64_t num_parts) {
  for (int64_t i = 0; i < num_parts; i++)
    for (int64_t adapter = 0; adapter < batch.num_adapters; adapter++)
      if (batch.records[parts[i].layer * batch.num_adapters + adapter].rank) return true;
  return false;
}

// Multiplies the rows of a batch; see multiply_down.
template <class Element>
void multiply_rows_down(const LowRankBatch& batch, const LowRankPart* parts, int64_t num_parts,
                        const Element* x, int64_t rows, int64_t row_stride,
                        const LinearLayer& layer, float* inner, int threads) {
  struct Normed {
    Element value;
  };
  auto* const normed =
      layer.norm ? reinterpret_cast<Element*>(scratch<Normed>(rows * layer.inputs)) : nullptr;
  const PackedRows<Element> packed{normed ? normed : x, normed ? layer.inputs : row_stride,
                                  layer.inputs};
  const int64_t shares = (batch.max_rank + kShare - 1) / kShare;
  const int64_t tasks = batch.num_tiles * num_parts * shares;
#pragma omp parallel num_threads(threads) if (tasks > 1)
  {
    if (normed) {
#pragma omp for
      for (int64_t row = 0; row < rows; row++)
        if (batch.adapters[row] >= 0)
          norm_row(x + row * row_stride, layer, normed + row * layer.inputs);
    }
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; task++) {
      const LowRankTile& tile = batch.tiles[task / shares / num_parts];
      const int64_t part = task / shares % num_parts;
      const LowRankRecord& record =
          batch.records[parts[part].layer * batch.num_adapters + tile.adapter];
      float* const products = inner + part * batch.max_rank;
      const int64_t stride = num_parts * batch.max_rank;
      int64_t k = task % shares * kShare;
      const int64_t end = std::min(record.rank, k + kShare);
      for (; k + kTogether <= end; k += kTogether)
        multiply_share<kTogether>(packed, batch, tile, record, k, products, stride);
      for (; k < end; k++) multiply_share<1>(packed, batch, tile, record, k, products, stride);
    }
  }
}

}  // namespace

bool multiply_down(const LowRankBatch& batch, const LowRankPart* parts, int64_t num_parts,
                   const void* x, bool wide, int64_t rows, int64_t row_stride,
                   const LinearLayer& layer, float* inner, int threads) {
  if (!is_adapted(batch, parts, num_parts)) return false;
  const auto run = [&](const auto* elements) {
    multiply_rows_down(batch, parts, num_parts, elements, rows, row_stride, layer, inner, threads);
  };
  if (wide)
    run(static_cast<const float*>(x));
  else
    run(static_cast<const uint16_t*>(x));
  return true;
}

namespace {

// Adds to each row of `out`, [rows][outputs], of the dtype of x or float32, the product of its
// adapter's matrices with the row of `x`, [rows][inputs].
void add_products(const View& out, const View& x, const LowRankRecord* records, const int32_t* rows,
                  const LowRankTile* tiles, int64_t num_tiles) {
  const bool wide = out.dtype != x.dtype;
  const int dtype = dtype_number(x.dtype);
  const auto run = dtype == 0   ? add_tiles<Float32, Float32>
                   : dtype == 1 ? (wide ? add_tiles<Float16, Float32> : add_tiles<Float16, Float16>)
                   : wide       ? add_tiles<BFloat16, Float32>
                                : add_tiles<BFloat16, BFloat16>;
  run({x.data, out.data, rows, x.strides[0], out.strides[0], x.sizes[1], out.sizes[1]}, tiles,
      num_tiles, records, num_threads());
}

// See octavo.kernels.ops.add_low_rank; `records` are those of one layer.
void add_low_rank(const View& out, const View& x, const View& records, const View& rows,
                  const View& tiles) {
  add_products(out, x, records.as<LowRankRecord>(), rows.as<int32_t>(), tiles.as<LowRankTile>(),
               tiles.sizes[0]);
}
OCTAVO_OPERATOR(add_low_rank)

// Returns `out` with the products of the current step's adapters, of the model's layer `target`.
void add_adapters(const Result& result, const View& out, const View& x, int64_t target,
                  int64_t of_logits) {
  const Stopwatch stopwatch(spent.linear);
  const int64_t count = out.sizes[0], width = out.sizes[1], bytes = bytes_of(out.dtype);
  require(out.has_whole_rows() && x.has_whole_rows(), "rows must be contiguous");
  View sum = out;
  sum.data = result.make({count, width}, out.dtype);
  sum.strides[0] = width;
  for (int64_t row = 0; row < count; row++)
    std::memcpy(sum.as<char>() + row * width * bytes,
                out.as<char>() + row * out.strides[0] * bytes, width * bytes);
  if (!adapters) return;
  const LowRankBatch& batch = of_logits ? adapters->logits : adapters->tokens;
  require(batch.num_rows == count && x.sizes[0] == count, "adapters are for other rows");
  add_products(sum, x, batch.records + target * batch.num_adapters, batch.rows, batch.tiles,
               batch.num_tiles);
}
OCTAVO_OPERATOR(add_adapters)

}  // namespace
