// Convolutions of each channel over its latest inputs.

#include <algorithm>
#include <cstring>
#include <utility>

#include "state_calls.h"
#include "states.h"

namespace {

// A call. Strides are those of tokens, in elements.
struct CausalConv {
  StateRows rows;
  const void* x;
  int64_t x_stride;
  const void *weight, *bias;
  void* out;
  int32_t channels, channels_per_row, width, dtype, weight_dtype, silu;
};

constexpr int kChannels = 64;  // per item
constexpr int kAhead = 16;     // tokens between computing and prefetching
constexpr int kVectors = std::max(1, 32 / kLanes);  // computed together: a cache line of 16 bits
constexpr int kMostWidth = 8;

// Copies elements as floats, with zeros up to a whole vector.
void widen_any(const void* from, int64_t first, int count, int dtype, float* to) {
  with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    widen<T>(static_cast<const typename T::Stored*>(from) + first, count, to);
  });
}

template <class T, int kWidth>
class Worker {
  using Stored = typename T::Stored;
  static constexpr int kPast = kWidth - 1;
  static constexpr std::make_index_sequence<kLanes> kEach{};

 public:
  explicit Worker(const CausalConv& p) : p_(p) {}

  // Computes the channels of an item for all sequences.
  void run(int first) {
    first_ = first;
    count_ = std::min(kChannels, p_.channels - first);
    float weights[kChannels * kWidth + kLanes];
    widen_any(p_.weight, int64_t{first} * kWidth, count_ * kWidth, p_.weight_dtype, weights);
    std::fill(weights + count_ * kWidth, weights + kChannels * kWidth, 0.f);
    take_columns<kWidth>(weights, kChannels, taps_, 0);
    std::memset(bias_, 0, sizeof bias_);
    if (p_.bias) widen_any(p_.bias, first, count_, p_.weight_dtype, bias_);
    for (int seq = 0; seq < p_.rows.num_seqs; seq++)
      if (!p_.rows.is_padding(seq)) run_sequence(seq);
  }

 private:
  // Copies rows of kColumns to columns[i][first + row]. Whole vectors of rows are readable.
  template <int kColumns>
  static void take_columns(const float* rows, int count, float (*columns)[kChannels], int first) {
    int row = 0;
    if constexpr (kColumns == 3)
      for (; row + kLanes <= count; row += kLanes) {
        Floats three[3];
        for (int i = 0; i < 3; i++) three[i] = load<Floats>(rows + row * 3 + i * kLanes);
        store(&columns[0][first + row], column_of_3<0>(three, kEach));
        store(&columns[1][first + row], column_of_3<1>(three, kEach));
        store(&columns[2][first + row], column_of_3<2>(three, kEach));
      }
    for (; row < count; row++)
#pragma GCC unroll 8
      for (int i = 0; i < kColumns; i++) columns[i][first + row] = rows[row * kColumns + i];
  }

  // Copies past_ back to rows.
  void put_columns(int first, int count, float* rows) const {
    int row = 0;
    if constexpr (kPast == 3)
      for (; row + kLanes <= count; row += kLanes) {
        Floats three[3];
        for (int i = 0; i < 3; i++) three[i] = load<Floats>(&past_[i][first + row]);
        store(rows + row * 3, rows_of_3<0>(three, kEach));
        store(rows + row * 3 + kLanes, rows_of_3<1>(three, kEach));
        store(rows + row * 3 + 2 * kLanes, rows_of_3<2>(three, kEach));
      }
    for (; row < count; row++)
#pragma GCC unroll 8
      for (int i = 0; i < kPast; i++) rows[row * kPast + i] = past_[i][first + row];
  }

  void run_sequence(int seq) {
    const int tokens = p_.rows.query_count(seq), start = p_.rows.first_token(seq);
    read_state(seq);
    int channel = 0;
    for (; channel + kVectors * kLanes <= count_; channel += kVectors * kLanes)
      convolve<kVectors>(start, tokens, channel);
    for (; channel < count_; channel += kLanes) convolve<1>(start, tokens, channel);
    write_state(seq);
  }

  // Computes some vectors of channels, and leaves their last inputs in past_. Rows of inputs are so
  // far apart that caches keep few of their lines, so this uses each line once.
  template <int kCount>
  void convolve(int64_t token, int tokens, int channel) {
    Floats past[kCount][kPast + 1], taps[kCount][kWidth], bias[kCount];
    for (int v = 0; v < kCount; v++) {
      const int at = channel + v * kLanes;
      for (int i = 0; i < kPast; i++) past[v][i] = load<Floats>(&past_[i][at]);
      for (int i = 0; i < kWidth; i++) taps[v][i] = load<Floats>(&taps_[i][at]);
      bias[v] = load<Floats>(&bias_[at]);
    }
    const int wide = std::min(kCount * kLanes, count_ - channel);
    const auto* x = static_cast<const Stored*>(p_.x) + token * p_.x_stride + first_ + channel;
    auto* out = static_cast<Stored*>(p_.out) + token * p_.channels + first_ + channel;
    for (int t = 0; t < tokens; t++, x += p_.x_stride, out += p_.channels) {
      __builtin_prefetch(x + kAhead * p_.x_stride);
#pragma GCC unroll 8
      for (int v = 0; v < kCount; v++) {
        past[v][kPast] = load_some(x + v * kLanes, wide);
        Floats sum = bias[v];
#pragma GCC unroll 8
        for (int i = 0; i < kWidth; i++) sum += past[v][i] * taps[v][i];
#pragma GCC unroll 8
        for (int i = 0; i < kPast; i++) past[v][i] = past[v][i + 1];
        if (p_.silu) sum = sum / (power_of_e(-sum) + 1.f);
        store_some(out + v * kLanes, wide, sum);
      }
    }
    for (int v = 0; v < kCount; v++)
      for (int i = 0; i < kPast; i++) store(&past_[i][channel + v * kLanes], past[v][i]);
  }

  static Floats load_some(const Stored* from, int count) {
    if (count >= kLanes) return T::load_floats(from);
    float wide[kLanes];
    widen<T>(from, count, wide);
    return load<Floats>(wide);
  }

  static void store_some(Stored* to, int count, Floats v) {
    if (count >= kLanes) return T::store_floats(to, v);
    float wide[kLanes];
    store(wide, v);
    narrow<T>(wide, count, to);
  }

  // Calls work(address in a row of the state, index of its first channel, number of channels) for
  // each row that holds some of the item's channels.
  template <class Work>
  void for_each_row(int seq, Work work) {
    for (int i = 0; i < count_;) {
      const int row = (first_ + i) / p_.channels_per_row;
      const int within = (first_ + i) % p_.channels_per_row;
      const int count = std::min(count_ - i, p_.channels_per_row - within);
      work(p_.rows.template row<Stored>(seq, row) + within * kPast, i, count);
      i += count;
    }
  }

  void read_state(int seq) {
    if (p_.rows.is_new(seq)) {
      std::memset(past_, 0, sizeof past_);
      return;
    }
    for_each_row(seq, [&](const Stored* from, int channel, int count) {
      float wide[(kChannels + kLanes) * kPast];
      widen<T>(from, count * kPast, wide);
      take_columns<kPast>(wide, count, past_, channel);
    });
  }

  void write_state(int seq) {
    for_each_row(seq, [&](Stored* to, int channel, int count) {
      float wide[(kChannels + kLanes) * kPast];
      put_columns(channel, count, wide);
      narrow<T>(wide, count * kPast, to);
    });
  }

  const CausalConv& p_;
  int first_ = 0, count_ = 0;
  float taps_[kWidth][kChannels], bias_[kChannels], past_[kPast][kChannels];
};

template <class T, int kWidth>
void run(const CausalConv& p, int threads) {
  const int items = (p.channels + kChannels - 1) / kChannels;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (items > 1)
  for (int item = 0; item < items; item++) Worker<T, kWidth>(p).run(item * kChannels);
}

template <class T, int kWidth = kMostWidth>
void run_width(const CausalConv& p, int threads) {
  if (p.width == kWidth) return run<T, kWidth>(p, threads);
  if constexpr (kWidth > 2) run_width<T, kWidth - 1>(p, threads);
}

// See octavo.kernels.states.
void causal_conv(const Result& result, const View& x, const View& weight, const View* bias,
                 int64_t state, bool silu) {
  const Stopwatch stopwatch(spent.states);
  const StateCache& cache = step.states[state];
  const int channels = x.sizes[1], per_row = cache.row_shape[0];
  void* const out = result.make({x.sizes[0], channels}, x.dtype);
  const CausalConv call{rows_of(cache), tokens(x).data, x.strides[0],
                        elements<void>(&weight, weight.dtype), elements<void>(bias, weight.dtype),
                        out, channels, per_row, int(weight.sizes[1]), dtype_number(x.dtype),
                        dtype_number(weight.dtype), silu};
  call.rows.check((channels + per_row - 1) / per_row);
  with_dtype(call.dtype, [&](auto type) {
    using T = decltype(type);
    call.rows.clear_padding(out, sizeof(typename T::Stored) * channels);
    run_width<T>(call, num_threads());
  });
}
OCTAVO_OPERATOR(causal_conv)

}  // namespace
