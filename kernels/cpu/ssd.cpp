// Mamba-2's state space model (Dao and Gu 2024): chunks of tokens as products, few tokens in turn.
//
// In a chunk of tokens, with the running sums G of a * dt, token t returns
//
//   exp(G_t) S c_t + sum over j <= t of exp(G_t - G_j) (c_t b_j) dt_j x_j
//
// (section 6), and all factors are at most 1. The state S is [head_dim][state_size], so that
// results are columns of S C: the lanes of a vector are tokens.

#include <algorithm>
#include <cstring>
#include <vector>

#include "state_calls.h"
#include "states.h"

namespace {

// A call. Strides are those of tokens, in elements.
struct Ssd {
  StateRows rows;
  const void *x, *b, *c;
  int64_t x_stride, b_stride, c_stride;
  const float *dt, *a, *d, *dt_bias;
  void* out;
  int32_t heads, head_dim, groups, state_size, dtype, softplus;
  float least_dt, greatest_dt;
};

constexpr int kTokens = std::max(16, kMicroColumns * kLanes);  // per chunk
constexpr int kFew = 3;            // maximum tokens for which one by one is faster
constexpr int kMostHeads = 8;      // per item: their states stay in a core's cache
constexpr int kItemsPerThread = 4;

template <class T>
class Worker {
  using Stored = typename T::Stored;

 public:
  explicit Worker(const Ssd& p)
      : p_(p), width_(whole_vectors(p.state_size)), b_(kTokens * width_), weighted_(b_.size()),
        c_(kTokens * width_), columns_(int64_t{p.state_size} * kTokens),
        products_(kTokens * kTokens), weights_(kTokens * kTokens),
        x_(int64_t{whole_vectors(p.head_dim)} * kTokens), results_(x_.size()),
        wide_(int64_t{kTokens} * whole_vectors(p.head_dim)), ones_(p.head_dim, 1.f),
        decays_(p.head_dim) {
    if (width_ != p.state_size) padded_.resize(int64_t{kMostHeads} * p.head_dim * width_);
  }

  // Computes heads [first, first + count) of one group.
  void run(int seq, int first, int count) {
    const int tokens = p_.rows.query_count(seq), start = p_.rows.first_token(seq);
    const int group = first / (p_.heads / p_.groups);
    for (int i = 0; i < count; i++) open(seq, first + i, i);
    for (int done = 0; done < tokens;) {
      const int left = tokens - done, now = left <= kFew ? 1 : std::min(kTokens, left);
      load_tokens(start + done, now, group);
      if (now > 1) compare(now);
      for (int i = 0; i < count; i++) {
        if (now > 1)
          run_chunk(start + done, now, first + i, states_[i]);
        else
          run_token(start + done, first + i, states_[i]);
      }
      done += now;
    }
    for (int i = 0; i < count; i++) close(seq, first + i, i);
  }

 private:
  // Sets states_[index] to the state of a head, in rows of whole vectors.
  void open(int seq, int head, int index) {
    float* row = p_.rows.template row<float>(seq, head);
    const bool in_place = padded_.empty();
    states_[index] = in_place ? row : &padded_[int64_t{index} * p_.head_dim * width_];
    if (p_.rows.is_new(seq))
      std::fill_n(states_[index], int64_t{p_.head_dim} * width_, 0.f);
    else if (!in_place)
      for (int i = 0; i < p_.head_dim; i++)
        widen<Float32>(row + i * p_.state_size, p_.state_size, states_[index] + i * width_);
  }

  void close(int seq, int head, int index) {
    if (padded_.empty()) return;
    float* row = p_.rows.template row<float>(seq, head);
    for (int i = 0; i < p_.head_dim; i++)
      std::copy_n(states_[index] + i * width_, p_.state_size, row + i * p_.state_size);
  }

  // Loads b and c of a chunk of tokens.
  void load_tokens(int token, int count, int group) {
    const int64_t at = int64_t{group} * p_.state_size;
    for (int t = 0; t < count; t++) {
      const int64_t row = token + t;
      widen<T>(static_cast<const Stored*>(p_.b) + row * p_.b_stride + at, p_.state_size,
               &b_[t * width_]);
      widen<T>(static_cast<const Stored*>(p_.c) + row * p_.c_stride + at, p_.state_size,
               &c_[t * width_]);
    }
  }

  // Computes the products of all b (rows) and c (columns) of a chunk.
  void compare(int count) {
    for (int i = 0; i < p_.state_size; i++) {
      for (int t = 0; t < count; t++) columns_[i * kTokens + t] = c_[t * width_ + i];
      for (int t = count; t < kTokens; t++) columns_[i * kTokens + t] = 0;
    }
    multiply(count, p_.state_size, b_.data(), width_, {columns_.data(), kTokens},
             num_vectors(count), products_.data(), kTokens, nullptr);
  }

  // Sets the step sizes of some tokens, with zeros up to a whole vector.
  void load_steps(int token, int count, int head, float* steps) const {
    for (int t = 0; t < count; t++) steps[t] = p_.dt[int64_t{token + t} * p_.heads + head];
    std::fill(steps + count, steps + whole_vectors(count), 0.f);
    for (int t = 0; t < count; t += kLanes) {
      Floats dt = load<Floats>(steps + t);
      if (p_.dt_bias) dt += p_.dt_bias[head];
      if (p_.softplus) dt = softplus(dt);
      store(steps + t, min(max(dt, broadcast(p_.least_dt)), broadcast(p_.greatest_dt)));
    }
    std::fill(steps + count, steps + whole_vectors(count), 0.f);
  }

  void run_chunk(int token, int count, int head, float* state) {
    const int dim = p_.head_dim, vectors = num_vectors(count);
    float dt[kTokens], sums[kTokens], total = 0;
    load_steps(token, count, head, dt);
    for (int t = 0; t < vectors * kLanes; t++) sums[t] = total += p_.a[head] * dt[t];
    load_x(token, count, head, dt);
    // Computes the old state's results, [head_dim][tokens].
    multiply(dim, p_.state_size, state, width_, {columns_.data(), kTokens}, vectors,
             results_.data(), kTokens, nullptr);
    for (int v = 0; v < vectors; v++) {
      const Floats decay = power_of_e(load<Floats>(sums + v * kLanes));
      for (int i = 0; i < dim; i++) {
        float* result = &results_[i * kTokens + v * kLanes];
        store(result, load<Floats>(result) * decay);
      }
    }
    weigh(count, sums);
    multiply(dim, count, x_.data(), kTokens, {weights_.data(), kTokens}, vectors, results_.data(),
             kTokens, ones_.data());
    // Computes the state after the chunk.
    for (int t = 0; t < count; t++) {
      const float decay = power_of_e(total - sums[t]);
      for (int i = 0; i < width_; i += kLanes)
        store(&weighted_[t * width_ + i], load<Floats>(&b_[t * width_ + i]) * decay);
    }
    std::fill(decays_.begin(), decays_.end(), power_of_e(total));
    multiply(dim, count, x_.data(), kTokens, {weighted_.data(), width_}, width_ / kLanes, state,
             width_, decays_.data());
    store_results(token, count, head);
  }

  // Loads x as columns x_[i][t], times dt, and as rows wide_[t][i].
  void load_x(int token, int count, int head, const float* dt) {
    const int dim = p_.head_dim, width = whole_vectors(dim);
    for (int t = 0; t < count; t++) {
      widen<T>(static_cast<const Stored*>(p_.x) + (token + t) * p_.x_stride + head * dim, dim,
               &wide_[t * width]);
      for (int i = 0; i < dim; i++) x_[i * kTokens + t] = wide_[t * width + i] * dt[t];
    }
  }

  // Sets weights_[j][t] to the weight of token j's input in token t's result.
  void weigh(int count, const float* sums) {
    for (int j = 0; j < count; j++) {
      float* row = &weights_[j * kTokens];
      for (int t = 0; t < count; t += kLanes) {
        const Floats decay = power_of_e(load<Floats>(sums + t) - sums[j]);
        store(row + t, load<Floats>(&products_[j * kTokens + t]) * decay);
      }
      std::fill_n(row, j, 0.f);
    }
  }

  void store_results(int token, int count, int head) {
    const int dim = p_.head_dim, width = whole_vectors(dim);
    const float skip = p_.d ? p_.d[head] : 0.f;
    for (int t = 0; t < count; t++) {
      float* row = &wide_[t * width];
      for (int i = 0; i < dim; i++) row[i] = row[i] * skip + results_[i * kTokens + t];
      narrow<T>(row, dim, out(token + t, head));
    }
  }

  void run_token(int token, int head, float* state) {
    const int dim = p_.head_dim;
    float* x = wide_.data();
    widen<T>(static_cast<const Stored*>(p_.x) + token * p_.x_stride + head * dim, dim, x);
    float dt[kLanes];
    load_steps(token, 1, head, dt);
    const float skip = p_.d ? p_.d[head] : 0.f;
    const Floats decay = broadcast(power_of_e(p_.a[head] * dt[0]));
    for (int i = 0; i < dim; i += kLanes) {
      Floats sums[kLanes] = {};
      for (int lane = 0; lane < std::min(kLanes, dim - i); lane++)
        sums[lane] = update(state + int64_t{i + lane} * width_, decay, x[i + lane] * dt[0]);
      store(x + i, load<Floats>(x + i) * skip + sum_lanes(sums));
    }
    narrow<T>(x, dim, out(token, head));
  }

  // Updates one row of the state; returns the sums of its product with c.
  Floats update(float* row, Floats decay, float input) const {
    Floats sum{};
    for (int i = 0; i < width_; i += kLanes) {
      const Floats s = load<Floats>(row + i) * decay + load<Floats>(&b_[i]) * input;
      store(row + i, s);
      sum += s * load<Floats>(&c_[i]);
    }
    return sum;
  }

  Stored* out(int64_t token, int head) const {
    return static_cast<Stored*>(p_.out) + (token * p_.heads + head) * p_.head_dim;
  }

  const Ssd& p_;
  const int width_;  // of a row of the state, in whole vectors
  float* states_[kMostHeads];
  std::vector<float> b_, weighted_, c_, columns_, products_, weights_;
  std::vector<float> x_, results_, wide_, ones_, decays_, padded_;
};

template <class T>
void run(const Ssd& p, int threads) {
  const int group = p.heads / p.groups, seqs = p.rows.num_seqs;
  const int shared = int64_t{p.heads} * seqs / (int64_t{kItemsPerThread} * threads);
  const int heads = std::clamp(shared, 1, std::min(kMostHeads, group));
  const int per_group = (group + heads - 1) / heads, per_seq = per_group * p.groups;
#pragma omp parallel num_threads(threads) if (per_seq * seqs > 1)
  {
    Worker<T> worker(p);
#pragma omp for schedule(dynamic)
    for (int item = 0; item < per_seq * seqs; item++) {
      const int seq = item / per_seq, part = item % per_seq;
      const int begin = part % per_group * heads;
      if (p.rows.is_padding(seq)) continue;
      worker.run(seq, part / per_group * group + begin, std::min(heads, group - begin));
    }
  }
}

// See octavo.kernels.states.
void ssd(const Result& result, const View& x, const View& dt, const View& a, const View& b,
         const View& c, int64_t state, const View* d, const View* dt_bias, bool softplus,
         double least_dt, double most_dt) {
  const Stopwatch stopwatch(spent.states);
  const int heads = x.sizes[1], head_dim = x.sizes[2];
  void* const out = result.make({x.sizes[0], heads, head_dim}, x.dtype);
  const Ssd call{rows_of(step.states[state]), tokens(x).data, tokens(b).data, tokens(c).data,
                 x.strides[0], b.strides[0], c.strides[0], elements(&dt), elements(&a),
                 elements(d), elements(dt_bias), out, heads, head_dim, int(b.sizes[1]),
                 int(b.sizes[2]), dtype_number(x.dtype), softplus, float(least_dt), float(most_dt)};
  call.rows.check(heads);
  with_dtype(call.dtype, [&](auto type) {
    using T = decltype(type);
    call.rows.clear_padding(out, sizeof(typename T::Stored) * heads * head_dim);
    run<T>(call, num_threads());
  });
}
OCTAVO_OPERATOR(ssd)

}  // namespace
