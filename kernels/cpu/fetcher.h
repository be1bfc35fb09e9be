// Software prefetch, spread over the steps of other work.
#pragma once

#include <algorithm>
#include <cstdint>

// Lines of memory, `stride` bytes apart.
struct Piece {
  const void* first;
  int lines;
  int64_t stride;
};

// Asks for memory needed next, in the order in which it lies: blocks lie anywhere, so the
// hardware cannot guess what comes, and it stalls when asked for much at once.
class Fetcher {
 public:
  // All `count` pieces, each for every head, within `steps` steps.
  Fetcher(const Piece* pieces, int count, int heads, int64_t head_stride, int steps)
      : piece_(pieces), end_(pieces + count), heads_(heads), head_stride_(head_stride) {
    int asks = 0;
    for (int i = 0; i < count; i++) asks += heads * ((pieces[i].lines + kLines - 1) / kLines);
    share_ = (asks + steps - 1) / std::max(steps, 1);
    if (count) at_ = static_cast<const char*>(piece_->first);
  }

  void step() {
    for (int i = 0; i < share_ && piece_ != end_; i++) {
#pragma GCC unroll 4
      for (int line = 0; line < kLines; line++)
        __builtin_prefetch(at_ + line * piece_->stride, 0, 2);
      at_ += kLines * piece_->stride;
      line_ += kLines;
      if (line_ >= piece_->lines) turn();
    }
  }

 private:
  static constexpr int kLines = 4;  // at a time; past the end of a piece does no harm

  void turn() {
    line_ = 0;
    if (++head_ == heads_) {
      head_ = 0;
      if (++piece_ == end_) return;
    }
    at_ = static_cast<const char*>(piece_->first) + head_ * head_stride_;
  }

  const Piece* piece_;
  const Piece* end_;
  const char* at_ = nullptr;
  int line_ = 0, head_ = 0, heads_, share_;
  int64_t head_stride_;
};
