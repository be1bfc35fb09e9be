// The types that Octavo's operators share, and the calls of programs; see program.cpp.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "low_rank.h"
#include "plan.h"

// PyTorch's stable C functions. Their header, torch/csrc/inductor/aoti_torch/c/shim.h, needs all of
// PyTorch's headers.
struct AtenTensorOpaque;
using Tensor = AtenTensorOpaque*;
using Error = int32_t;  // 0: no error

extern "C" {
Error aoti_torch_get_data_ptr(Tensor tensor, void** pointer);
Error aoti_torch_get_dim(Tensor tensor, int64_t* dimensions);
Error aoti_torch_get_sizes(Tensor tensor, int64_t** sizes);
Error aoti_torch_get_strides(Tensor tensor, int64_t** strides);
Error aoti_torch_get_dtype(Tensor tensor, int32_t* dtype);
Error aoti_torch_empty_strided(int64_t dimensions, const int64_t* sizes, const int64_t* strides,
                               int32_t dtype, int32_t device, int32_t device_index,
                               Tensor* made);
Error aoti_torch_delete_tensor_object(Tensor tensor);
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_int8();
}

// Otherwise other libraries of the process could define the names declared here.
#define HIDDEN __attribute__((visibility("hidden")))

// The location of the states of one convolution or recurrence of one layer; the same as in
// native.py. The stride and the size are in elements.
struct StateCache {
  void* state;
  int64_t block_stride, row_size;
  int32_t num_blocks, rows_per_block, first_row, group;
  int32_t row_shape[2];
};

// The current step. Each thread has its own. The layers of a group share a batch.
struct Step {
  const Cache* layers;
  const int32_t* groups;   // each layer's group
  const int32_t* written;  // whether a layer writes its cache; else an earlier layer does
  const StateCache* states;
  const Batch* batches;  // each group's batch
  const StepAdapters* adapters;  // or null without adapters
  int32_t threads;
};
extern __thread Step step HIDDEN;

// Seconds of this thread's steps. `linear` includes the operators fused into the products.
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

constexpr int kMaxDimensions = 8;

// A tensor's memory.
struct View {
  void* data;
  int32_t dtype;  // PyTorch's number
  int32_t dimensions;
  int64_t sizes[kMaxDimensions], strides[kMaxDimensions];  // in elements

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// Returns the number of a floating-point dtype in the kernels, or -1 for others.
inline int dtype_number(int32_t dtype) {
  if (dtype == aoti_torch_dtype_float32()) return 0;
  if (dtype == aoti_torch_dtype_float16()) return 1;
  return dtype == aoti_torch_dtype_bfloat16() ? 2 : -1;
}

// The bytes of an element of a result.
inline int64_t bytes_of(int32_t dtype) {
  return dtype == aoti_torch_dtype_float32() ? 4 : 2;
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, Free>;

// Returns uninitialized memory, or null if there is none.
inline Memory allocate(int64_t bytes) {
  constexpr int64_t kAlignment = 64;  // bytes
  return Memory(std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment));
}

// The destination of an operator's result: memory that a program frees, or a new PyTorch tensor.
struct Result {
  View* view;
  Memory* memory;  // null for a tensor
  Tensor* tensor;

  // Allocates an uninitialized contiguous result; returns null without memory.
  void* make(const int64_t* sizes, int32_t dimensions, int32_t dtype) const {
    *view = {nullptr, dtype, dimensions, {}, {}};
    int64_t elements = 1;
    for (int i = dimensions - 1; i >= 0; i--) {
      view->sizes[i] = sizes[i];
      view->strides[i] = elements;
      elements *= std::max<int64_t>(sizes[i], 1);
    }
    if (memory) {
      *memory = allocate(elements * bytes_of(dtype));
      view->data = memory->get();
    } else if (!aoti_torch_empty_strided(dimensions, view->sizes, view->strides, dtype,
                                         aoti_torch_device_type_cpu(), 0, tensor)) {
      aoti_torch_get_data_ptr(*tensor, &view->data);
    }
    return view->data;
  }
  void* make(std::initializer_list<int64_t> sizes, int32_t dtype) const {
    return make(sizes.begin(), static_cast<int32_t>(sizes.size()), dtype);
  }
};

// The tensors of a program as it runs. The numbers of constants begin at `kFirstConstant`; the same
// as in program.py.
struct Tensors {
  static constexpr int64_t kFirstConstant = int64_t{1} << 32;
  const View* constants;
  const View* others;

  const View& operator[](int64_t number) const {
    return number < kFirstConstant ? others[number] : constants[number - kFirstConstant];
  }
};

// Converts a program's word to an operator's argument; kLetter stands for it in signatures.
template <class T>
struct Argument {
  static constexpr char kLetter = std::is_floating_point_v<T> ? 'f' : 'i';

  static T take(int64_t word, const Tensors&) {
    if constexpr (std::is_floating_point_v<T>) {
      T number;
      std::memcpy(&number, &word, sizeof number);
      return number;
    } else {
      return static_cast<T>(word);
    }
  }
};

template <>
struct Argument<const View&> {
  static constexpr char kLetter = 't';
  static const View& take(int64_t word, const Tensors& tensors) { return tensors[word]; }
};

// A tensor that may be absent: then the word is negative.
template <>
struct Argument<const View*> {
  static constexpr char kLetter = 'o';
  static const View* take(int64_t word, const Tensors& tensors) {
    return word < 0 ? nullptr : &tensors[word];
  }
};

// An operator. `run` returns whether it succeeded.
struct Operator {
  const char* name;
  std::string signature;  // a letter for each argument
  bool (*run)(const Result& result, const int64_t* words, const Tensors& tensors);
};

template <auto function>
struct Caller;

template <class... Arguments, bool (*function)(const Result&, Arguments...)>
struct Caller<function> {
  template <size_t... i>
  static bool call(const Result& result, const int64_t* words, const Tensors& tensors,
                   std::index_sequence<i...>) {
    return function(result, Argument<Arguments>::take(words[i], tensors)...);
  }
  static bool run(const Result& result, const int64_t* words, const Tensors& tensors) {
    return call(result, words, tensors, std::index_sequence_for<Arguments...>{});
  }
  static Operator named(const char* name) { return {name, {Argument<Arguments>::kLetter...}, run}; }
};

template <auto function>
Operator named(const char* name) {
  return Caller<function>::named(name);
}

// All operators.
const std::vector<Operator>& operators() HIDDEN;

bool causal_conv(const Result& result, const View& x, const View& weight, const View* bias,
                 int64_t state, bool silu) HIDDEN;
bool ssd(const Result& result, const View& x, const View& dt, const View& a, const View& b,
         const View& c, int64_t state, const View* d, const View* dt_bias, bool softplus,
         double least_dt, double most_dt) HIDDEN;
bool gated_delta(const Result& result, const View& query, const View& key, const View& value,
                 const View& g, const View& beta, int64_t state, double scale, bool normalize)
    HIDDEN;
bool selective_scan(const Result& result, const View& x, const View& dt, const View& a,
                    const View& b, const View& c, int64_t state, const View* d,
                    const View* dt_bias, bool softplus) HIDDEN;
