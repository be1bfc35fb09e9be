// Software prefetch, spread over the steps of other work.
#pragma once

#include <cstdint>

// Prefetches memory in the order of its use. Blocks are scattered, so the hardware cannot predict
// the next one; and it stalls on many prefetches at once.
class Fetcher {
 public:
  // Prefetches `count` pieces of `lines` lines, `stride` bytes apart, within `steps` steps.
  Fetcher(const void* const* pieces, int count, int lines, int64_t stride, int steps)
      : pieces_(pieces), end_(pieces + count), lines_(lines), stride_(stride),
        share_((count * ((lines + kLines - 1) / kLines) + steps - 1) / steps) {
    if (count) at_ = static_cast<const char*>(*pieces_);
  }

  // Always inlined: a call would spill all of a product's sums.
  __attribute__((always_inline)) void step() {
    for (int i = 0; i < share_ && pieces_ != end_; i++) {
#pragma GCC unroll 4
      for (int line = 0; line < kLines; line++) __builtin_prefetch(at_ + line * stride_, 0, 2);
      at_ += kLines * stride_;
      line_ += kLines;
      if (line_ < lines_) continue;
      line_ = 0;
      if (++pieces_ != end_) at_ = static_cast<const char*>(*pieces_);
    }
  }

 private:
  static constexpr int kLines = 4;  // per step; prefetching past a piece's end is harmless
  const void* const* pieces_;
  const void* const* end_;
  const char* at_ = nullptr;
  int line_ = 0;
  const int lines_;
  const int64_t stride_;
  const int share_;
};
