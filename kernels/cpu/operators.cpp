// Octavo's operators, which PyTorch's interpreter of graphs calls without Python. Those that update
// states are in state_operators.cpp.

#include <cstdint>
#include <cstring>

#include "cache.h"
#include "experts.h"
#include "latent.h"
#include "linear.h"
#include "prepare_rows.h"
#include "nibbles.h"
#include "operators.h"

extern "C" {
int64_t octavo_write_kv(const Cache*, const void*, int64_t, int64_t, const void*, int64_t, int64_t,
                        const int64_t*, int64_t, int);
int64_t octavo_rotate_and_write(const Cache*, const void*, int64_t, int64_t, int, const void*,
                                int64_t, int64_t, const void*, int64_t, int64_t, const float*,
                                const float*, int64_t, const int64_t*, int64_t, void*, int);
int octavo_paged_attention(const Cache*, const Batch*, const void*, int64_t, int64_t, int, void*,
                           int, float, int, int, float, const float*, const float*, int);
int octavo_latent_attention(const Cache*, const Batch*, const void*, int64_t, int64_t, int, int,
                            const LatentProducts*, void*, float, int, int, float, int);
void octavo_linear(const uint16_t*, int64_t, int64_t, const LinearLayer*, uint16_t*, int);
void octavo_linear_blocks(const void*, int64_t, int64_t, const LinearLayer*, int64_t, int64_t,
                          void*, int);
void octavo_embed_blocks(const int64_t*, int64_t, const uint8_t*, int64_t, int64_t, int64_t, void*,
                         int);
int octavo_panel_outputs();
void octavo_rms_norm(const void*, int, const int64_t*, const int64_t*, bool, const void*, bool,
                     float, bool, void*, int);
void octavo_linear_float32(const float*, int64_t, int64_t, const LinearLayer*, float*, int);
void octavo_linear_wide(const uint16_t*, int64_t, int64_t, const LinearLayer*, float*, int);
void octavo_linear_int8(const uint16_t*, int64_t, int64_t, const LinearLayer*, const Scales*,
                        uint16_t*, int);
void octavo_experts(const void*, int64_t, const Routing*, const ExpertsLayer*, void*, int);
int octavo_multiply_down(const LowRankBatch*, const LowRankPart*, int64_t, const void*, int,
                         int64_t, int64_t, const LinearLayer*, float*, int);
void octavo_add_low_rank(const void*, int64_t, int64_t, void*, int64_t, int64_t, int, int,
                         const int32_t*, const LowRankTile*, int64_t, const LowRankRecord*, int);
}

__thread Step step;
__thread Spent spent;

namespace {

// A linear layer's rows and results; `out` is null if the kernels do not support the call. The
// layer adds what the step's adapters add if `adapted` is its number among those that may.
struct LinearCall {
  const View rows;
  LinearLayer layer;
  LowRankSums sums{};
  void* out = nullptr;

  LinearCall(Tensor x, int64_t outputs, Tensor panels, Tensor bias, int64_t gated, int64_t adapted,
             Tensor* norm, double epsilon, Tensor* residual, int32_t dtype, Tensor* result)
      : rows(x),
        layer{View(panels).data, View(bias).as<float>(), rows.sizes[1], outputs, gated != 0,
              static_cast<float>(epsilon), nullptr, nullptr, 0, nullptr} {
    if (rows.strides[1] != 1 || rows.strides[0] % 2) return;
    if (norm) layer.norm = View(*norm).data;
    if (residual) {
      const View added(*residual);
      if (added.strides[1] != 1) return;
      layer.residual = added.data;
      layer.residual_stride = added.strides[0];
    }
    if (adapted >= 0 && step.adapters && !adapt(adapted)) return;
    out = make({rows.sizes[0], outputs}, dtype ? dtype : rows.dtype, result);
  }
  LinearCall(const LinearCall&) = delete;
  LinearCall& operator=(const LinearCall&) = delete;
  const uint16_t* x() const { return rows.as<uint16_t>(); }
  bool is_float32() const { return rows.dtype == aoti_torch_dtype_float32(); }
  int64_t num_rows() const { return rows.sizes[0]; }
  int64_t row_stride() const { return rows.strides[0]; }

 private:
  // Prepares what adapters add; returns whether the rows are those of the step.
  bool adapt(int64_t number) {
    if (number >= step.adapters->num_layers) return false;
    const LowRankLayer& own = step.adapters->layers[number];
    const LowRankBatch& batch = own.of_logits ? step.adapters->logits : step.adapters->tokens;
    struct Inner {  // kernels have a buffer of floats of their own
      float value;
    };
    auto* const inner = reinterpret_cast<float*>(
        scratch<Inner>(num_rows() * own.num_parts * batch.max_rank));
    const int found = octavo_multiply_down(&batch, own.parts, own.num_parts, rows.data,
                                           is_float32(), num_rows(), row_stride(), &layer, inner,
                                           step.threads);
    sums = {&batch, own.parts, own.num_parts, inner};
    if (found > 0) layer.adapted = &sums;
    return found >= 0;
  }
};

// One product of experts.
ExpertProduct expert_product(const View& panels, Tensor bias, Tensor* factors, Tensor* scales) {
  ExpertProduct product{panels.data, View(bias).as<float>(), nullptr, 0, nullptr};
  if (factors && scales) {
    const View own(*factors);
    product.factors = own.as<float>();
    product.factor_stride = own.sizes[0] > 1 ? own.strides[0] : 0;
    product.scales = View(*scales).as<float>();
  }
  return product;
}

// Returns an ExpertWeights by the dtype of packed weights, and in 4 bits by the bytes of a group;
// as in experts.py.
int expert_weights(const View& panels) {
  if (panels.dtype == aoti_torch_dtype_float32()) return kFloat32;
  if (panels.dtype == aoti_torch_dtype_bfloat16()) return kBFloat16;
  if (panels.dtype == aoti_torch_dtype_int8()) return kInt8;
  return panels.sizes[3] == GroupOf<E2m1>::kBytes ? kE2m1 : kInt4;
}

// Returns the kernels' number of a floating-point dtype.
int float_code(int32_t dtype) {
  return dtype == aoti_torch_dtype_float32() ? 0 : dtype == aoti_torch_dtype_float16() ? 1 : 2;
}

// The number of inputs of packed weights.
int64_t expert_inputs(const View& panels) {
  constexpr int64_t kOfWord[] = {1, 2, 4};
  const int weights = expert_weights(panels);
  return panels.sizes[2] * (weights >= kInt4 ? kGroupInputs : kOfWord[weights]);
}

}  // namespace

// Adds up `elements` of `x` over all ranks to `out`; `dtype` is 0 for float32, 1 for float16 and 2
// for bfloat16. Returns 0 if it could.
using SumOverRanks = int (*)(const void* x, void* out, int64_t elements, int dtype);
static SumOverRanks add_up = nullptr;

// Sets what adds up over ranks for all steps of this process.
extern "C" void octavo_set_sum(SumOverRanks function) { add_up = function; }

// Sets this thread's step for the operators. What it points to must outlive their calls.
extern "C" void octavo_set_step(const Step* within) { step = *within; }

// Returns the seconds of this thread's steps since its last call.
extern "C" Spent octavo_take_spent() {
  const Spent result = spent;
  spent = {};
  return result;
}

namespace {

// octavo::paged_attention
Error paged_attention(Tensor* result, Tensor query, Tensor key, Tensor value, int64_t layer,
                      double scale, int64_t* sliding_window, double* soft_cap, int64_t* chunk,
                      Tensor* sinks, Tensor* alibi_slopes, Tensor* cos, Tensor* sin) {
  const Stopwatch stopwatch(spent.attention);
  const View q(query), k(key), v(value);
  if (q.strides[2] != 1 || k.strides[2] != 1 || v.strides[2] != 1) return kFailed;
  const Cache& cache = step.layers[layer];
  const Batch& batch = step.batches[step.groups[layer]];
  const int64_t num_heads = q.sizes[1], key_dim = q.sizes[2], value_dim = v.sizes[2];
  if (cache.values && value_dim != cache.value_dim) return kFailed;
  void* out = make({q.sizes[0], num_heads, value_dim}, q.dtype, result);
  if (!out) return kFailed;
  const void* rows = q.data;
  Tensor rotated = nullptr;
  int64_t token_stride = q.strides[0], head_stride = q.strides[1];
  int64_t bad = 0;
  if (cos) {  // if another layer has written these keys and values, this writes the same again
    const View cosines(*cos), sines(*sin);
    // The rotated queries are written where the results go, if they have the same size: nothing
    // else reads a token's query.
    void* queries = out;
    if (key_dim != value_dim)
      queries = make({q.sizes[0], num_heads, key_dim}, q.dtype, &rotated);
    if (!queries) return kFailed;
    rows = queries;
    token_stride = num_heads * key_dim;
    head_stride = key_dim;
    bad = octavo_rotate_and_write(
        &cache, q.data, q.strides[0], q.strides[1], num_heads, k.data, k.strides[0],
        k.strides[1], v.data, v.strides[0], v.strides[1], cosines.as<float>(),
        sines.as<float>(), cosines.strides[0], batch.slots, batch.num_tokens, queries,
        step.threads);
  } else if (step.written[layer]) {
    bad = octavo_write_kv(&cache, k.data, k.strides[0], k.strides[1], v.data, v.strides[0],
                          v.strides[1], batch.slots, batch.num_tokens, step.threads);
  }
  if (!bad)
    bad = octavo_paged_attention(&cache, &batch, rows, token_stride, head_stride, num_heads,
                                 out, value_dim, scale, sliding_window ? *sliding_window : 0,
                                 chunk ? *chunk : 0, soft_cap ? *soft_cap : 0,
                                 alibi_slopes ? View(*alibi_slopes).as<float>() : nullptr,
                                 sinks ? View(*sinks).as<float>() : nullptr, step.threads);
  if (rotated) aoti_torch_delete_tensor_object(rotated);
  return bad ? kFailed : 0;
}

// octavo::sum_over_ranks
Error sum_over_ranks(Tensor* result, Tensor x) {
  const View given(x);
  int64_t dimensions = 0, elements = 1;
  aoti_torch_get_dim(x, &dimensions);
  for (int64_t i = dimensions - 1; i >= 0; i--) {
    if (given.sizes[i] > 1 && given.strides[i] != elements) return kFailed;
    elements *= given.sizes[i];
  }
  void* out = nullptr;
  if (!add_up ||
      aoti_torch_empty_strided(dimensions, given.sizes, given.strides, given.dtype,
                               aoti_torch_device_type_cpu(), 0, result) ||
      aoti_torch_get_data_ptr(*result, &out))
    return kFailed;
  return add_up(given.data, out, elements, float_code(given.dtype)) ? kFailed : 0;
}

// octavo::latent_attention
Error latent_attention(Tensor* result, Tensor query, Tensor key, Tensor absorbing, Tensor keys,
                       Tensor values, int64_t value_dim, int64_t rotated, int64_t layer,
                       double scale, int64_t* sliding_window, double* soft_cap, int64_t* chunk) {
  const Stopwatch stopwatch(spent.attention);
  const View q(query), k(key);
  if (q.strides[2] != 1 || k.strides[2] != 1) return kFailed;
  const Cache& cache = step.layers[layer];
  const Batch& batch = step.batches[step.groups[layer]];
  const int64_t num_heads = q.sizes[1], query_dim = q.sizes[2];
  const LatentProducts products{View(absorbing).data, View(keys).data, View(values).data,
                                query_dim - rotated, value_dim};
  void* out = make({q.sizes[0], num_heads, value_dim}, q.dtype, result);
  if (!out || cache.values) return kFailed;
  int64_t bad = 0;
  if (step.written[layer])
    bad = octavo_write_kv(&cache, k.data, k.strides[0], k.strides[1], nullptr, 0, 0, batch.slots,
                          batch.num_tokens, step.threads);
  if (!bad)
    bad = octavo_latent_attention(&cache, &batch, q.data, q.strides[0], q.strides[1], num_heads,
                                  query_dim, &products, out, scale,
                                  sliding_window ? *sliding_window : 0, chunk ? *chunk : 0,
                                  soft_cap ? *soft_cap : 0, step.threads);
  return bad ? kFailed : 0;
}

// octavo::packed_linear
Error packed_linear(Tensor* result, Tensor x, int64_t outputs, Tensor panels, Tensor bias,
                    int64_t gated, int64_t adapted, Tensor* norm, double epsilon,
                    Tensor* residual) {
  const Stopwatch stopwatch(spent.linear);
  const LinearCall call(x, outputs, panels, bias, gated, adapted, norm, epsilon, residual, 0,
                        result);
  if (!call.out) return kFailed;
  if (call.is_float32())
    octavo_linear_float32(call.rows.as<float>(), call.num_rows(), call.row_stride(), &call.layer,
                          static_cast<float*>(call.out), step.threads);
  else
    octavo_linear(call.x(), call.num_rows(), call.row_stride(), &call.layer,
                  static_cast<uint16_t*>(call.out), step.threads);
  return 0;
}

// octavo::packed_linear_wide
Error packed_linear_wide(Tensor* result, Tensor x, int64_t outputs, Tensor panels, Tensor bias,
                         int64_t adapted) {
  const Stopwatch stopwatch(spent.linear);
  const LinearCall call(x, outputs, panels, bias, 0, adapted, nullptr, 0, nullptr,
                        aoti_torch_dtype_float32(), result);
  if (!call.out) return kFailed;
  octavo_linear_wide(call.x(), call.num_rows(), call.row_stride(), &call.layer,
                     static_cast<float*>(call.out), step.threads);
  return 0;
}

constexpr int64_t kMostDimensions = 8;

// The number of a layer that no adapter adapts.
constexpr int64_t kNotAdapted = -1;

// octavo::packed_linear_blocks
Error packed_linear_blocks(Tensor* result, Tensor x, int64_t outputs, Tensor blocks, Tensor bias,
                           int64_t number, int64_t gated, int64_t adapted, Tensor* norm,
                           double epsilon, Tensor* residual) {
  const Stopwatch stopwatch(spent.linear);
  const LinearCall call(x, outputs, blocks, bias, gated, adapted, norm, epsilon, residual, 0,
                        result);
  if (!call.out) return kFailed;
  const bool wide = call.is_float32();
  octavo_linear_blocks(call.rows.data, call.num_rows(), call.row_stride(), &call.layer, number,
                       wide ? kWideBlocks : kNarrowBlocks, call.out, step.threads);
  return 0;
}

// octavo::packed_linear_blocks_wide
Error packed_linear_blocks_wide(Tensor* result, Tensor x, int64_t outputs, Tensor blocks,
                                Tensor bias, int64_t number) {
  const Stopwatch stopwatch(spent.linear);
  const int32_t float32 = aoti_torch_dtype_float32();
  const LinearCall call(x, outputs, blocks, bias, 0, kNotAdapted, nullptr, 0, nullptr, float32,
                        result);
  if (!call.out) return kFailed;
  const bool wide = call.is_float32();
  octavo_linear_blocks(call.rows.data, call.num_rows(), call.row_stride(), &call.layer, number,
                       wide ? kWideBlocks : kWideOutputBlocks, call.out, step.threads);
  return 0;
}

// Looks up embeddings of a dtype.
Error embed(Tensor ids, int64_t width, Tensor blocks, int64_t number, bool wide,
                   Tensor* result) {
  const Stopwatch stopwatch(spent.linear);
  const View tokens(ids), weights(blocks);
  const int64_t count = tokens.sizes[0], outputs = weights.sizes[0] * octavo_panel_outputs();
  if (count > 1 && tokens.strides[0] != 1) return kFailed;
  const auto* own = tokens.as<int64_t>();
  for (int64_t i = 0; i < count; i++)
    if (own[i] < 0 || own[i] >= outputs) return kFailed;
  const int32_t dtype = wide ? aoti_torch_dtype_float32() : aoti_torch_dtype_bfloat16();
  void* out = make({count, width}, dtype, result);
  if (!out) return kFailed;
  octavo_embed_blocks(own, count, weights.as<uint8_t>(), width, number, wide, out, step.threads);
  return 0;
}

// octavo::packed_embedding
Error packed_embedding(Tensor* result, Tensor ids, int64_t width, Tensor blocks, int64_t number) {
  return embed(ids, width, blocks, number, false, result);
}

// octavo::packed_embedding_wide
Error packed_embedding_wide(Tensor* result, Tensor ids, int64_t width, Tensor blocks,
                            int64_t number) {
  return embed(ids, width, blocks, number, true, result);
}

// octavo::packed_linear_int8
Error packed_linear_int8(Tensor* result, Tensor x, int64_t outputs, Tensor panels, Tensor bias,
                         Tensor factors, Tensor scales, Tensor row_sums, int64_t gated,
                         int64_t adapted, Tensor* norm, double epsilon, Tensor* residual) {
  const Stopwatch stopwatch(spent.linear);
  const LinearCall call(x, outputs, panels, bias, gated, adapted, norm, epsilon, residual, 0,
                        result);
  if (!call.out) return kFailed;
  const Scales all{View(factors).as<float>(), View(scales).as<float>(),
                   View(row_sums).as<float>()};
  octavo_linear_int8(call.x(), call.num_rows(), call.row_stride(), &call.layer, &all,
                     static_cast<uint16_t*>(call.out), step.threads);
  return 0;
}

// octavo::rms_norm
Error rms_norm(Tensor* result, Tensor x, Tensor* weight, double epsilon, bool rounds_first) {
  const View rows(x);
  int64_t dimensions = 0;
  if (aoti_torch_get_dim(x, &dimensions) || dimensions > kMostDimensions) return kFailed;
  if (rows.strides[dimensions - 1] != 1 && rows.sizes[dimensions - 1] > 1) return kFailed;
  int64_t contiguous[kMostDimensions], stride = 1;
  for (int64_t i = dimensions - 1; i >= 0; i--) {
    contiguous[i] = stride;
    stride *= std::max<int64_t>(rows.sizes[i], 1);
  }
  void* out = nullptr;
  if (aoti_torch_empty_strided(dimensions, rows.sizes, contiguous, rows.dtype,
                               aoti_torch_device_type_cpu(), 0, result) ||
      aoti_torch_get_data_ptr(*result, &out))
    return kFailed;
  const int32_t float32 = aoti_torch_dtype_float32();
  const bool wide_weight = weight && View(*weight).dtype == float32;
  octavo_rms_norm(rows.data, dimensions, rows.sizes, rows.strides, rows.dtype == float32,
                  weight ? View(*weight).data : nullptr, wide_weight, epsilon, rounds_first, out,
                  step.threads);
  return 0;
}

// octavo::add_adapters
Error add_adapters(Tensor* result, Tensor out, Tensor x, int64_t target, int64_t of_logits) {
  const Stopwatch stopwatch(spent.linear);
  const View outputs(out), rows(x);
  const int64_t count = outputs.sizes[0], width = outputs.sizes[1];
  if (outputs.strides[1] != 1 || rows.strides[1] != 1 || rows.sizes[0] != count) return kFailed;
  void* const made = make({count, width}, outputs.dtype, result);
  if (!made) return kFailed;
  const int64_t bytes = outputs.dtype == aoti_torch_dtype_float32() ? 4 : 2;
  for (int64_t row = 0; row < count; row++)
    std::memcpy(static_cast<char*>(made) + row * width * bytes,
                outputs.as<char>() + row * outputs.strides[0] * bytes, width * bytes);
  if (!step.adapters) return 0;
  const LowRankBatch& batch = of_logits ? step.adapters->logits : step.adapters->tokens;
  if (batch.num_rows != count) return kFailed;
  octavo_add_low_rank(rows.data, rows.strides[0], rows.sizes[1], made, width, width,
                      float_code(rows.dtype), outputs.dtype != rows.dtype, batch.rows, batch.tiles, batch.num_tiles,
                      batch.records + target * batch.num_adapters, step.threads);
  return 0;
}

// octavo::packed_experts
Error packed_experts(Tensor* result, Tensor x, Tensor expert_ids, Tensor weights, Tensor up,
                     Tensor up_bias, Tensor down, Tensor down_bias, int64_t activation,
                     int64_t gated, double alpha, double limit, double offset, Tensor* up_factors,
                     Tensor* up_scales, Tensor* down_factors, Tensor* down_scales) {
  const Stopwatch stopwatch(spent.linear);
  const View rows(x), ids(expert_ids), shares(weights), up_panels(up), down_panels(down);
  if (rows.strides[1] != 1) return kFailed;
  const Routing routing{ids.as<int64_t>(),
                        {ids.strides[0], ids.strides[1]},
                        shares.as<float>(),
                        {shares.strides[0], shares.strides[1]},
                        ids.sizes[0],
                        ids.sizes[1]};
  const ExpertsLayer layer{
      expert_weights(up_panels),
      up_panels.sizes[0],
      rows.sizes[1],
      expert_inputs(down_panels),
      expert_product(up_panels, up_bias, up_factors, up_scales),
      expert_product(down_panels, down_bias, down_factors, down_scales),
      {static_cast<int>(activation), gated != 0, static_cast<float>(alpha),
       static_cast<float>(limit), static_cast<float>(offset)}};
  void* const out = make({rows.sizes[0], rows.sizes[1]}, rows.dtype, result);
  if (!out) return kFailed;
  octavo_experts(rows.data, rows.strides[0], &routing, &layer, out, step.threads);
  return 0;
}

Error register_all() {
  const Operator operators[] = {
      named<paged_attention>("paged_attention"),
      named<latent_attention>("latent_attention"),
      named<sum_over_ranks>("sum_over_ranks"),
      named<add_adapters>("add_adapters"),
      named<packed_linear>("packed_linear"),
      named<packed_linear_wide>("packed_linear_wide"),
      named<packed_linear_blocks>("packed_linear_blocks"),
      named<packed_linear_blocks_wide>("packed_linear_blocks_wide"),
      named<packed_linear_int8>("packed_linear_int8"),
      named<packed_embedding>("packed_embedding"),
      named<packed_embedding_wide>("packed_embedding_wide"),
      named<packed_experts>("packed_experts"),
      named<rms_norm>("rms_norm"),
      named<causal_conv>("causal_conv"),
      named<ssd>("ssd"),
      named<gated_delta>("gated_delta"),
      named<selective_scan>("selective_scan"),
  };
  Library definitions, kernels;
  if (aoti_torch_library_init_fragment("octavo_native", __FILE__, __LINE__, &definitions) ||
      aoti_torch_library_init_impl("octavo_native", "CPU", __FILE__, __LINE__, &kernels))
    return kFailed;
  for (const Operator& one : operators) {
    if (aoti_torch_library_def(definitions, one.schema.c_str()) ||
        aoti_torch_library_impl(kernels, one.name, one.function))
      return kFailed;
  }
  return 0;
}

}  // namespace

// Registers the operators as octavo_native::*, once in a process. They stay registered.
extern "C" Error octavo_register_operators() {
  static const Error error = register_all();
  return error;
}
