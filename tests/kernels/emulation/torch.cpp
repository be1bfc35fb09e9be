// Calls operators by name in programs without PyTorch, and stands in for its C functions.

#include <cstdlib>

#include "operators.h"

static int threads = 2;
static std::string problem;

extern "C" {
Error aoti_torch_get_data_ptr(Tensor, void**) { std::abort(); }
Error aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t,
                               Tensor*) {
  std::abort();
}
int32_t aoti_torch_device_type_cpu() { return 0; }
int32_t aoti_torch_dtype_float32() { return 6; }
int32_t aoti_torch_dtype_float16() { return 5; }
int32_t aoti_torch_dtype_bfloat16() { return 15; }
int32_t aoti_torch_dtype_int8() { return 1; }
Error torch_get_num_threads(uint32_t* number) {
  *number = threads;
  return 0;
}

void octavo_set_threads(int number) { threads = number; }

// Returns an operator's signature; null if there is none.
const char* octavo_signature(const char* name) {
  for (const Operator& each : operators())
    if (std::string(each.name) == name) return each.signature.c_str();
  return nullptr;
}

// Calls an operator. Sets `made` to its result, which lives until the next call. Returns null, or
// the problem: "I" for an index and "V" for others, and a message.
const char* octavo_call(const char* name, const int64_t* words, const View* views, View* made) {
  static Memory memory;
  for (const Operator& each : operators()) {
    if (std::string(each.name) != name) continue;
    try {
      each.run({made, &memory, nullptr}, words, {nullptr, views});
      return nullptr;
    } catch (const std::out_of_range& error) {
      problem = std::string("I") + error.what();
    } catch (const std::exception& error) {
      problem = std::string("V") + error.what();
    }
    return problem.c_str();
  }
  return "Vthere is no such operator";
}
}

void call_boxed(const Operator&, Value*) { std::abort(); }
