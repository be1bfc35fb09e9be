// The sum over ranks, which Python computes.

#include "operators.h"

// Sums `elements` of `x` over all ranks into `out`; `dtype` is 0 for float32, 1 for float16 and 2
// for bfloat16. Returns 0 on success.
using SumOverRanks = int (*)(const void* x, void* out, int64_t elements, int dtype);
static SumOverRanks add_up = nullptr;

// Sets the function that sums over ranks for all steps of this process.
extern "C" void octavo_set_sum(SumOverRanks function) { add_up = function; }

namespace {

void sum_over_ranks(const Result& result, const View& x) {
  int64_t elements = 1;
  for (int i = x.dimensions - 1; i >= 0; i--) {
    require(x.sizes[i] <= 1 || x.strides[i] == elements, "a summed tensor must be contiguous");
    elements *= x.sizes[i];
  }
  void* const out = result.make(x.sizes, x.dimensions, x.dtype);
  if (!add_up || add_up(x.data, out, elements, dtype_number(x.dtype)))
    throw std::runtime_error("a sum over ranks failed");
}
OCTAVO_OPERATOR(sum_over_ranks)

}  // namespace
