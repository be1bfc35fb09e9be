// Operators: functions of tensors and numbers, each in the source of its kernel.
//
// OCTAVO_OPERATOR(name) makes the function `name` the operator octavo_cpu::name, whose schema has the
// function's arguments; a function whose first argument is a Result returns a new tensor.
// `define` in engine/operators.py gives octavo::name the same function. PyTorch's dispatcher calls
// operators one by one (eager models, tests), and programs call them without it (program.cpp).
// They throw exceptions, which become Python's ValueError (std::invalid_argument), IndexError
// (std::out_of_range) or RuntimeError.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "low_rank.h"
#include "plan.h"

// PyTorch's stable C functions. Their headers, torch/csrc/inductor/aoti_torch/c/shim.h and
// torch/csrc/stable/c/shim.h, need all of PyTorch's headers.
struct AtenTensorOpaque;
using Tensor = AtenTensorOpaque*;
using Error = int32_t;  // 0: no error

extern "C" {
Error aoti_torch_get_data_ptr(Tensor tensor, void** pointer);
Error aoti_torch_empty_strided(int64_t dimensions, const int64_t* sizes, const int64_t* strides,
                               int32_t dtype, int32_t device, int32_t device_index,
                               Tensor* made);
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_int8();
Error torch_get_num_threads(uint32_t* threads);
}

// Otherwise other libraries of the process could define the names declared here.
#define HIDDEN __attribute__((visibility("hidden")))

// The location of the states of one convolution or recurrence of one layer; the same as in
// caches.py. The stride and the size are in elements.
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
};
extern __thread Step step HIDDEN;

// The current step's adapters; null without adapters.
extern __thread const StepAdapters* adapters HIDDEN;

// Seconds of this thread's steps. `linear` includes the operators fused into the products.
struct Spent {
  double attention, linear, states;
};
extern __thread Spent spent HIDDEN;

class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds), began_(Clock::now()) {}
  ~Stopwatch() { seconds_ += elapsed(); }
  double elapsed() const { return std::chrono::duration<double>(Clock::now() - began_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  double& seconds_;
  const Clock::time_point began_;
};

// The number of threads of PyTorch's operators in this thread.
inline int num_threads() {
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  return static_cast<int>(threads);
}

// Throws an exception for arguments that a kernel would misread.
inline void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

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
  bool is_float32() const { return dtype == aoti_torch_dtype_float32(); }
  // Whether the elements of each row are adjacent.
  bool has_whole_rows() const {
    return strides[dimensions - 1] == 1 || sizes[dimensions - 1] == 1;
  }
};

// Returns the elements of an optional tensor, or null.
template <class T>
const T* maybe(const View* view) {
  return view ? view->as<const T>() : nullptr;
}

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

// The word before such memory holds the address to free.
struct Free {
  void operator()(void* memory) const { std::free(static_cast<void**>(memory)[-1]); }
};
using Memory = std::unique_ptr<void, Free>;

// Returns uninitialized memory, aligned for vectors, which may read past its end. aligned_alloc is not
// used: before glibc 2.38 it rarely reuses freed memory, and an embedding engine took a tenth more.
inline Memory allocate(int64_t bytes, uintptr_t alignment = 64) {
  void* const all = std::malloc(bytes + 2 * alignment);  // aligned to 16, so a word fits before
  if (!all) throw std::bad_alloc();
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(all) / alignment + 1) * alignment;
  void** const memory = reinterpret_cast<void**>(begin);
  memory[-1] = all;
  return Memory(memory);
}

// The destination of an operator's result: memory that a program frees, or a new PyTorch tensor.
struct Result {
  View* view;
  Memory* memory;  // null for a tensor
  Tensor* tensor;

  // Allocates an uninitialized contiguous result.
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
    } else if (aoti_torch_empty_strided(dimensions, view->sizes, view->strides, dtype,
                                        aoti_torch_device_type_cpu(), 0, tensor)) {
      throw std::bad_alloc();
    } else {
      aoti_torch_get_data_ptr(*tensor, &view->data);
    }
    return view->data;
  }
  void* make(std::initializer_list<int64_t> sizes, int32_t dtype) const {
    return make(sizes.begin(), static_cast<int32_t>(sizes.size()), dtype);
  }
};

// The tensors of a call: those of a program as it runs, or the call's own. The numbers of constants
// begin at `kFirstConstant`; the same as in program.py.
struct Tensors {
  static constexpr int64_t kFirstConstant = int64_t{1} << 32;
  const View* constants;
  const View* others;

  const View& operator[](int64_t number) const {
    return number < kFirstConstant ? others[number] : constants[number - kFirstConstant];
  }
};

// Converts a word to an argument; kLetter stands for it in signatures.
template <class T>
struct Argument {
  static constexpr char kLetter = std::is_same_v<T, double> ? 'f' : std::is_same_v<T, bool> ? 'b' : 'i';

  static T take(int64_t word, const Tensors&) {
    if constexpr (std::is_same_v<T, double>) {
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

constexpr size_t kMostArguments = 24;  // of an operator

using Value = uint64_t;  // in PyTorch's stack: a tensor that the callee owns, or a number's bits

struct Operator {
  const char* name;
  std::string signature;  // a letter for each argument
  bool makes;             // whether it returns a tensor
  void (*run)(const Result& result, const int64_t* words, const Tensors& tensors);
  void (*boxed)(Value* stack, uint64_t num_arguments, uint64_t num_results);  // for PyTorch
};

// All operators.
std::vector<Operator>& operators() HIDDEN;

// Calls an operator with the arguments on PyTorch's stack.
void call_boxed(const Operator& called, Value* stack) HIDDEN;

template <auto function, class... Arguments, size_t... i>
void call(const int64_t* words, const Tensors& tensors, std::index_sequence<i...>,
          const Result& result, void (*)(const Result&, Arguments...)) {
  function(result, Argument<Arguments>::take(words[i], tensors)...);
}
template <auto function, class... Arguments, size_t... i>
void call(const int64_t* words, const Tensors& tensors, std::index_sequence<i...>, const Result&,
          void (*)(Arguments...)) {
  function(Argument<Arguments>::take(words[i], tensors)...);
}

template <auto function, class... Arguments>
Operator describe(const char* name, bool makes) {
  static_assert(sizeof...(Arguments) <= kMostArguments);
  return {name, {Argument<Arguments>::kLetter...}, makes,
          [](const Result& result, const int64_t* words, const Tensors& tensors) {
            call<function>(words, tensors, std::index_sequence_for<Arguments...>(), result,
                           function);
          },
          nullptr};
}
template <auto function, class... Arguments>
Operator describe(const char* name, void (*)(const Result&, Arguments...)) {
  return describe<function, Arguments...>(name, true);
}
template <auto function, class... Arguments>
Operator describe(const char* name, void (*)(Arguments...)) {
  return describe<function, Arguments...>(name, false);
}

template <auto function>
bool add_operator(const char* name) {
  static Operator made = describe<function>(name, function);
  made.boxed = [](Value* stack, uint64_t, uint64_t) { call_boxed(made, stack); };
  operators().push_back(made);
  return true;
}

#define OCTAVO_OPERATOR(function) \
  [[maybe_unused]] const bool function##_is_operator = add_operator<function>(#function);
