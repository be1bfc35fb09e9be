// Mamba's selective state space model (Gu and Dao 2023): each channel's state stays in registers
// for a block of tokens.

#include <algorithm>
#include <cstring>
#include <vector>

#include "state_calls.h"
#include "states.h"

namespace {

// A call. Strides are those of tokens, in elements.
struct SelectiveScan {
  StateRows rows;
  const void *x, *b, *c;
  int64_t x_stride, b_stride, c_stride;
  const void* dt;
  int64_t dt_stride;
  const float *a, *d, *dt_bias;
  void* out;
  int32_t channels, channels_per_row, state_size, dtype, dt_dtype, softplus;
};

constexpr int kChannels = 64;   // per item
constexpr int kTokens = kLanes > 8 ? kLanes : 8;  // at a time; whole vectors
constexpr int kMostVectors = 2;  // vectors of a state at a time

template <class T>
class Worker {
  using Stored = typename T::Stored;

 public:
  explicit Worker(const SelectiveScan& p)
      : p_(p), width_(whole_vectors(p.state_size)), b_(kTokens * width_), c_(b_.size()) {}

  void run(int seq, int first) {
    const int tokens = p_.rows.query_count(seq), start = p_.rows.first_token(seq);
    first_ = first;
    count_ = std::min(kChannels, p_.channels - first);
    for (int done = 0; done < tokens; done += kTokens) {
      const int now = std::min(kTokens, tokens - done);
      load_tokens(start + done, now);
      const bool is_new = p_.rows.is_new(seq) && !done;
      if (now > 1)
        for (int i = 0; i < count_; i++) scan_tokens(now, i, state(seq, first + i), is_new);
      else
        for (int i = 0; i < count_; i += kLanes) scan_channels(seq, i, is_new);
      for (int t = 0; t < now; t++)
        narrow<T>(results_[t], count_,
                  static_cast<Stored*>(p_.out) + int64_t{start + done + t} * p_.channels + first);
    }
  }

 private:
  float* state(int seq, int channel) const {
    return p_.rows.template row<float>(seq, channel / p_.channels_per_row) +
           channel % p_.channels_per_row * p_.state_size;
  }

  // Loads b, c, the step sizes and their products with x; sets the results to d * x.
  void load_tokens(int64_t token, int count) {
    for (int t = 0; t < count; t++, token++) {
      widen<T>(static_cast<const Stored*>(p_.b) + token * p_.b_stride, p_.state_size,
               &b_[t * width_]);
      widen<T>(static_cast<const Stored*>(p_.c) + token * p_.c_stride, p_.state_size,
               &c_[t * width_]);
      widen<T>(static_cast<const Stored*>(p_.x) + token * p_.x_stride + first_, count_,
               inputs_[t]);
      with_dtype(p_.dt_dtype, [&](auto type) {
        using StepType = decltype(type);
        const auto* dt = static_cast<const typename StepType::Stored*>(p_.dt);
        widen<StepType>(dt + token * p_.dt_stride + first_, count_, steps_[t]);
      });
      for (int i = 0; i < count_; i += kLanes) {
        Floats dt = load<Floats>(&steps_[t][i]);
        const Floats x = load<Floats>(&inputs_[t][i]);
        if (p_.dt_bias) dt += load_first<Floats>(p_.dt_bias + first_ + i, count_ - i);
        if (p_.softplus) dt = softplus(dt);
        store(&steps_[t][i], dt);
        store(&inputs_[t][i], x * dt);
        const Floats d =
            p_.d ? load_first<Floats>(p_.d + first_ + i, count_ - i) : Floats{};
        store(&results_[t][i], x * d);
      }
    }
  }

  // Updates a channel's state by some tokens, and adds its results.
  void scan_tokens(int count, int channel, float* state, bool is_new) {
    Floats sums[kTokens] = {};
    scan(count, channel, state, is_new, sums);
    for (int t = 0; t < count; t += kLanes) {
      float lanes[kLanes];
      store(lanes, sum_lanes(sums + t));
      for (int i = 0; i < std::min(kLanes, count - t); i++) results_[t + i][channel] += lanes[i];
    }
  }

  // Updates the states of a vector of channels by one token, and adds the results.
  void scan_channels(int seq, int channel, bool is_new) {
    Floats sums[kLanes] = {};
    for (int i = 0; i < std::min(kLanes, count_ - channel); i++)
      scan(1, channel + i, state(seq, first_ + channel + i), is_new, sums + i);
    float* results = &results_[0][channel];
    store(results, load<Floats>(results) + sum_lanes(sums));
  }

  // Adds to sums[t] the products of token t's state and its c.
  void scan(int count, int channel, float* state, bool is_new, Floats* sums) {
    for (int at = 0; at < p_.state_size;) {
      const int left = p_.state_size - at;
      if (left >= kMostVectors * kLanes)
        scan_vectors<kMostVectors>(count, channel, at, state, is_new, sums);
      else
        scan_vectors<1>(count, channel, at, state, is_new, sums);
      at += left >= kMostVectors * kLanes ? kMostVectors * kLanes : kLanes;
    }
  }

  template <int kVectors>
  void scan_vectors(int count, int channel, int at, float* state, bool is_new, Floats* sums) {
    const float* a = p_.a + int64_t{first_ + channel} * p_.state_size;
    Floats h[kVectors], rates[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      const int element = at + v * kLanes, left = p_.state_size - element;
      h[v] = is_new ? Floats{} : load_first<Floats>(state + element, left);
      rates[v] = load_first<Floats>(a + element, left) * kLog2OfE;
    }
    for (int t = 0; t < count; t++) {
      const float dt = steps_[t][channel], input = inputs_[t][channel];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        const int element = t * width_ + at + v * kLanes;
        h[v] = h[v] * power_of_2(rates[v] * dt) + load<Floats>(&b_[element]) * input;
        sums[t] += h[v] * load<Floats>(&c_[element]);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      const int element = at + v * kLanes;
      store_first(state + element, p_.state_size - element, h[v]);
    }
  }

  const SelectiveScan& p_;
  const int width_;  // of a state, in whole vectors
  int first_ = 0, count_ = 0;
  std::vector<float> b_, c_;
  float steps_[kTokens][kChannels], inputs_[kTokens][kChannels], results_[kTokens][kChannels];
};

template <class T>
void run(const SelectiveScan& p, int threads) {
  const int per_seq = (p.channels + kChannels - 1) / kChannels;
  const int items = per_seq * p.rows.num_seqs;
#pragma omp parallel num_threads(threads) if (items > 1)
  {
    Worker<T> worker(p);
#pragma omp for schedule(dynamic)
    for (int item = 0; item < items; item++)
      if (!p.rows.is_padding(item / per_seq))
        worker.run(item / per_seq, item % per_seq * kChannels);
  }
}

// See octavo.kernels.states.
void selective_scan(const Result& result, const View& x, const View& dt, const View& a,
                    const View& b, const View& c, int64_t state, const View* d,
                    const View* dt_bias, bool softplus) {
  const Stopwatch stopwatch(spent.states);
  const StateCache& cache = step.states[state];
  const int channels = x.sizes[1], per_row = cache.row_shape[0];
  void* const out = result.make({x.sizes[0], channels}, x.dtype);
  const SelectiveScan call{rows_of(cache), tokens(x).data, tokens(b).data, tokens(c).data,
                           x.strides[0], b.strides[0], c.strides[0], tokens(dt).data,
                           dt.strides[0], elements(&a), elements(d), elements(dt_bias), out,
                           channels, per_row, cache.row_shape[1], dtype_number(x.dtype),
                           dtype_number(dt.dtype), softplus};
  call.rows.check((channels + per_row - 1) / per_row);
  with_dtype(call.dtype, [&](auto type) {
    using T = decltype(type);
    call.rows.clear_padding(out, sizeof(typename T::Stored) * channels);
    run<T>(call, num_threads());
  });
}
OCTAVO_OPERATOR(selective_scan)

}  // namespace
