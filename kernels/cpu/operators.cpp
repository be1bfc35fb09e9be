// Octavo's operators, which programs call without Python; state_operators.cpp has those that update
// states.

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

// A linear layer's rows and results; `out` is null if the kernels do not support the call. If the
// layer is adapted, `adapted` is its number, and the layer adds the adapters' sums.
struct LinearCall {
  const View& rows;
  LinearLayer layer;
  LowRankSums sums{};
  void* out = nullptr;

  LinearCall(const Result& result, const View& x, int64_t outputs, const View& panels,
             const View& bias, int64_t gated, int64_t adapted, const View* norm, double epsilon,
             const View* residual, int32_t dtype)
      : rows(x),
        layer{panels.data, bias.as<float>(), rows.sizes[1], outputs, gated != 0,
              static_cast<float>(epsilon), nullptr, nullptr, 0, nullptr} {
    if (rows.strides[1] != 1 || rows.strides[0] % 2) return;
    if (norm) layer.norm = norm->data;
    if (residual) {
      if (residual->strides[1] != 1) return;
      layer.residual = residual->data;
      layer.residual_stride = residual->strides[0];
    }
    if (adapted >= 0 && step.adapters && !adapt(adapted)) return;
    out = result.make({rows.sizes[0], outputs}, dtype);
  }
  LinearCall(const LinearCall&) = delete;
  LinearCall& operator=(const LinearCall&) = delete;
  const uint16_t* x() const { return rows.as<uint16_t>(); }
  bool is_float32() const { return rows.dtype == aoti_torch_dtype_float32(); }
  int64_t num_rows() const { return rows.sizes[0]; }
  int64_t row_stride() const { return rows.strides[0]; }

 private:
  // Prepares the adapters' sums; returns whether the number of rows is the step's.
  bool adapt(int64_t number) {
    if (number >= step.adapters->num_layers) return false;
    const LowRankLayer& adapted = step.adapters->layers[number];
    const LowRankBatch& batch = adapted.of_logits ? step.adapters->logits : step.adapters->tokens;
    struct Inner {  // kernels have their own buffer of floats
      float value;
    };
    auto* const inner = reinterpret_cast<float*>(
        scratch<Inner>(num_rows() * adapted.num_parts * batch.max_rank));
    const int status = octavo_multiply_down(&batch, adapted.parts, adapted.num_parts, rows.data,
                                           is_float32(), num_rows(), row_stride(), &layer, inner,
                                           step.threads);
    sums = {&batch, adapted.parts, adapted.num_parts, inner};
    if (status > 0) layer.adapted = &sums;
    return status >= 0;
  }
};

// One product of experts.
ExpertProduct expert_product(const View& panels, const View& bias, const View* factors,
                             const View* scales) {
  ExpertProduct product{panels.data, bias.as<float>(), nullptr, 0, nullptr};
  if (factors && scales) {
    product.factors = factors->as<float>();
    product.factor_stride = factors->sizes[0] > 1 ? factors->strides[0] : 0;
    product.scales = scales->as<float>();
  }
  return product;
}

// Returns the ExpertWeights of a packed dtype; in 4 bits, of a group's bytes, as in experts.py.
int expert_weights(const View& panels) {
  if (panels.dtype == aoti_torch_dtype_float32()) return kFloat32;
  if (panels.dtype == aoti_torch_dtype_bfloat16()) return kBFloat16;
  if (panels.dtype == aoti_torch_dtype_int8()) return kInt8;
  return panels.sizes[3] == GroupOf<E2m1>::kBytes ? kE2m1 : kInt4;
}

// The number of inputs of packed weights.
int64_t expert_inputs(const View& panels) {
  constexpr int64_t kOfWord[] = {1, 2, 4};
  const int weights = expert_weights(panels);
  return panels.sizes[2] * (weights >= kInt4 ? kGroupInputs : kOfWord[weights]);
}

}  // namespace

// Sums `elements` of `x` over all ranks into `out`; `dtype` is 0 for float32, 1 for float16 and 2
// for bfloat16. Returns 0 on success.
using SumOverRanks = int (*)(const void* x, void* out, int64_t elements, int dtype);
static SumOverRanks add_up = nullptr;

// Sets the function that sums over ranks for all steps of this process.
extern "C" void octavo_set_sum(SumOverRanks function) { add_up = function; }

// Sets this thread's step for the operators. The memory that it points to must outlive their calls.
extern "C" void octavo_set_step(const Step* within) { step = *within; }

// Returns the seconds of this thread's steps since its previous call.
extern "C" Spent octavo_take_spent() {
  const Spent result = spent;
  spent = {};
  return result;
}

namespace {

// octavo::paged_attention
bool paged_attention(const Result& result, const View& query, const View& key, const View& value,
                     int64_t layer, double scale, int64_t sliding_window, double soft_cap,
                     int64_t chunk, const View* sinks, const View* alibi_slopes, const View* cos,
                     const View* sin) {
  const Stopwatch stopwatch(spent.attention);
  if (query.strides[2] != 1 || key.strides[2] != 1 || value.strides[2] != 1) return false;
  const Cache& cache = step.layers[layer];
  const Batch& batch = step.batches[step.groups[layer]];
  const int64_t num_heads = query.sizes[1], key_dim = query.sizes[2], value_dim = value.sizes[2];
  if (cache.values && value_dim != cache.value_dim) return false;
  void* const out = result.make({query.sizes[0], num_heads, value_dim}, query.dtype);
  if (!out) return false;
  const void* rows = query.data;
  Memory rotated;
  int64_t token_stride = query.strides[0], head_stride = query.strides[1];
  int64_t bad = 0;
  if (cos) {  // if another layer has written these keys and values, this writes the same again
    // The rotated queries are written into the results' memory if sizes match: nothing else reads a
    // token's query.
    void* queries = out;
    if (key_dim != value_dim) {
      rotated = allocate(query.sizes[0] * num_heads * key_dim * bytes_of(query.dtype));
      queries = rotated.get();
    }
    if (!queries) return false;
    rows = queries;
    token_stride = num_heads * key_dim;
    head_stride = key_dim;
    bad = octavo_rotate_and_write(
        &cache, query.data, query.strides[0], query.strides[1], num_heads, key.data,
        key.strides[0], key.strides[1], value.data, value.strides[0], value.strides[1],
        cos->as<float>(), sin->as<float>(), cos->strides[0], batch.slots, batch.num_tokens,
        queries, step.threads);
  } else if (step.written[layer]) {
    bad = octavo_write_kv(&cache, key.data, key.strides[0], key.strides[1], value.data,
                          value.strides[0], value.strides[1], batch.slots, batch.num_tokens,
                          step.threads);
  }
  if (!bad)
    bad = octavo_paged_attention(&cache, &batch, rows, token_stride, head_stride, num_heads, out,
                                 value_dim, scale, sliding_window, chunk, soft_cap,
                                 alibi_slopes ? alibi_slopes->as<float>() : nullptr,
                                 sinks ? sinks->as<float>() : nullptr, step.threads);
  return !bad;
}

// octavo::sum_over_ranks
bool sum_over_ranks(const Result& result, const View& x) {
  int64_t elements = 1;
  for (int i = x.dimensions - 1; i >= 0; i--) {
    if (x.sizes[i] > 1 && x.strides[i] != elements) return false;
    elements *= x.sizes[i];
  }
  void* const out = result.make(x.sizes, x.dimensions, x.dtype);
  return add_up && out && !add_up(x.data, out, elements, dtype_number(x.dtype));
}

// octavo::latent_attention
bool latent_attention(const Result& result, const View& query, const View& key,
                      const View& absorbing, const View& keys, const View& values,
                      int64_t value_dim, int64_t rotated, int64_t layer, double scale,
                      int64_t sliding_window, double soft_cap, int64_t chunk) {
  const Stopwatch stopwatch(spent.attention);
  if (query.strides[2] != 1 || key.strides[2] != 1) return false;
  const Cache& cache = step.layers[layer];
  const Batch& batch = step.batches[step.groups[layer]];
  const int64_t num_heads = query.sizes[1], query_dim = query.sizes[2];
  const LatentProducts products{absorbing.data, keys.data, values.data, query_dim - rotated,
                                value_dim};
  void* const out = result.make({query.sizes[0], num_heads, value_dim}, query.dtype);
  if (!out || cache.values) return false;
  int64_t bad = 0;
  if (step.written[layer])
    bad = octavo_write_kv(&cache, key.data, key.strides[0], key.strides[1], nullptr, 0, 0,
                          batch.slots, batch.num_tokens, step.threads);
  if (!bad)
    bad = octavo_latent_attention(&cache, &batch, query.data, query.strides[0], query.strides[1],
                                  num_heads, query_dim, &products, out, scale, sliding_window,
                                  chunk, soft_cap, step.threads);
  return !bad;
}

// octavo::packed_linear
bool packed_linear(const Result& result, const View& x, int64_t outputs, const View& panels,
                   const View& bias, int64_t gated, int64_t adapted, const View* norm,
                   double epsilon, const View* residual) {
  const Stopwatch stopwatch(spent.linear);
  const LinearCall call(result, x, outputs, panels, bias, gated, adapted, norm, epsilon, residual,
                        x.dtype);
  if (!call.out) return false;
  if (x.dtype == aoti_torch_dtype_float32())
    octavo_linear_float32(x.as<float>(), call.num_rows(), call.row_stride(), &call.layer,
                          static_cast<float*>(call.out), step.threads);
  else
    octavo_linear(call.x(), call.num_rows(), call.row_stride(), &call.layer,
                  static_cast<uint16_t*>(call.out), step.threads);
  return true;
}

// octavo::packed_linear_wide
bool packed_linear_wide(const Result& result, const View& x, int64_t outputs, const View& panels,
                        const View& bias, int64_t adapted) {
  const Stopwatch stopwatch(spent.linear);
  const LinearCall call(result, x, outputs, panels, bias, 0, adapted, nullptr, 0, nullptr,
                        aoti_torch_dtype_float32());
  if (!call.out) return false;
  octavo_linear_wide(call.x(), call.num_rows(), call.row_stride(), &call.layer,
                     static_cast<float*>(call.out), step.threads);
  return true;
}

// The number of a layer that no adapter adapts.
constexpr int64_t kNotAdapted = -1;

// octavo::packed_linear_blocks
bool packed_linear_blocks(const Result& result, const View& x, int64_t outputs,
                          const View& blocks, const View& bias, int64_t number, int64_t gated,
                          int64_t adapted, const View* norm, double epsilon,
                          const View* residual) {
  const Stopwatch stopwatch(spent.linear);
  const LinearCall call(result, x, outputs, blocks, bias, gated, adapted, norm, epsilon, residual,
                        x.dtype);
  if (!call.out) return false;
  octavo_linear_blocks(x.data, call.num_rows(), call.row_stride(), &call.layer, number,
                       call.is_float32() ? kWideBlocks : kNarrowBlocks, call.out, step.threads);
  return true;
}

// octavo::packed_linear_blocks_wide
bool packed_linear_blocks_wide(const Result& result, const View& x, int64_t outputs,
                               const View& blocks, const View& bias, int64_t number) {
  const Stopwatch stopwatch(spent.linear);
  const LinearCall call(result, x, outputs, blocks, bias, 0, kNotAdapted, nullptr, 0, nullptr,
                        aoti_torch_dtype_float32());
  if (!call.out) return false;
  octavo_linear_blocks(x.data, call.num_rows(), call.row_stride(), &call.layer, number,
                       call.is_float32() ? kWideBlocks : kWideOutputBlocks, call.out,
                       step.threads);
  return true;
}

// Looks up embeddings of a dtype.
bool embed(const Result& result, const View& ids, int64_t width, const View& blocks,
           int64_t number, bool wide) {
  const Stopwatch stopwatch(spent.linear);
  const int64_t count = ids.sizes[0], outputs = blocks.sizes[0] * octavo_panel_outputs();
  if (count > 1 && ids.strides[0] != 1) return false;
  const auto* tokens = ids.as<int64_t>();
  for (int64_t i = 0; i < count; i++)
    if (tokens[i] < 0 || tokens[i] >= outputs) return false;
  void* const out = result.make({count, width},
                                wide ? aoti_torch_dtype_float32() : aoti_torch_dtype_bfloat16());
  if (!out) return false;
  octavo_embed_blocks(tokens, count, blocks.as<uint8_t>(), width, number, wide, out,
                      step.threads);
  return true;
}

// octavo::packed_embedding
bool packed_embedding(const Result& result, const View& ids, int64_t width, const View& blocks,
                      int64_t number) {
  return embed(result, ids, width, blocks, number, false);
}

// octavo::packed_embedding_wide
bool packed_embedding_wide(const Result& result, const View& ids, int64_t width,
                           const View& blocks, int64_t number) {
  return embed(result, ids, width, blocks, number, true);
}

// octavo::packed_linear_int8
bool packed_linear_int8(const Result& result, const View& x, int64_t outputs, const View& panels,
                        const View& bias, const View& factors, const View& scales,
                        const View& row_sums, int64_t gated, int64_t adapted, const View* norm,
                        double epsilon, const View* residual) {
  const Stopwatch stopwatch(spent.linear);
  const LinearCall call(result, x, outputs, panels, bias, gated, adapted, norm, epsilon, residual,
                        x.dtype);
  if (!call.out) return false;
  const Scales all{factors.as<float>(), scales.as<float>(), row_sums.as<float>()};
  octavo_linear_int8(call.x(), call.num_rows(), call.row_stride(), &call.layer, &all,
                     static_cast<uint16_t*>(call.out), step.threads);
  return true;
}

// octavo::rms_norm
bool rms_norm(const Result& result, const View& x, const View* weight, double epsilon,
              bool rounds_first) {
  const int last = x.dimensions - 1;
  if (x.strides[last] != 1 && x.sizes[last] > 1) return false;
  void* const out = result.make(x.sizes, x.dimensions, x.dtype);
  if (!out) return false;
  const int32_t float32 = aoti_torch_dtype_float32();
  octavo_rms_norm(x.data, x.dimensions, x.sizes, x.strides, x.dtype == float32,
                  weight ? weight->data : nullptr, weight && weight->dtype == float32, epsilon,
                  rounds_first, out, step.threads);
  return true;
}

// octavo::add_adapters
bool add_adapters(const Result& result, const View& out, const View& x, int64_t target,
                  int64_t of_logits) {
  const Stopwatch stopwatch(spent.linear);
  const int64_t count = out.sizes[0], width = out.sizes[1];
  if (out.strides[1] != 1 || x.strides[1] != 1 || x.sizes[0] != count) return false;
  void* const made = result.make({count, width}, out.dtype);
  if (!made) return false;
  const int64_t bytes = bytes_of(out.dtype);
  for (int64_t row = 0; row < count; row++)
    std::memcpy(static_cast<char*>(made) + row * width * bytes,
                out.as<char>() + row * out.strides[0] * bytes, width * bytes);
  if (!step.adapters) return true;
  const LowRankBatch& batch = of_logits ? step.adapters->logits : step.adapters->tokens;
  if (batch.num_rows != count) return false;
  octavo_add_low_rank(x.data, x.strides[0], x.sizes[1], made, width, width, dtype_number(x.dtype),
                      out.dtype != x.dtype, batch.rows, batch.tiles, batch.num_tiles,
                      batch.records + target * batch.num_adapters, step.threads);
  return true;
}

// octavo::packed_experts
bool packed_experts(const Result& result, const View& x, const View& expert_ids,
                    const View& weights, const View& up, const View& up_bias, const View& down,
                    const View& down_bias, int64_t activation, int64_t gated, double alpha,
                    double limit, double offset, const View* up_factors, const View* up_scales,
                    const View* down_factors, const View* down_scales) {
  const Stopwatch stopwatch(spent.linear);
  if (x.strides[1] != 1) return false;
  const Routing routing{expert_ids.as<int64_t>(),
                        {expert_ids.strides[0], expert_ids.strides[1]},
                        weights.as<float>(),
                        {weights.strides[0], weights.strides[1]},
                        expert_ids.sizes[0],
                        expert_ids.sizes[1]};
  const ExpertsLayer layer{expert_weights(up),
                           up.sizes[0],
                           x.sizes[1],
                           expert_inputs(down),
                           expert_product(up, up_bias, up_factors, up_scales),
                           expert_product(down, down_bias, down_factors, down_scales),
                           {static_cast<int>(activation), gated != 0, static_cast<float>(alpha),
                            static_cast<float>(limit), static_cast<float>(offset)}};
  void* const out = result.make({x.sizes[0], x.sizes[1]}, x.dtype);
  if (!out) return false;
  octavo_experts(x.data, x.strides[0], &routing, &layer, out, step.threads);
  return true;
}

}  // namespace

const std::vector<Operator>& operators() {
  static const std::vector<Operator> all{
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
  return all;
}
