// The operators that update states; see operators.cpp.
//
// Step sizes, rates and gates of recurrences must be contiguous float32, as in the graph.

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

// A tensor whose dimensions after the first are contiguous.
class Tokens : public View {
 public:
  explicit Tokens(const View& tensor) : View(tensor) {
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

// An optional contiguous tensor of one dtype. `ok` becomes false if it is not contiguous or of
// another dtype.
template <class T = float>
const T* read(const View* tensor, int32_t dtype, bool& ok) {
  if (!tensor) return nullptr;
  const Tokens view(*tensor);
  ok &= view.contiguous() && view.dtype == dtype;
  return view.as<const T>();
}

const float* read_floats(const View* tensor, bool& ok) {
  return read(tensor, aoti_torch_dtype_float32(), ok);
}

}  // namespace

// octavo::causal_conv
bool causal_conv(const Result& result, const View& x, const View& weight, const View* bias,
                 int64_t state, bool silu) {
  const Stopwatch stopwatch(spent.states);
  const StateCache& cache = step.states[state];
  const Tokens inputs(x), weights(weight);
  bool ok = inputs.fits() && weights.contiguous();
  const void* biases = read<void>(bias, weights.dtype, ok);
  if (!ok) return false;
  const int channels = inputs.sizes[1];
  void* out = result.make({inputs.sizes[0], channels}, inputs.dtype);
  if (!out) return false;
  const CausalConv call{rows_of(cache), inputs.data, inputs.strides[0], weights.data, biases, out,
                        channels, cache.row_shape[0], int(weights.sizes[1]),
                        dtype_number(inputs.dtype), dtype_number(weights.dtype), silu};
  return !octavo_causal_conv(&call, step.threads);
}

// octavo::ssd
bool ssd(const Result& result, const View& x, const View& dt, const View& a, const View& b,
         const View& c, int64_t state, const View* d, const View* dt_bias, bool softplus,
         double least_dt, double most_dt) {
  const Stopwatch stopwatch(spent.states);
  const Tokens inputs(x), keys(b), queries(c);
  bool ok = inputs.fits() && keys.fits() && queries.fits();
  const float* steps = read_floats(&dt, ok);
  const float* rates = read_floats(&a, ok);
  const float* skips = read_floats(d, ok);
  const float* biases = read_floats(dt_bias, ok);
  if (!ok) return false;
  const int heads = inputs.sizes[1], head_dim = inputs.sizes[2];
  void* out = result.make({inputs.sizes[0], heads, head_dim}, inputs.dtype);
  if (!out) return false;
  const Ssd call{rows_of(step.states[state]), inputs.data, keys.data, queries.data,
                 inputs.strides[0], keys.strides[0], queries.strides[0], steps, rates, skips,
                 biases, out, heads, head_dim, int(keys.sizes[1]), int(keys.sizes[2]),
                 dtype_number(inputs.dtype), softplus, float(least_dt), float(most_dt)};
  return !octavo_ssd(&call, step.threads);
}

// octavo::gated_delta
bool gated_delta(const Result& result, const View& query, const View& key, const View& value,
                 const View& g, const View& beta, int64_t state, double scale, bool normalize) {
  const Stopwatch stopwatch(spent.states);
  const Tokens q(query), k(key), v(value);
  bool ok = q.fits() && k.fits() && v.fits();
  const float* decays = read_floats(&g, ok);
  const float* betas = read_floats(&beta, ok);
  if (!ok) return false;
  const int heads = v.sizes[1], value_dim = v.sizes[2];
  void* out = result.make({v.sizes[0], heads, value_dim}, v.dtype);
  if (!out) return false;
  const GatedDelta call{rows_of(step.states[state]), q.data, k.data, v.data, q.strides[0],
                        k.strides[0], v.strides[0], decays, betas, out, int(k.sizes[1]), heads,
                        int(k.sizes[2]), value_dim, dtype_number(v.dtype), g.dimensions == 3,
                        normalize, float(scale)};
  return !octavo_gated_delta(&call, step.threads);
}

// octavo::selective_scan
bool selective_scan(const Result& result, const View& x, const View& dt, const View& a,
                    const View& b, const View& c, int64_t state, const View* d,
                    const View* dt_bias, bool softplus) {
  const Stopwatch stopwatch(spent.states);
  const StateCache& cache = step.states[state];
  const Tokens inputs(x), keys(b), queries(c), steps(dt);
  bool ok = inputs.fits() && keys.fits() && queries.fits() && steps.fits();
  const float* rates = read_floats(&a, ok);
  const float* skips = read_floats(d, ok);
  const float* biases = read_floats(dt_bias, ok);
  if (!ok) return false;
  const int channels = inputs.sizes[1];
  void* out = result.make({inputs.sizes[0], channels}, inputs.dtype);
  if (!out) return false;
  const SelectiveScan call{rows_of(cache), inputs.data, keys.data, queries.data,
                           inputs.strides[0], keys.strides[0], queries.strides[0], steps.data,
                           steps.strides[0], rates, skips, biases, out, channels,
                           cache.row_shape[0], cache.row_shape[1], dtype_number(inputs.dtype),
                           dtype_number(steps.dtype), softplus};
  return !octavo_selective_scan(&call, step.threads);
}
