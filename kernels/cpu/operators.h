// What Octavo's operators share, and how PyTorch calls them.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "low_rank.h"
#include "plan.h"

// PyTorch's stable C functions. Their header, torch/csrc/inductor/aoti_torch/c/shim.h, needs all of
// PyTorch's headers.
struct AtenTensorOpaque;
using Tensor = AtenTensorOpaque*;
using Error = int32_t;  // 0: no error
struct LibraryOpaque;
using Library = LibraryOpaque*;
using Value = uint64_t;  // a tensor that the callee owns, or a number's bits

extern "C" {
Error aoti_torch_get_data_ptr(Tensor tensor, void** pointer);
Error aoti_torch_get_dim(Tensor tensor, int64_t* dimensions);
Error aoti_torch_get_sizes(Tensor tensor, int64_t** sizes);
Error aoti_torch_get_strides(Tensor tensor, int64_t** strides);
Error aoti_torch_get_dtype(Tensor tensor, int32_t* dtype);
Error aoti_torch_empty_strided(int64_t dimensions, const int64_t* sizes, const int64_t* strides,
                               int32_t dtype, int32_t device, int32_t device_index,
                               Tensor* made);
Error aoti_torch_get_numel(Tensor tensor, int64_t* elements);
Error aoti_torch_delete_tensor_object(Tensor tensor);
Error aoti_torch_library_init_fragment(const char* name, const char* file, uint32_t line,
                                       Library* made);
Error aoti_torch_library_init_impl(const char* name, const char* key, const char* file,
                                   uint32_t line, Library* made);
Error aoti_torch_library_def(Library library, const char* schema);
Error aoti_torch_library_impl(Library library, const char* name,
                              void (*function)(Value*, uint64_t, uint64_t));
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_int8();
}

// Else other libraries of the process could define what we declare.
#define HIDDEN __attribute__((visibility("hidden")))

// Where the states of one convolution or recurrence of one layer lie; the same as in native.py.
// The stride and the size are in elements.
struct StateCache {
  void* state;
  int64_t block_stride, row_size;
  int32_t num_blocks, rows_per_block, first_row, group;
  int32_t row_shape[2];
};

// The current step. Each thread has its own. The layers of a group share a batch.
struct Step {
  const Cache* layers;
  const int32_t* groups;   // of each layer
  const int32_t* written;  // whether a layer writes its cache; else an earlier one does
  const StateCache* states;
  const Batch* batches;  // of each group
  const StepAdapters* adapters;  // or null if no sequence has one
  int32_t threads;
};
extern __thread Step step HIDDEN;

// Seconds of this thread's steps. `linear` includes what is fused into the products.
struct Spent {
  double attention, linear, states;
};
extern __thread Spent spent HIDDEN;

class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds), began_(Clock::now()) {}
  ~Stopwatch() {
    seconds_ += std::chrono::duration<double>(Clock::now() - began_).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  double& seconds_;
  const Clock::time_point began_;
};

struct View {
  void* data = nullptr;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  int32_t dtype = 0;

  explicit View(Tensor tensor) {
    aoti_torch_get_data_ptr(tensor, &data);
    aoti_torch_get_sizes(tensor, &sizes);
    aoti_torch_get_strides(tensor, &strides);
    aoti_torch_get_dtype(tensor, &dtype);
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// Makes an uninitialized contiguous tensor; returns null if there is no memory for it.
template <int kDimensions>
void* make(const int64_t (&sizes)[kDimensions], int32_t dtype, Tensor* made) {
  int64_t strides[kDimensions];
  int64_t stride = 1;
  for (int i = kDimensions - 1; i >= 0; i--) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  void* data = nullptr;
  if (!aoti_torch_empty_strided(kDimensions, sizes, strides, dtype, aoti_torch_device_type_cpu(),
                                0, made))
    aoti_torch_get_data_ptr(*made, &data);
  return data;
}

constexpr Error kFailed = 1;

// An argument of an operator: its type in the schema, and how it is taken from PyTorch's stack.
//
// No argument is optional in the schema, as PyTorch would pass that on its own heap: an empty tensor
// and 0 stand for none.
template <class T>
struct Argument;

template <>
struct Argument<Tensor> {
  static constexpr const char* kType = "Tensor";
  Tensor handle;

  explicit Argument(Value value) : handle(reinterpret_cast<Tensor>(value)) {}
  Argument(const Argument&) = delete;
  Argument& operator=(const Argument&) = delete;
  ~Argument() { aoti_torch_delete_tensor_object(handle); }
  Tensor get() { return handle; }
};

template <>
struct Argument<Tensor*> : Argument<Tensor> {
  using Argument<Tensor>::Argument;
  Tensor* get() {
    int64_t elements = 0;
    return aoti_torch_get_numel(handle, &elements) || !elements ? nullptr : &handle;
  }
};

template <class T, const char* const& type>
struct Number {
  static constexpr const char* kType = type;
  T number;

  explicit Number(Value value) { std::memcpy(&number, &value, sizeof number); }
  T get() { return number; }
};

template <class T, const char* const& type>
struct OptionalNumber : Number<T, type> {
  using Number<T, type>::Number;
  T* get() { return this->number ? &this->number : nullptr; }
};

inline constexpr const char* kInt = "int";
inline constexpr const char* kFloat = "float";
inline constexpr const char* kBool = "bool";

template <>
struct Argument<int64_t> : Number<int64_t, kInt> {
  using Number::Number;
};
template <>
struct Argument<int64_t*> : OptionalNumber<int64_t, kInt> {
  using OptionalNumber::OptionalNumber;
};
template <>
struct Argument<double> : Number<double, kFloat> {
  using Number::Number;
};
template <>
struct Argument<double*> : OptionalNumber<double, kFloat> {
  using OptionalNumber::OptionalNumber;
};
template <>
struct Argument<bool> : Number<bool, kBool> {
  using Number::Number;
};

template <auto function>
struct Box;

// Calls an operator's function as PyTorch calls operators. The function sets its result unless it
// fails.
template <class... Given, Error (*function)(Tensor* result, Given...)>
struct Box<function> {
  static inline const char* name = "";

  template <size_t... i>
  static Error run(Value* stack, Tensor* result, std::index_sequence<i...>) {
    std::tuple<Argument<Given>...> arguments{stack[i]...};
    return function(result, std::get<i>(arguments).get()...);
  }

  // Throws what PyTorch raises in Python.
  static void call(Value* stack, uint64_t, uint64_t) {
    Tensor result = nullptr;
    if (run(stack, &result, std::index_sequence_for<Given...>{})) {
      if (result) aoti_torch_delete_tensor_object(result);
      throw std::runtime_error(std::string("octavo::") + name + " failed");
    }
    stack[0] = reinterpret_cast<Value>(result);
  }

  static std::string schema() {
    std::string list;
    int number = 0;
    for (const char* type : {Argument<Given>::kType...}) {
      list += (number ? ", " : "") + std::string(type) + " x" + std::to_string(number);
      number++;
    }
    return name + ("(" + list) + ") -> Tensor";
  }
};

struct Operator {
  const char* name;
  std::string schema;
  void (*function)(Value* stack, uint64_t, uint64_t);
};

template <auto function>
Operator named(const char* name) {
  Box<function>::name = name;
  return {name, Box<function>::schema(), Box<function>::call};
}

Error causal_conv(Tensor* result, Tensor x, Tensor weight, Tensor* bias, int64_t state, bool silu)
    HIDDEN;
Error ssd(Tensor* result, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, int64_t state,
          Tensor* d, Tensor* dt_bias, bool softplus, double least_dt, double most_dt) HIDDEN;
Error gated_delta(Tensor* result, Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta,
                  int64_t state, double scale, bool normalize) HIDDEN;
Error selective_scan(Tensor* result, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c,
                     int64_t state, Tensor* d, Tensor* dt_bias, bool softplus) HIDDEN;
