// Runs the linear kernels on an emulated CPU. emulated_linear.py sends each call to stdin, and
// reads its result from stdout.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "linear.h"

extern "C" {
void octavo_linear(const uint16_t*, int64_t, int64_t, const LinearLayer*, uint16_t*, int);
void octavo_linear_float32(const float*, int64_t, int64_t, const LinearLayer*, float*, int);
void octavo_linear_wide(const uint16_t*, int64_t, int64_t, const LinearLayer*, float*, int);
void octavo_linear_int8(const uint16_t*, int64_t, int64_t, const LinearLayer*, const Scales*,
                        uint16_t*, int);
void octavo_linear_blocks(const void*, int64_t, int64_t, const LinearLayer*, int64_t, int64_t, void*,
                          int);
void octavo_widen_blocks(const uint8_t*, int64_t, const int64_t*, int64_t, int64_t, int64_t, void*,
                         int);
void octavo_pack_blocks(const uint8_t*, int64_t, const int64_t*, int64_t, int64_t, uint8_t*, int);
void octavo_pack_words(const uint8_t*, int64_t, int64_t, int64_t, uint32_t*, int);
void octavo_round_to_q4_1(const void*, int64_t, int64_t, int64_t, int64_t, uint8_t*, int);
void octavo_round_to_bytes(const void*, int64_t, int64_t, int64_t, int64_t, const float*, int8_t*,
                           float*, float*, int);
void octavo_find_widest(const void*, int64_t, int64_t, int64_t, int64_t, float*, int);
const char* octavo_isa();
}

namespace {

constexpr int kThreads = 2, kArrays = 8;

// The same as in emulated_linear.py.
struct Call {
  int64_t kind, rows, stride, inputs, outputs, gated, residual_stride;
  int64_t format, elements;  // of blocks; elements of others are float32 if not 0
  int64_t bytes[kArrays];  // x, panels, bias, norm, residual, factors, scales, row sums

  // Whether weights are laid out, widened or rounded. Their rows are x, and the order of those of a file is in
  // the place of panels. The stride is in bytes, and `residual_stride` is the result's size.
  bool reads_weights() const { return kind >= 4; }
  double epsilon;
};

bool read(void* to, size_t bytes) { return std::fread(to, 1, bytes, stdin) == bytes; }

}  // namespace

int main() {
  const int64_t panel = kPanel;
  std::fwrite(&panel, sizeof panel, 1, stdout);
  std::printf("%-16s", octavo_isa());
  std::fflush(stdout);
  for (Call call; read(&call, sizeof call);) {
    std::vector<uint64_t> memory[kArrays];  // aligned for all
    const void* at[kArrays];
    for (int i = 0; i < kArrays; i++) {
      memory[i].resize((call.bytes[i] + 7) / 8);
      if (!read(memory[i].data(), call.bytes[i])) return 1;
      at[i] = call.bytes[i] ? memory[i].data() : nullptr;
    }
    if (call.reads_weights()) {
      std::vector<uint32_t> found((call.residual_stride + 3) / 4);
      const auto* rows = static_cast<const uint8_t*>(at[0]);
      const auto* order = static_cast<const int64_t*>(at[1]);
      if (call.kind == 4)
        octavo_widen_blocks(rows, call.stride, order, call.outputs, call.format, call.elements,
                            found.data(), kThreads);
      else if (call.kind == 5)
        octavo_pack_blocks(rows, call.stride, order, call.outputs, call.format,
                           reinterpret_cast<uint8_t*>(found.data()), kThreads);
      else if (call.kind == 6)
        octavo_pack_words(rows, call.stride, call.outputs, call.inputs, found.data(), kThreads);
      else if (call.kind == 7)
        octavo_round_to_q4_1(rows, call.stride, call.elements, call.outputs, call.inputs,
                             reinterpret_cast<uint8_t*>(found.data()), kThreads);
      else if (call.kind == 8) {  // scales, sums and bytes
        auto* scales = reinterpret_cast<float*>(found.data());
        octavo_round_to_bytes(rows, call.stride, call.elements, call.outputs, call.inputs,
                              static_cast<const float*>(at[1]),
                              reinterpret_cast<int8_t*>(scales + 2 * call.outputs), scales,
                              scales + call.outputs, kThreads);
      } else
        octavo_find_widest(rows, call.stride, call.elements, call.outputs, call.inputs,
                           reinterpret_cast<float*>(found.data()), kThreads);
      std::fwrite(found.data(), 1, call.residual_stride, stdout);
      std::fflush(stdout);
      continue;
    }
    const auto* x = static_cast<const uint16_t*>(at[0]);
    const LinearLayer layer{at[1],
                            static_cast<const float*>(at[2]),
                            call.inputs,
                            call.outputs,
                            int(call.gated),
                            float(call.epsilon),
                            at[3],
                            at[4],
                            call.residual_stride};
    const Scales scales{static_cast<const float*>(at[5]), static_cast<const float*>(at[6]),
                        static_cast<const float*>(at[7])};
    std::vector<float> wide(call.rows * call.outputs);
    auto* narrow = reinterpret_cast<uint16_t*>(wide.data());
    switch (call.kind) {
      case 0:
        if (call.elements)
          octavo_linear_float32(static_cast<const float*>(at[0]), call.rows, call.stride, &layer,
                                wide.data(), kThreads);
        else
          octavo_linear(x, call.rows, call.stride, &layer, narrow, kThreads);
        break;
      case 1: octavo_linear_wide(x, call.rows, call.stride, &layer, wide.data(), kThreads); break;
      case 2:
        octavo_linear_int8(x, call.rows, call.stride, &layer, &scales, narrow, kThreads);
        break;
      case 3:
        octavo_linear_blocks(at[0], call.rows, call.stride, &layer, call.format, call.elements,
                             wide.data(), kThreads);
    }
    std::fwrite(wide.data(), call.kind == 1 || call.elements ? 4 : 2, wide.size(), stdout);
    std::fflush(stdout);
  }
}
