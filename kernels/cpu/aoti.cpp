// The functions that a compiled step calls, without PyTorch's dispatcher or Python.
//
// AOTInductor calls a custom operator by the name of its C shim. The loader resolves shims when it
// loads the compiled step, so this library must be loaded globally before.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cache.h"
#include "experts.h"
#include "latent.h"
#include "linear.h"
#include "prepare_rows.h"
#include "nibbles.h"
#include "shims.h"

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
void octavo_mask_logits(void*, int64_t, int64_t, int64_t, int, const uint32_t* const*, int64_t,
                        int);
void octavo_argmax(const void*, int64_t, int64_t, int64_t, int, int64_t*, int);
void octavo_linear(const uint16_t*, int64_t, int64_t, const LinearLayer*, uint16_t*, int);
void octavo_linear_blocks(const void*, int64_t, int64_t, const LinearLayer*, int64_t, int64_t,
                          void*, int);
void octavo_embed_blocks(const int64_t*, int64_t, const uint8_t*, int64_t, int64_t, int64_t, void*,
                         int);
int octavo_panel_outputs();
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

// A compiled model's entry point, which takes ownership of its inputs; see
// AOTInductorModelContainerRun.
using Run = Error (*)(void* model, Tensor* inputs, size_t num_inputs, Tensor* outputs,
                      size_t num_outputs, void* stream, void* executor);

// Runs a compiled model on a batch. Token ids and positions are [1, num_tokens]; `rows`, of which
// to return logits, is [num_rows]. All arguments must outlive the call.
extern "C" Error octavo_run_step(Run run, void* model, const Step* within,
                                 const int64_t* token_ids, const int64_t* positions,
                                 const int64_t* rows, int64_t num_rows, Tensor* logits) {
  step = *within;
  const int64_t num_tokens = step.batches->num_tokens;
  const int64_t sizes[] = {1, num_tokens}, strides[] = {num_tokens, 1}, *row_stride = strides + 1;
  const int32_t dtype = aoti_torch_dtype_int64(), cpu = aoti_torch_device_type_cpu();
  Tensor inputs[3];
  const auto wrap = [&](const int64_t* data, int dimensions, const int64_t* its_sizes,
                        const int64_t* its_strides, Tensor* made) {
    return aoti_torch_create_tensor_from_blob(const_cast<int64_t*>(data), dimensions, its_sizes,
                                              its_strides, 0, dtype, cpu, 0, made);
  };
  if (wrap(token_ids, 2, sizes, strides, &inputs[0]) ||
      wrap(positions, 2, sizes, strides, &inputs[1]) ||
      wrap(rows, 1, &num_rows, row_stride, &inputs[2]))
    return kFailed;
  return run(model, inputs, 3, logits, 1, nullptr, nullptr);
}

// Adds up `elements` of `x` over all ranks to `out`; `dtype` is 0 for float32, 1 for float16 and 2
// for bfloat16. Returns 0 if it could.
using SumOverRanks = int (*)(const void* x, void* out, int64_t elements, int dtype);
static SumOverRanks sum_over_ranks = nullptr;

// Sets what adds up over ranks for all compiled steps of this process.
extern "C" void octavo_set_sum(SumOverRanks function) { sum_over_ranks = function; }

// Sets this thread's step for the operators of operators.cpp. What it points to must outlive their
// calls.
extern "C" void octavo_set_step(const Step* within) { step = *within; }

// As octavo_run_step, but returns the most likely token of each row instead of the logits, of those
// that its mask of `words` words allows: see octavo_mask_logits. No mask at all is a null pointer.
extern "C" Error octavo_run_greedy_step(Run run, void* model, const Step* within,
                                        const int64_t* token_ids, const int64_t* positions,
                                        const int64_t* rows, int64_t num_rows, int64_t* tokens,
                                        const uint32_t* const* masks, int64_t words) {
  Tensor logits;
  if (const Error error =
          octavo_run_step(run, model, within, token_ids, positions, rows, num_rows, &logits))
    return error;
  const Stopwatch stopwatch(spent.sampling);
  const View view(logits);
  const int dtype = float_code(view.dtype);
  if (view.strides[1] == 1) {
    if (masks)
      octavo_mask_logits(view.data, num_rows, view.strides[0], view.sizes[1], dtype, masks, words,
                         step.threads);
    octavo_argmax(view.data, num_rows, view.strides[0], view.sizes[1], dtype, tokens,
                  step.threads);
  }
  aoti_torch_delete_tensor_object(logits);
  return view.strides[1] == 1 ? 0 : kFailed;
}

// Returns the seconds of this thread's compiled steps since its last call.
extern "C" Spent octavo_take_spent() {
  const Spent result = spent;
  spent = {};
  return result;
}

// octavo::paged_attention
extern "C" Error aoti_torch_cpu_paged_attention(Tensor query, Tensor key, Tensor value,
                                                int64_t layer, double scale,
                                                int64_t* sliding_window, double* soft_cap,
                                                int64_t* chunk, Tensor* sinks,
                                                Tensor* alibi_slopes, Tensor* cos, Tensor* sin,
                                                Tensor* result) {
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
extern "C" Error aoti_torch_cpu_sum_over_ranks(Tensor x, Tensor* result) {
  const View given(x);
  int64_t dimensions = 0, elements = 1;
  aoti_torch_get_dim(x, &dimensions);
  for (int64_t i = dimensions - 1; i >= 0; i--) {
    if (given.sizes[i] > 1 && given.strides[i] != elements) return kFailed;
    elements *= given.sizes[i];
  }
  void* out = nullptr;
  if (!sum_over_ranks ||
      aoti_torch_empty_strided(dimensions, given.sizes, given.strides, given.dtype,
                               aoti_torch_device_type_cpu(), 0, result) ||
      aoti_torch_get_data_ptr(*result, &out))
    return kFailed;
  return sum_over_ranks(given.data, out, elements, float_code(given.dtype)) ? kFailed : 0;
}

// octavo::latent_attention
extern "C" Error aoti_torch_cpu_latent_attention(Tensor query, Tensor key, Tensor absorbing,
                                                 Tensor keys, Tensor values, int64_t value_dim,
                                                 int64_t rotated, int64_t layer, double scale,
                                                 int64_t* sliding_window, double* soft_cap,
                                                 int64_t* chunk, Tensor* result) {
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
extern "C" Error aoti_torch_cpu_packed_linear(Tensor x, int64_t outputs, Tensor panels,
                                              Tensor bias, int64_t gated, int64_t adapted,
                                              Tensor* norm, double epsilon, Tensor* residual,
                                              Tensor* result) {
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
extern "C" Error aoti_torch_cpu_packed_linear_wide(Tensor x, int64_t outputs, Tensor panels,
                                                   Tensor bias, int64_t adapted,
                                                   Tensor* result) {
  const Stopwatch stopwatch(spent.linear);
  const LinearCall call(x, outputs, panels, bias, 0, adapted, nullptr, 0, nullptr,
                        aoti_torch_dtype_float32(), result);
  if (!call.out) return kFailed;
  octavo_linear_wide(call.x(), call.num_rows(), call.row_stride(), &call.layer,
                     static_cast<float*>(call.out), step.threads);
  return 0;
}

// The number of a layer that no adapter adapts.
constexpr int64_t kNotAdapted = -1;

// octavo::packed_linear_blocks
extern "C" Error aoti_torch_cpu_packed_linear_blocks(Tensor x, int64_t outputs, Tensor blocks,
                                                     Tensor bias, int64_t number, int64_t gated,
                                                     int64_t adapted, Tensor* norm, double epsilon,
                                                     Tensor* residual, Tensor* result) {
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
extern "C" Error aoti_torch_cpu_packed_linear_blocks_wide(Tensor x, int64_t outputs,
                                                          Tensor blocks, Tensor bias,
                                                          int64_t number, Tensor* result) {
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
static Error embed(Tensor ids, int64_t width, Tensor blocks, int64_t number, bool wide,
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
extern "C" Error aoti_torch_cpu_packed_embedding(Tensor ids, int64_t width, Tensor blocks,
                                                 int64_t number, Tensor* result) {
  return embed(ids, width, blocks, number, false, result);
}

// octavo::packed_embedding_wide
extern "C" Error aoti_torch_cpu_packed_embedding_wide(Tensor ids, int64_t width, Tensor blocks,
                                                      int64_t number, Tensor* result) {
  return embed(ids, width, blocks, number, true, result);
}

// octavo::packed_linear_int8
extern "C" Error aoti_torch_cpu_packed_linear_int8(Tensor x, int64_t outputs, Tensor panels,
                                                   Tensor bias, Tensor factors, Tensor scales,
                                                   Tensor row_sums, int64_t gated, int64_t adapted,
                                                   Tensor* norm, double epsilon, Tensor* residual,
                                                   Tensor* result) {
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

// octavo::add_adapters
extern "C" Error aoti_torch_cpu_add_adapters(Tensor out, Tensor x, int64_t target,
                                             int64_t of_logits, Tensor* result) {
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
extern "C" Error aoti_torch_cpu_packed_experts(
    Tensor x, Tensor expert_ids, Tensor weights, Tensor up, Tensor up_bias, Tensor down,
    Tensor down_bias, int64_t activation, int64_t gated, double alpha, double limit, double offset,
    Tensor* up_factors, Tensor* up_scales, Tensor* down_factors, Tensor* down_scales,
    Tensor* result) {
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
