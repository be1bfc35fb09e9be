// Octavo's operators for PyTorch's own interpreter of graphs, without Python.
//
// A step that was translated for lack of a C++ compiler runs there. These operators call the
// functions of aoti.cpp and state_shims.cpp, and are registered with PyTorch's dispatcher through its stable C
// functions. None of their arguments is optional, as PyTorch would pass that on its own heap: an
// empty tensor and 0 stand for none.

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

struct AtenTensorOpaque;
using Tensor = AtenTensorOpaque*;
using Error = int32_t;  // 0: no error
struct LibraryOpaque;
using Library = LibraryOpaque*;
using Value = uint64_t;  // a tensor that the callee owns, or a number's bits

extern "C" {
Error aoti_torch_library_init_fragment(const char* name, const char* file, uint32_t line,
                                       Library* made);
Error aoti_torch_library_init_impl(const char* name, const char* key, const char* file,
                                   uint32_t line, Library* made);
Error aoti_torch_library_def(Library library, const char* schema);
Error aoti_torch_library_impl(Library library, const char* name,
                              void (*function)(Value*, uint64_t, uint64_t));
Error aoti_torch_delete_tensor_object(Tensor tensor);
Error aoti_torch_get_numel(Tensor tensor, int64_t* elements);

Error aoti_torch_cpu_paged_attention(Tensor, Tensor, Tensor, int64_t, double, int64_t*, double*,
                                     int64_t*, Tensor*, Tensor*, Tensor*, Tensor*, Tensor*);
Error aoti_torch_cpu_latent_attention(Tensor, Tensor, Tensor, Tensor, Tensor, int64_t, int64_t,
                                      int64_t, double, int64_t*, double*, int64_t*, Tensor*);

Error aoti_torch_cpu_sum_over_ranks(Tensor, Tensor*);
Error aoti_torch_cpu_add_adapters(Tensor, Tensor, int64_t, int64_t, Tensor*);
Error aoti_torch_cpu_packed_linear(Tensor, int64_t, Tensor, Tensor, int64_t, int64_t, Tensor*,
                                   double, Tensor*, Tensor*);
Error aoti_torch_cpu_packed_linear_wide(Tensor, int64_t, Tensor, Tensor, int64_t, Tensor*);
Error aoti_torch_cpu_packed_linear_blocks(Tensor, int64_t, Tensor, Tensor, int64_t, int64_t,
                                          int64_t, Tensor*, double, Tensor*, Tensor*);
Error aoti_torch_cpu_packed_linear_blocks_wide(Tensor, int64_t, Tensor, Tensor, int64_t, Tensor*);
Error aoti_torch_cpu_packed_embedding(Tensor, int64_t, Tensor, int64_t, Tensor*);
Error aoti_torch_cpu_packed_embedding_wide(Tensor, int64_t, Tensor, int64_t, Tensor*);
Error aoti_torch_cpu_packed_linear_int8(Tensor, int64_t, Tensor, Tensor, Tensor, Tensor, Tensor,
                                        int64_t, int64_t, Tensor*, double, Tensor*, Tensor*);
Error aoti_torch_cpu_packed_experts(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                                    int64_t, int64_t, double, double, double, Tensor*, Tensor*,
                                    Tensor*, Tensor*, Tensor*);
Error aoti_torch_cpu_causal_conv(Tensor, Tensor, Tensor*, int64_t, int32_t, Tensor*);
Error aoti_torch_cpu_ssd(Tensor, Tensor, Tensor, Tensor, Tensor, int64_t, Tensor*, Tensor*,
                         int32_t, double, double, Tensor*);
Error aoti_torch_cpu_gated_delta(Tensor, Tensor, Tensor, Tensor, Tensor, int64_t, double, int32_t,
                                 Tensor*);
Error aoti_torch_cpu_selective_scan(Tensor, Tensor, Tensor, Tensor, Tensor, int64_t, Tensor*,
                                    Tensor*, int32_t, Tensor*);
}

namespace {

// A tensor among the arguments, which the callee owns.
class Given {
 public:
  explicit Given(Value value) : handle_(reinterpret_cast<Tensor>(value)) {}
  Given(const Given&) = delete;
  Given& operator=(const Given&) = delete;
  ~Given() { aoti_torch_delete_tensor_object(handle_); }
  operator Tensor() const { return handle_; }
  // Returns null if it is empty.
  Tensor* optional() {
    int64_t elements = 0;
    return aoti_torch_get_numel(handle_, &elements) || !elements ? nullptr : &handle_;
  }

 private:
  Tensor handle_;
};

double as_double(Value value) {
  double number;
  std::memcpy(&number, &value, sizeof number);
  return number;
}

// Puts the result on the stack, or throws what PyTorch raises in Python. `result` is a reference:
// the call that sets it is the argument before it.
void finish(Value* stack, Error error, const Tensor& result, const char* name) {
  if (error) throw std::runtime_error(std::string("octavo::") + name + " failed");
  stack[0] = reinterpret_cast<Value>(result);
}

void paged_attention(Value* stack, uint64_t, uint64_t) {
  Given query(stack[0]), key(stack[1]), value(stack[2]), sinks(stack[8]),
      alibi_slopes(stack[9]), cos(stack[10]), sin(stack[11]);
  int64_t window = static_cast<int64_t>(stack[5]), chunk = static_cast<int64_t>(stack[7]);
  double cap = as_double(stack[6]);
  Tensor result = nullptr;
  finish(stack,
         aoti_torch_cpu_paged_attention(query, key, value, static_cast<int64_t>(stack[3]),
                                        as_double(stack[4]), window ? &window : nullptr,
                                        cap ? &cap : nullptr, chunk ? &chunk : nullptr,
                                        sinks.optional(), alibi_slopes.optional(), cos.optional(),
                                        sin.optional(), &result),
         result, "paged_attention");
}

void latent_attention(Value* stack, uint64_t, uint64_t) {
  Given query(stack[0]), key(stack[1]), absorbing(stack[2]), keys(stack[3]), values(stack[4]);
  int64_t window = static_cast<int64_t>(stack[9]), chunk = static_cast<int64_t>(stack[11]);
  double cap = as_double(stack[10]);
  Tensor result = nullptr;
  finish(stack,
         aoti_torch_cpu_latent_attention(
             query, key, absorbing, keys, values, static_cast<int64_t>(stack[5]),
             static_cast<int64_t>(stack[6]), static_cast<int64_t>(stack[7]), as_double(stack[8]),
             window ? &window : nullptr, cap ? &cap : nullptr, chunk ? &chunk : nullptr, &result),
         result, "latent_attention");
}

void sum_over_ranks(Value* stack, uint64_t, uint64_t) {
  Given x(stack[0]);
  Tensor result = nullptr;
  finish(stack, aoti_torch_cpu_sum_over_ranks(x, &result), result, "sum_over_ranks");
}

void add_adapters(Value* stack, uint64_t, uint64_t) {
  Given out(stack[0]), x(stack[1]);
  Tensor result = nullptr;
  finish(stack,
         aoti_torch_cpu_add_adapters(out, x, static_cast<int64_t>(stack[2]),
                                     static_cast<int64_t>(stack[3]), &result),
         result, "add_adapters");
}

void packed_linear(Value* stack, uint64_t, uint64_t) {
  Given x(stack[0]), panels(stack[2]), bias(stack[3]), norm(stack[6]), residual(stack[8]);
  Tensor result = nullptr;
  finish(stack,
         aoti_torch_cpu_packed_linear(x, static_cast<int64_t>(stack[1]), panels, bias,
                                      static_cast<int64_t>(stack[4]),
                                      static_cast<int64_t>(stack[5]), norm.optional(),
                                      as_double(stack[7]), residual.optional(), &result),
         result, "packed_linear");
}

void packed_linear_blocks(Value* stack, uint64_t, uint64_t) {
  Given x(stack[0]), blocks(stack[2]), bias(stack[3]), norm(stack[7]), residual(stack[9]);
  Tensor result = nullptr;
  finish(stack,
         aoti_torch_cpu_packed_linear_blocks(
             x, static_cast<int64_t>(stack[1]), blocks, bias, static_cast<int64_t>(stack[4]),
             static_cast<int64_t>(stack[5]), static_cast<int64_t>(stack[6]), norm.optional(),
             as_double(stack[8]), residual.optional(), &result),
         result, "packed_linear_blocks");
}

// Calls one of the layers with outputs in float32, which nothing is fused into.
template <auto call>
void wide_layer(Value* stack, const char* name) {
  Given x(stack[0]), panels(stack[2]), bias(stack[3]);
  Tensor result = nullptr;
  finish(stack,
         call(x, static_cast<int64_t>(stack[1]), panels, bias, static_cast<int64_t>(stack[4]),
              &result),
         result, name);
}

void packed_linear_blocks_wide(Value* stack, uint64_t, uint64_t) {
  wide_layer<aoti_torch_cpu_packed_linear_blocks_wide>(stack, "packed_linear_blocks_wide");
}

template <auto call>
void embed(Value* stack, const char* name) {
  Given ids(stack[0]), blocks(stack[2]);
  Tensor result = nullptr;
  finish(stack,
         call(ids, static_cast<int64_t>(stack[1]), blocks, static_cast<int64_t>(stack[3]), &result),
         result, name);
}

void packed_embedding(Value* stack, uint64_t, uint64_t) {
  embed<aoti_torch_cpu_packed_embedding>(stack, "packed_embedding");
}

void packed_embedding_wide(Value* stack, uint64_t, uint64_t) {
  embed<aoti_torch_cpu_packed_embedding_wide>(stack, "packed_embedding_wide");
}

void packed_linear_wide(Value* stack, uint64_t, uint64_t) {
  wide_layer<aoti_torch_cpu_packed_linear_wide>(stack, "packed_linear_wide");
}

void packed_linear_int8(Value* stack, uint64_t, uint64_t) {
  Given x(stack[0]), panels(stack[2]), bias(stack[3]), factors(stack[4]), scales(stack[5]),
      row_sums(stack[6]), norm(stack[9]), residual(stack[11]);
  Tensor result = nullptr;
  finish(stack,
         aoti_torch_cpu_packed_linear_int8(
             x, static_cast<int64_t>(stack[1]), panels, bias, factors, scales, row_sums,
             static_cast<int64_t>(stack[7]), static_cast<int64_t>(stack[8]), norm.optional(),
             as_double(stack[10]), residual.optional(), &result),
         result, "packed_linear_int8");
}

void packed_experts(Value* stack, uint64_t, uint64_t) {
  Given x(stack[0]), ids(stack[1]), weights(stack[2]), up(stack[3]), up_bias(stack[4]),
      down(stack[5]), down_bias(stack[6]), up_factors(stack[12]), up_scales(stack[13]),
      down_factors(stack[14]), down_scales(stack[15]);
  Tensor result = nullptr;
  finish(stack,
         aoti_torch_cpu_packed_experts(
             x, ids, weights, up, up_bias, down, down_bias, static_cast<int64_t>(stack[7]),
             static_cast<int64_t>(stack[8]), as_double(stack[9]), as_double(stack[10]),
             as_double(stack[11]), up_factors.optional(), up_scales.optional(),
             down_factors.optional(), down_scales.optional(), &result),
         result, "packed_experts");
}

void causal_conv(Value* stack, uint64_t, uint64_t) {
  Given x(stack[0]), weight(stack[1]), bias(stack[2]);
  Tensor result = nullptr;
  finish(stack,
         aoti_torch_cpu_causal_conv(x, weight, bias.optional(), static_cast<int64_t>(stack[3]),
                                    stack[4] != 0, &result),
         result, "causal_conv");
}

void ssd(Value* stack, uint64_t, uint64_t) {
  Given x(stack[0]), dt(stack[1]), a(stack[2]), b(stack[3]), c(stack[4]), d(stack[6]),
      dt_bias(stack[7]);
  Tensor result = nullptr;
  finish(stack,
         aoti_torch_cpu_ssd(x, dt, a, b, c, static_cast<int64_t>(stack[5]), d.optional(),
                            dt_bias.optional(), stack[8] != 0, as_double(stack[9]),
                            as_double(stack[10]), &result),
         result, "ssd");
}

void gated_delta(Value* stack, uint64_t, uint64_t) {
  Given query(stack[0]), key(stack[1]), value(stack[2]), g(stack[3]), beta(stack[4]);
  Tensor result = nullptr;
  finish(stack,
         aoti_torch_cpu_gated_delta(query, key, value, g, beta, static_cast<int64_t>(stack[5]),
                                    as_double(stack[6]), stack[7] != 0, &result),
         result, "gated_delta");
}

void selective_scan(Value* stack, uint64_t, uint64_t) {
  Given x(stack[0]), dt(stack[1]), a(stack[2]), b(stack[3]), c(stack[4]), d(stack[6]),
      dt_bias(stack[7]);
  Tensor result = nullptr;
  finish(stack,
         aoti_torch_cpu_selective_scan(x, dt, a, b, c, static_cast<int64_t>(stack[5]),
                                       d.optional(), dt_bias.optional(), stack[8] != 0, &result),
         result, "selective_scan");
}

struct Operator {
  const char* name;
  const char* schema;
  void (*function)(Value*, uint64_t, uint64_t);
};

#define NORMED "Tensor norm, float epsilon, Tensor residual"
#define FUSED "int gated, int adapted, " NORMED
#define LAYER "Tensor x, int outputs, Tensor panels, Tensor bias"
#define EMBEDDING "Tensor ids, int width, Tensor blocks, int number"
#define SCALES "Tensor factors, Tensor scales, Tensor row_sums"
#define RECURRENCE "Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, int state"
#define STEPS "Tensor d, Tensor dt_bias, bool softplus"
constexpr Operator kOperators[] = {
    {"paged_attention",
     "paged_attention(Tensor query, Tensor key, Tensor value, int layer, float scale,"
     " int sliding_window, float soft_cap, int chunk, Tensor sinks, Tensor alibi_slopes,"
     " Tensor cos, Tensor sin) -> Tensor",
     paged_attention},
    {"latent_attention",
     "latent_attention(Tensor query, Tensor key, Tensor absorbing, Tensor keys, Tensor values,"
     " int value_dim, int rotated, int layer, float scale, int sliding_window, float soft_cap,"
     " int chunk) -> Tensor",
     latent_attention},
    {"sum_over_ranks", "sum_over_ranks(Tensor x) -> Tensor", sum_over_ranks},
    {"packed_linear", "packed_linear(" LAYER ", " FUSED ") -> Tensor", packed_linear},
    {"packed_linear_wide", "packed_linear_wide(" LAYER ", int adapted) -> Tensor",
     packed_linear_wide},
    {"add_adapters", "add_adapters(Tensor out, Tensor x, int target, int of_logits) -> Tensor",
     add_adapters},
    {"packed_linear_blocks",
     "packed_linear_blocks(" LAYER ", int number, " FUSED ") -> Tensor", packed_linear_blocks},
    {"packed_linear_blocks_wide", "packed_linear_blocks_wide(" LAYER ", int number) -> Tensor",
     packed_linear_blocks_wide},
    {"packed_embedding", "packed_embedding(" EMBEDDING ") -> Tensor", packed_embedding},
    {"packed_embedding_wide", "packed_embedding_wide(" EMBEDDING ") -> Tensor",
     packed_embedding_wide},
    {"packed_linear_int8", "packed_linear_int8(" LAYER ", " SCALES ", " FUSED ") -> Tensor",
     packed_linear_int8},
    {"packed_experts",
     "packed_experts(Tensor x, Tensor expert_ids, Tensor weights, Tensor up, Tensor up_bias,"
     " Tensor down, Tensor down_bias, int activation, int gated, float alpha, float limit,"
     " float offset, Tensor up_factors, Tensor up_scales, Tensor down_factors,"
     " Tensor down_scales) -> Tensor",
     packed_experts},
    {"causal_conv",
     "causal_conv(Tensor x, Tensor weight, Tensor bias, int state, bool silu) -> Tensor",
     causal_conv},
    {"ssd",
     "ssd(" RECURRENCE ", " STEPS ", float least_dt, float most_dt) -> Tensor", ssd},
    {"gated_delta",
     "gated_delta(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, int state,"
     " float scale, bool normalize) -> Tensor",
     gated_delta},
    {"selective_scan", "selective_scan(" RECURRENCE ", " STEPS ") -> Tensor", selective_scan},
};

Error register_all() {
  Library definitions, kernels;
  if (aoti_torch_library_init_fragment("octavo_native", __FILE__, __LINE__, &definitions) ||
      aoti_torch_library_init_impl("octavo_native", "CPU", __FILE__, __LINE__, &kernels))
    return 1;
  for (const Operator& one : kOperators) {
    if (aoti_torch_library_def(definitions, one.schema) ||
        aoti_torch_library_impl(kernels, one.name, one.function))
      return 1;
  }
  return 0;
}

}  // namespace

// Registers the operators as octavo_native::*, once in a process. They stay registered.
extern "C" Error octavo_register_operators() {
  static const Error error = register_all();
  return error;
}
