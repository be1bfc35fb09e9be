// The gated delta rule (Gated DeltaNet, Yang et al. 2024): chunks of tokens as products, few tokens
// in turn.
//
// In a chunk, let D_i be the product of the decays up to token i, and S the state before it. Token
// i changes the state by k_i u_i^T, with
//
//   u_i = beta_i (v_i - (D_i k_i) S - sum over j < i of (k_i . k_ji) u_j)
//
// where k_ji is k_j decayed from token j to token i, and returns (D_i q_i) S plus the sum over
// j <= i of (q_i . k_ji) u_j. The u_i are solved in turn: the UT transform of section 3.3 without
// the inverse. Decays are multiplied up token by token: all factors are at most 1, for any decay,
// also for a decay of each key element (Kimi Delta Attention).

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "state_calls.h"
#include "states.h"

namespace {

// A call. Strides are those of tokens, in elements.
struct GatedDelta {
  StateRows rows;
  const void *query, *key, *value;
  int64_t query_stride, key_stride, value_stride;
  const float *g, *beta;
  void* out;
  int32_t key_heads, value_heads, key_dim, value_dim, dtype, decays_elements, normalize;
  float scale;
};

constexpr int kTokens = 16;      // per chunk
constexpr int kFew = 2;          // maximum tokens for which one by one is faster
constexpr int kPadding = kFloatsPerLine;  // else rows would share few cache sets
constexpr int kTileVectors = 4;  // columns of the state at a time for one token
constexpr int kItemsPerThread = 2;
constexpr float kEpsilon = 1e-6f;  // added to squared lengths

inline float dot(const float* a, const float* b, int width) {
  Floats sum{};
  for (int i = 0; i < width; i += kLanes) sum += load<Floats>(a + i) * load<Floats>(b + i);
  return reduce_add(sum);
}

// Columns [begin, end) of a head's state and values.
struct Item {
  int seq, head, begin, end;
};

template <class T>
class Worker {
  using Stored = typename T::Stored;

 public:
  explicit Worker(const GatedDelta& p)
      : p_(p), key_width_(whole_vectors(p.key_dim)), width_(whole_vectors(p.value_dim)),
        reading_(2 * kTokens * key_width_), keys_(kTokens * key_width_), key_(key_width_),
        query_(key_width_), decay_(key_width_), total_(key_width_),
        columns_(key_width_ * kTokens), known_(2 * kTokens * width_), changes_(kTokens * width_),
        ones_(kTokens, 1.f) {}

  // Computes an item, and prefetches the next item's state `next` unless it is null.
  void run(const Item& item, const float* next) {
    const int tokens = p_.rows.query_count(item.seq), start = p_.rows.first_token(item.seq);
    columns_of_item_ = whole_vectors(item.end - item.begin);
    in_place_ = tokens <= kFew && width_ == p_.value_dim;
    open(item);
    for (int done = 0; done < tokens;) {
      const int left = tokens - done, now = left <= kFew ? 1 : std::min(kTokens, left);
      if (now > 1)
        run_chunk(start + done, now, item);
      else
        run_token(start + done, item, left == 1 ? next : nullptr);
      done += now;
    }
    close(item);
  }

 private:
  // Sets state_ to an item's columns of the state; rows are whole vectors, stride_ apart.
  void open(const Item& item) {
    float* row = p_.rows.template row<float>(item.seq, item.head) + item.begin;
    stride_ = in_place_ ? p_.value_dim : width_ + kPadding;
    if (!in_place_) copy_.resize(int64_t{p_.key_dim} * stride_);
    state_ = in_place_ ? row : copy_.data();
    for (int i = 0; i < p_.key_dim; i++) {
      float* to = state_ + i * stride_;
      if (p_.rows.is_new(item.seq))
        std::fill_n(to, columns_of_item_, 0.f);
      else if (!in_place_)
        widen<Float32>(row + i * p_.value_dim, item.end - item.begin, to);
    }
  }

  void close(const Item& item) {
    if (in_place_) return;
    float* row = p_.rows.template row<float>(item.seq, item.head) + item.begin;
    for (int i = 0; i < p_.key_dim; i++)
      std::copy_n(state_ + i * stride_, item.end - item.begin, row + i * p_.value_dim);
  }

  // Loads a token's query, key and decays, scaled and normalized.
  void load_token(int64_t token, int head) {
    const int key_head = head / (p_.value_heads / p_.key_heads) * p_.key_dim;
    widen<T>(static_cast<const Stored*>(p_.query) + token * p_.query_stride + key_head, p_.key_dim,
             query_.data());
    widen<T>(static_cast<const Stored*>(p_.key) + token * p_.key_stride + key_head, p_.key_dim,
             key_.data());
    scale(query_.data(), p_.scale);
    scale(key_.data(), 1.f);
    const int64_t at = token * p_.value_heads + head;
    if (!p_.decays_elements) {
      const Floats decay = power_of_e(broadcast(p_.g[at]));
      for (int i = 0; i < key_width_; i += kLanes) store(&decay_[i], decay);
      return;
    }
    widen<Float32>(p_.g + at * p_.key_dim, p_.key_dim, decay_.data());
    for (int i = 0; i < key_width_; i += kLanes) store(&decay_[i], power_of_e(load<Floats>(&decay_[i])));
  }

  void scale(float* x, float factor) const {
    if (p_.normalize) factor /= std::sqrt(dot(x, x, key_width_) + kEpsilon);
    for (int i = 0; i < key_width_; i += kLanes) store(x + i, load<Floats>(x + i) * factor);
  }

  void run_chunk(int token, int count, const Item& item) {
    const int columns = columns_of_item_;
    std::fill(total_.begin(), total_.end(), 1.f);
    for (int i = 0; i < count; i++) {
      load_token(token + i, item.head);
      compare(i, count);
    }
    // Fills known_: first the old state's values for the keys, then the queries' results.
    multiply(2 * count, p_.key_dim, reading_.data(), key_width_, {state_, stride_},
             columns / kLanes, known_.data(), width_, nullptr);
    for (int i = 0; i < count; i++) solve(i, token + i, item);
    float* results = &known_[count * width_];
    multiply(count, count, by_query_[0], kTokens, {changes_.data(), width_}, columns / kLanes,
             results, width_, ones_.data());
    for (int i = 0; i < p_.key_dim; i++)
      for (int j = 0; j < count; j++) columns_[i * kTokens + j] = keys_[j * key_width_ + i];
    multiply(p_.key_dim, count, columns_.data(), kTokens, {changes_.data(), width_},
             columns / kLanes, state_, stride_, total_.data());
    for (int i = 0; i < count; i++)
      narrow<T>(results + i * width_, item.end - item.begin, out(token + i, item));
  }

  // Decays the chunk's earlier keys to token i, and multiplies them by its key and query.
  void compare(int i, int count) {
    for (int at = 0; at < key_width_; at += kLanes) {
      const Floats total = load<Floats>(&total_[at]) * load<Floats>(&decay_[at]);
      store(&total_[at], total);
      store(&reading_[i * key_width_ + at], load<Floats>(&key_[at]) * total);
      store(&reading_[(count + i) * key_width_ + at], load<Floats>(&query_[at]) * total);
    }
    for (int j = 0; j < i; j++) {
      float* earlier = &keys_[j * key_width_];
      Floats by_key{}, by_query{};
      for (int at = 0; at < key_width_; at += kLanes) {
        const Floats key = load<Floats>(earlier + at) * load<Floats>(&decay_[at]);
        store(earlier + at, key);
        by_key += key * load<Floats>(&key_[at]);
        by_query += key * load<Floats>(&query_[at]);
      }
      by_key_[i][j] = reduce_add(by_key);
      by_query_[i][j] = reduce_add(by_query);
    }
    by_query_[i][i] = dot(key_.data(), query_.data(), key_width_);
    std::fill(by_query_[i] + i + 1, by_query_[i] + count, 0.f);
    std::copy(key_.begin(), key_.end(), &keys_[i * key_width_]);
  }

  // Computes row i of changes_ from the rows before it.
  void solve(int i, int64_t token, const Item& item) {
    float* change = &changes_[i * width_];
    widen<T>(value(token, item), item.end - item.begin, change);
    const float beta = p_.beta[token * p_.value_heads + item.head];
    for (int at = 0; at < columns_of_item_; at += kLanes) {
      Floats known = load<Floats>(&known_[i * width_ + at]);
      for (int j = 0; j < i; j++) known += load<Floats>(&changes_[j * width_ + at]) * by_key_[i][j];
      store(change + at, (load<Floats>(change + at) - known) * beta);
    }
  }

  void run_token(int64_t token, const Item& item, const float* next) {
    load_token(token, item.head);
    const float key_dot_query = dot(key_.data(), query_.data(), key_width_);
    for (int i = 0; i < key_width_; i += kLanes) {
      const Floats decay = load<Floats>(&decay_[i]);
      store(&reading_[i], load<Floats>(&key_[i]) * decay);
      store(&reading_[key_width_ + i], load<Floats>(&query_[i]) * decay);
    }
    widen<T>(value(token, item), item.end - item.begin, changes_.data());
    const float beta = p_.beta[token * p_.value_heads + item.head];
    int at = 0;
    for (; at + kTileVectors * kLanes <= columns_of_item_; at += kTileVectors * kLanes)
      update<kTileVectors>(at, beta, key_dot_query, next);
    for (; at < columns_of_item_; at += kLanes) update<1>(at, beta, key_dot_query, next);
    narrow<T>(known_.data(), item.end - item.begin, out(token, item));
  }

  // Reads kVectors columns of the state for one token, then updates them. Prefetches the columns
  // after them, or those of the next item.
  template <int kVectors>
  void update(int column, float beta, float key_dot_query, const float* next) {
    constexpr int kWidth = kVectors * kLanes;
    const float* ahead = column + kWidth < columns_of_item_ ? state_ + column + kWidth : next;
    float* state = state_ + column;
    Floats known[kVectors] = {}, result[kVectors] = {};
    for (int i = 0; i < p_.key_dim; i++) {
#pragma GCC unroll 4
      for (int line = 0; ahead && line < kWidth; line += kFloatsPerLine)
        __builtin_prefetch(ahead + i * stride_ + line);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        const Floats s = load<Floats>(state + i * stride_ + v * kLanes);
        known[v] += s * reading_[i];
        result[v] += s * reading_[key_width_ + i];
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      const int at = column + v * kLanes;
      known[v] = (load<Floats>(&changes_[at]) - known[v]) * beta;
      store(&known_[at], result[v] + known[v] * key_dot_query);
    }
    for (int i = 0; i < p_.key_dim; i++)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) {
        float* s = state + i * stride_ + v * kLanes;
        store(s, load<Floats>(s) * decay_[i] + known[v] * key_[i]);
      }
  }

  const Stored* value(int64_t token, const Item& item) const {
    return static_cast<const Stored*>(p_.value) + token * p_.value_stride +
           item.head * p_.value_dim + item.begin;
  }

  Stored* out(int64_t token, const Item& item) const {
    return static_cast<Stored*>(p_.out) +
           (token * p_.value_heads + item.head) * p_.value_dim + item.begin;
  }

  const GatedDelta& p_;
  const int key_width_, width_;  // of a key and of a value, in whole vectors
  int columns_of_item_ = 0, stride_ = 0;
  bool in_place_ = false;
  float* state_ = nullptr;
  float by_key_[kTokens][kTokens], by_query_[kTokens][kTokens];
  std::vector<float> reading_, keys_, key_, query_, decay_, total_;
  std::vector<float> columns_, known_, changes_, ones_, copy_;
};

// Divides heads, and also their values if not every thread has work otherwise.
std::vector<Item> make_items(const GatedDelta& p, int threads) {
  const StateRows& rows = p.rows;
  const int whole = std::max(1, rows.num_seqs * p.value_heads);
  const int wanted = (kItemsPerThread * threads + whole - 1) / whole;
  const int vectors = num_vectors(p.value_dim), tiles = (vectors + kTileVectors - 1) / kTileVectors;
  const int step = (tiles + std::min(wanted, tiles) - 1) / std::min(wanted, tiles);
  std::vector<Item> items;
  for (int seq = 0; seq < rows.num_seqs; seq++)
    for (int head = 0; head < p.value_heads && !rows.is_padding(seq); head++)
      for (int tile = 0; tile < tiles; tile += step) {
        const int begin = tile * kTileVectors * kLanes;
        const int end = std::min(begin + step * kTileVectors * kLanes, p.value_dim);
        items.push_back({seq, head, begin, end});
      }
  return items;
}

template <class T>
void run(const GatedDelta& p, int threads) {
  const std::vector<Item> items = make_items(p, threads);
  const int count = items.size();
  const bool in_place = p.value_dim % kLanes == 0;
#pragma omp parallel num_threads(threads) if (count > 1)
  {
    Worker<T> worker(p);
#pragma omp for schedule(dynamic, 2)
    for (int i = 0; i < count; i++) {
      const float* next = nullptr;
      if (in_place && i + 1 < count && !p.rows.is_new(items[i + 1].seq)) {
        const Item& item = items[i + 1];
        next = p.rows.template row<float>(item.seq, item.head) + item.begin;
      }
      worker.run(items[i], next);
    }
  }
}

// See octavo.kernels.states.
void gated_delta(const Result& result, const View& query, const View& key, const View& value,
                 const View& g, const View& beta, int64_t state, double scale, bool normalize) {
  const Stopwatch stopwatch(spent.states);
  const int heads = value.sizes[1], value_dim = value.sizes[2];
  void* const out = result.make({value.sizes[0], heads, value_dim}, value.dtype);
  const GatedDelta call{rows_of(step.states[state]), tokens(query).data, tokens(key).data,
                        tokens(value).data, query.strides[0], key.strides[0], value.strides[0],
                        elements(&g), elements(&beta), out, int(key.sizes[1]), heads,
                        int(key.sizes[2]), value_dim, dtype_number(value.dtype), g.dimensions == 3,
                        normalize, float(scale)};
  call.rows.check(heads);
  with_dtype(call.dtype, [&](auto type) {
    using T = decltype(type);
    call.rows.clear_padding(out, sizeof(typename T::Stored) * heads * value_dim);
    run<T>(call, num_threads());
  });
}
OCTAVO_OPERATOR(gated_delta)

}  // namespace
