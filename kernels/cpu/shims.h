// What the functions that a compiled step calls share.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

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
Error aoti_torch_create_tensor_from_blob(void* data, int64_t dimensions, const int64_t* sizes,
                                         const int64_t* strides, int64_t offset, int32_t dtype,
                                         int32_t device, int32_t device_index, Tensor* made);
Error aoti_torch_empty_strided(int64_t dimensions, const int64_t* sizes, const int64_t* strides,
                               int32_t dtype, int32_t device, int32_t device_index,
                               Tensor* made);
Error aoti_torch_delete_tensor_object(Tensor tensor);
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_dtype_int64();
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

// Seconds of this thread's compiled steps. `linear` includes what is fused into the products.
struct Spent {
  double attention, linear, sampling, states;
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
