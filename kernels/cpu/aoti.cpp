// The kernels as a compiled step calls them: without PyTorch's dispatcher or Python.
//
// AOTInductor calls a custom operator by the name of its C shim. Shims are found when
// the compiled step is loaded, so this library must be loaded before it, globally.

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "cache.h"
#include "plan.h"

// PyTorch's own C functions, stable from version to version; of
// torch/csrc/inductor/aoti_torch/c/shim.h, which would need all of its headers.
struct AtenTensorOpaque;
using Tensor = AtenTensorOpaque*;
using Error = int32_t;  // 0 is none

extern "C" {
Error aoti_torch_get_data_ptr(Tensor tensor, void** pointer);
Error aoti_torch_get_sizes(Tensor tensor, int64_t** sizes);
Error aoti_torch_get_strides(Tensor tensor, int64_t** strides);
Error aoti_torch_get_dtype(Tensor tensor, int32_t* dtype);
Error aoti_torch_empty_strided(int64_t dimensions, const int64_t* sizes, const int64_t* strides,
                               int32_t dtype, int32_t device, int32_t device_index,
                               Tensor* made);
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_dtype_float32();

int64_t octavo_write_kv(const Cache*, const void*, int64_t, int64_t, const void*, int64_t, int64_t,
                        const int64_t*, int64_t, int);
int octavo_paged_attention(const Cache*, const Batch*, const void*, int64_t, int64_t, int, void*,
                           float, int, float, const float*, int);
void octavo_linear(const uint16_t*, int64_t, int64_t, const void*, const float*, int64_t, int64_t,
                   uint16_t*, int);
void octavo_linear_wide(const uint16_t*, int64_t, int64_t, const void*, const float*, int64_t,
                        int64_t, float*, int);
void octavo_linear_int8(const uint16_t*, int64_t, int64_t, const void*, const float*,
                        const float*, const float*, const float*, int64_t, int64_t, uint16_t*,
                        int);
void octavo_linear_int4(const uint16_t*, int64_t, int64_t, const uint8_t*, const void*,
                        const float*, const float*, const float*, const float*, int64_t, int64_t,
                        uint16_t*, int);
}

namespace {

// What the layers of the step in hand have in common. Steps of several threads do not
// meet.
struct Step {
  const Cache* layers;
  const Batch* batch;
  const int64_t* slots;
  int64_t num_tokens;
  int threads;
};
thread_local Step step;

// What this thread's compiled steps have spent where.
struct Spent {
  double attention, linear;
};
thread_local Spent spent;

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

// An uninitialised contiguous tensor; null if there is no memory for it.
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

}  // namespace

// Sets the step that this thread is about to run. All must live until it has run.
extern "C" void octavo_begin_step(const Cache* layers, const Batch* batch, const int64_t* slots,
                                  int64_t num_tokens, int threads) {
  step = {layers, batch, slots, num_tokens, threads};
}

// Seconds that this thread's compiled steps have spent since it last asked.
extern "C" Spent octavo_take_spent() {
  const Spent result = spent;
  spent = {};
  return result;
}

// octavo::paged_attention
extern "C" Error aoti_torch_cpu_paged_attention(Tensor query, Tensor key, Tensor value,
                                                int64_t layer, double scale,
                                                int64_t* sliding_window, double* soft_cap,
                                                Tensor* result) {
  const Stopwatch stopwatch(spent.attention);
  const View q(query), k(key), v(value);
  if (q.strides[2] != 1 || k.strides[2] != 1 || v.strides[2] != 1) return kFailed;
  const Cache& cache = step.layers[layer];
  if (octavo_write_kv(&cache, k.data, k.strides[0], k.strides[1], v.data, v.strides[0],
                      v.strides[1], step.slots, step.num_tokens, step.threads))
    return kFailed;
  void* out = make({q.sizes[0], q.sizes[1], q.sizes[2]}, q.dtype, result);
  if (!out) return kFailed;
  return octavo_paged_attention(&cache, step.batch, q.data, q.strides[0], q.strides[1],
                                q.sizes[1], out, scale, sliding_window ? *sliding_window : 0,
                                soft_cap ? *soft_cap : 0, nullptr, step.threads)
             ? kFailed
             : 0;
}

// octavo::packed_linear
extern "C" Error aoti_torch_cpu_packed_linear(Tensor x, Tensor panels, Tensor bias,
                                              int64_t outputs, Tensor* result) {
  const Stopwatch stopwatch(spent.linear);
  const View rows(x);
  auto* out = static_cast<uint16_t*>(make({rows.sizes[0], outputs}, rows.dtype, result));
  if (!out || rows.strides[1] != 1 || rows.strides[0] % 2) return kFailed;
  octavo_linear(rows.as<uint16_t>(), rows.sizes[0], rows.strides[0], View(panels).data,
                View(bias).as<float>(), rows.sizes[1], outputs, out, step.threads);
  return 0;
}

// octavo::packed_linear_wide
extern "C" Error aoti_torch_cpu_packed_linear_wide(Tensor x, Tensor panels, Tensor bias,
                                                   int64_t outputs, Tensor* result) {
  const Stopwatch stopwatch(spent.linear);
  const View rows(x);
  auto* out = static_cast<float*>(
      make({rows.sizes[0], outputs}, aoti_torch_dtype_float32(), result));
  if (!out || rows.strides[1] != 1 || rows.strides[0] % 2) return kFailed;
  octavo_linear_wide(rows.as<uint16_t>(), rows.sizes[0], rows.strides[0], View(panels).data,
                     View(bias).as<float>(), rows.sizes[1], outputs, out, step.threads);
  return 0;
}

// octavo::packed_linear_int8
extern "C" Error aoti_torch_cpu_packed_linear_int8(Tensor x, Tensor panels, Tensor factors,
                                                   Tensor scales, Tensor row_sums, Tensor bias,
                                                   int64_t outputs, Tensor* result) {
  const Stopwatch stopwatch(spent.linear);
  const View rows(x);
  auto* out = static_cast<uint16_t*>(make({rows.sizes[0], outputs}, rows.dtype, result));
  if (!out || rows.strides[1] != 1) return kFailed;
  octavo_linear_int8(rows.as<uint16_t>(), rows.sizes[0], rows.strides[0], View(panels).data,
                     View(factors).as<float>(), View(scales).as<float>(),
                     View(row_sums).as<float>(), View(bias).as<float>(), rows.sizes[1], outputs,
                     out, step.threads);
  return 0;
}

// octavo::packed_linear_int4
extern "C" Error aoti_torch_cpu_packed_linear_int4(Tensor x, Tensor nibbles, Tensor panels,
                                                   Tensor factors, Tensor scales,
                                                   Tensor row_sums, Tensor bias,
                                                   int64_t outputs, Tensor* result) {
  const Stopwatch stopwatch(spent.linear);
  const View rows(x);
  auto* out = static_cast<uint16_t*>(make({rows.sizes[0], outputs}, rows.dtype, result));
  if (!out || rows.strides[1] != 1 || rows.strides[0] % 2) return kFailed;
  octavo_linear_int4(rows.as<uint16_t>(), rows.sizes[0], rows.strides[0],
                     View(nibbles).as<uint8_t>(), View(panels).data, View(factors).as<float>(),
                     View(scales).as<float>(), View(row_sums).as<float>(), View(bias).as<float>(),
                     rows.sizes[1], outputs, out, step.threads);
  return 0;
}
