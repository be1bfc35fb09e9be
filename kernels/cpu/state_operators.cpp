// The operators that update states; see operators.cpp.
//
// The steps, rates and gates of recurrences must be contiguous float32, as the graph makes them.

#include "operators.h"
#include "state_calls.h"

namespace {

// The states of the current step's sequences.
StateRows rows_of(const StateCache& cache) {
  const Batch& batch = step.batches[cache.group];
  return {cache.state,      cache.block_stride,   cache.row_size,    batch.block_tables,
          batch.table_stride, batch.query_starts, batch.seq_lens,    cache.num_blocks,
          cache.rows_per_block, cache.first_row,  batch.num_seqs};
}

// The number of a dtype in states.py, or -1 of another.
int dtype_number(int32_t dtype) {
  if (dtype == aoti_torch_dtype_float32()) return 0;
  if (dtype == aoti_torch_dtype_float16()) return 1;
  return dtype == aoti_torch_dtype_bfloat16() ? 2 : -1;
}

// A tensor whose dimensions after the first are contiguous.
class Tokens : public View {
 public:
  Tokens(Tensor tensor, int dimensions) : View(tensor) {
    int64_t stride = 1;
    for (int i = dimensions - 1; i > 0; i--) {
      fits_ &= strides[i] == stride || sizes[i] == 1;
      stride *= sizes[i];
    }
    contiguous_ = fits_ && (strides[0] == stride || sizes[0] == 1);
  }
  bool fits() const { return fits_; }
  bool contiguous() const { return contiguous_; }

 private:
  bool fits_ = true, contiguous_;
};

// An optional contiguous tensor of one dtype. `ok` becomes false if it is neither.
template <class T = float>
const T* read(Tensor* tensor, int dimensions, int32_t dtype, bool& ok) {
  if (!tensor) return nullptr;
  const Tokens view(*tensor, dimensions);
  ok &= view.contiguous() && view.dtype == dtype;
  return view.as<const T>();
}

const float* read_floats(Tensor* tensor, int dimensions, bool& ok) {
  return read(tensor, dimensions, aoti_torch_dtype_float32(), ok);
}

}  // namespace

// octavo::causal_conv
Error causal_conv(Tensor* result, Tensor x, Tensor weight, Tensor* bias, int64_t state,
                  bool silu) {
  const Stopwatch stopwatch(spent.states);
  const StateCache& cache = step.states[state];
  const Tokens inputs(x, 2), weights(weight, 2);
  bool ok = inputs.fits() && weights.contiguous();
  const void* biases = read<void>(bias, 1, weights.dtype, ok);
  if (!ok) return kFailed;
  const int channels = inputs.sizes[1];
  void* out = make({inputs.sizes[0], channels}, inputs.dtype, result);
  if (!out) return kFailed;
  const CausalConv call{rows_of(cache), inputs.data, inputs.strides[0], weights.data, biases, out,
                        channels, cache.row_shape[0], int(weights.sizes[1]),
                        dtype_number(inputs.dtype), dtype_number(weights.dtype), silu};
  return octavo_causal_conv(&call, step.threads) ? kFailed : 0;
}

// octavo::ssd
Error ssd(Tensor* result, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, int64_t state,
          Tensor* d, Tensor* dt_bias, bool softplus, double least_dt, double most_dt) {
  const Stopwatch stopwatch(spent.states);
  const Tokens inputs(x, 3), keys(b, 3), queries(c, 3);
  bool ok = inputs.fits() && keys.fits() && queries.fits();
  const float* steps = read_floats(&dt, 2, ok);
  const float* rates = read_floats(&a, 1, ok);
  const float* skips = read_floats(d, 1, ok);
  const float* biases = read_floats(dt_bias, 1, ok);
  if (!ok) return kFailed;
  const int heads = inputs.sizes[1], head_dim = inputs.sizes[2];
  void* out = make({inputs.sizes[0], heads, head_dim}, inputs.dtype, result);
  if (!out) return kFailed;
  const Ssd call{rows_of(step.states[state]), inputs.data, keys.data, queries.data,
                 inputs.strides[0], keys.strides[0], queries.strides[0], steps, rates, skips,
                 biases, out, heads, head_dim, int(keys.sizes[1]), int(keys.sizes[2]),
                 dtype_number(inputs.dtype), softplus, float(least_dt), float(most_dt)};
  return octavo_ssd(&call, step.threads) ? kFailed : 0;
}

// octavo::gated_delta
Error gated_delta(Tensor* result, Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta,
                  int64_t state, double scale, bool normalize) {
  const Stopwatch stopwatch(spent.states);
  const Tokens q(query, 3), k(key, 3), v(value, 3);
  int64_t dimensions = 0;
  if (aoti_torch_get_dim(g, &dimensions)) return kFailed;
  bool ok = q.fits() && k.fits() && v.fits();
  const float* decays = read_floats(&g, dimensions, ok);
  const float* betas = read_floats(&beta, 2, ok);
  if (!ok) return kFailed;
  const int heads = v.sizes[1], value_dim = v.sizes[2];
  void* out = make({v.sizes[0], heads, value_dim}, v.dtype, result);
  if (!out) return kFailed;
  const GatedDelta call{rows_of(step.states[state]), q.data, k.data, v.data, q.strides[0],
                        k.strides[0], v.strides[0], decays, betas, out, int(k.sizes[1]), heads,
                        int(k.sizes[2]), value_dim, dtype_number(v.dtype), dimensions == 3,
                        normalize, float(scale)};
  return octavo_gated_delta(&call, step.threads) ? kFailed : 0;
}

// octavo::selective_scan
Error selective_scan(Tensor* result, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c,
                     int64_t state, Tensor* d, Tensor* dt_bias, bool softplus) {
  const Stopwatch stopwatch(spent.states);
  const StateCache& cache = step.states[state];
  const Tokens inputs(x, 2), keys(b, 2), queries(c, 2), steps(dt, 2);
  bool ok = inputs.fits() && keys.fits() && queries.fits() && steps.fits();
  const float* rates = read_floats(&a, 2, ok);
  const float* skips = read_floats(d, 1, ok);
  const float* biases = read_floats(dt_bias, 1, ok);
  if (!ok) return kFailed;
  const int channels = inputs.sizes[1];
  void* out = make({inputs.sizes[0], channels}, inputs.dtype, result);
  if (!out) return kFailed;
  const SelectiveScan call{rows_of(cache), inputs.data, keys.data, queries.data,
                           inputs.strides[0], keys.strides[0], queries.strides[0], steps.data,
                           steps.strides[0], rates, skips, biases, out, channels,
                           cache.row_shape[0], cache.row_shape[1], dtype_number(inputs.dtype),
                           dtype_number(steps.dtype), softplus};
  return octavo_selective_scan(&call, step.threads) ? kFailed : 0;
}
