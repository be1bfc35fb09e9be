// Latent attention (DeepSeek-V2, 2024, section 2.1.2): the cache has latents, from which each head
// computes a key and a value by two products.
//
// There are two ways. Absorbed: each query is multiplied by the key matrix and each result by the
// value matrix, and attention is over the latents, which are wider than keys and values. Expanded:
// keys and values are computed from a sequence's latents, once for all of its queries. Absorbed
// takes fewer products for decodes, expanded for long chunks of prefills. A thread expands at most
// kMostKeys keys and values of one head at a time, so that they stay in its core's cache.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"
#include "attention_worker.h"
#include "linear.h"
#include "prepare_rows.h"

namespace {

constexpr int kMostKeys = 1024;    // expanded at a time; a multiple of kPart
constexpr int kMostAbsorbed = 256;  // tokens at a time, unless one sequence has more

// Packed weights, as in linear.h, head after head in whole panels.
struct LatentProducts {
  const void* absorbing;  // maps a query of keys to a query of latents
  const void* keys;       // maps a latent to the first elements of a key
  const void* values;     // maps a latent to a value
  int64_t key_dim;        // elements of a key that come from a latent
  int64_t value_dim;
};

// One call. Strides are in elements.
struct Call {
  const Cache& cache;
  const Batch& batch;
  const void* query;
  int64_t token_stride, head_stride;
  int64_t num_heads;
  const LatentProducts& products;
  void* out;  // [tokens][num_heads][value_dim]
  float scale;
  Sight sight;
  float soft_cap;
  int threads;
  int64_t rotated;  // elements of a key that the cache keeps beside the latent

  int64_t latent_dim() const { return cache.key_dim - rotated; }
  int64_t query_dim() const { return products.key_dim + rotated; }
};

int64_t panels_of(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

// The types of words by the cache's type.
template <class T>
struct WordsOf;
template <>
struct WordsOf<Float32> {
  using WordKind = Singles;
};
template <>
struct WordsOf<BFloat16> {
  using WordKind = Pairs;
};

// Each head's panels for one product.
template <class T>
struct HeadPanels {
  using Stored = typename T::Stored;
  using WordKind = typename WordsOf<T>::WordKind;

  const uint32_t* first;
  int64_t inputs, outputs;

  int64_t depth() const { return inputs * int64_t(sizeof(Stored)) / int64_t(sizeof(uint32_t)); }
  int64_t row_words() const { return depth() * WordKind::kParts; }
  int64_t count() const { return panels_of(outputs); }
  const uint32_t* at(int64_t head, int64_t panel) const {
    return first + (head * count() + panel) * depth() * kPanel;
  }
};

// Multiplies each head's rows by its own panels. Calls prepare(head, row, words) for each row before
// any product, and store(head, row, output, values) with vectors of outputs.
template <class T, class Prepare, class Store>
void multiply_heads(const HeadPanels<T>& panels, int64_t heads, int64_t rows, int threads,
                    Prepare prepare, Store store) {
  const int64_t stride = panels.row_words(), items = heads * panels.count();
  uint32_t* const words = scratch<uint32_t>(heads * rows * stride);
  const auto at = [&](int64_t item) {
    return panels.at(item / panels.count(), item % panels.count());
  };
  std::atomic<int64_t> free{0};
#pragma omp parallel num_threads(threads)
  {
    PanelProducts<typename HeadPanels<T>::WordKind> products;
#pragma omp for
    for (int64_t i = 0; i < heads * rows; i++) prepare(i / rows, i % rows, words + i * stride);
    for (int64_t item = free++, next; item < items; item = next) {
      next = free++;
      const int64_t head = item / panels.count(), first = item % panels.count() * kPanel;
      products.run({words + head * rows * stride, rows, stride}, at(item), panels.depth(),
                   at(std::min(next, items - 1)), [&](int64_t row, const Floats* sums) {
                     for (int j = 0; j < kPanelVectors; j++)
                       store(head, row, first + j * kLanes, sums[j]);
                   });
    }
  }
}

// Stores the vector of a row's elements from `first` on; a row has `count` elements.
template <class T>
void put(typename T::Stored* row, int64_t first, int64_t count, Floats values) {
  typename T::Stored all[kLanes];
  if (first >= count) return;
  if (count - first >= kLanes) return T::store_floats(row + first, values);
  T::store_floats(all, values);
  std::memcpy(row + first, all, (count - first) * sizeof *all);
}

// Some of a batch's sequences; their queries are adjacent.
struct Selection {
  std::vector<int64_t> tokens;  // the batch's row of each query
  std::vector<int32_t> query_starts{0}, seq_lens, tables;
  int32_t table_width = 0;

  void add(const Batch& batch, int seq) {
    for (int i = batch.query_starts[seq]; i < batch.query_starts[seq + 1]; i++)
      tokens.push_back(i);
    query_starts.push_back(int32_t(tokens.size()));
    seq_lens.push_back(batch.seq_lens[seq]);
    const int32_t* const table = batch.block_tables + seq * batch.table_stride;
    tables.insert(tables.end(), table, table + batch.table_width);
    table_width = batch.table_width;
  }
  Batch batch() const {
    return {query_starts.data(), seq_lens.data(), tables.data(), table_width, table_width,
            int32_t(seq_lens.size()), nullptr, 0};
  }
};

template <class T>
class LatentAttention {
  using Stored = typename T::Stored;
  using WordKind = typename WordsOf<T>::WordKind;
  static constexpr int kPack = T::kPack;

 public:
  explicit LatentAttention(const Call& call) : call_(call) {}

  void run() const {
    std::vector<int> expanded;
    Selection absorbed;
    const auto flush = [&] {
      if (!absorbed.tokens.empty()) attend_absorbed(absorbed);
      absorbed = {};
    };
    for (int seq = 0; seq < call_.batch.num_seqs; seq++) {
      if (expands(seq)) {
        expanded.push_back(seq);
      } else {
        const int64_t more = call_.batch.query_count(seq);
        if (int64_t(absorbed.tokens.size()) + more > kMostAbsorbed) flush();
        absorbed.add(call_.batch, seq);
      }
    }
    flush();
    if (!expanded.empty()) attend_expanded(expanded);
  }

 private:
  const Stored* query_of(int64_t token, int64_t head) const {
    return static_cast<const Stored*>(call_.query) + token * call_.token_stride +
           head * call_.head_stride;
  }
  Stored* out_of(int64_t token, int64_t head) const {
    return static_cast<Stored*>(call_.out) +
           (token * call_.num_heads + head) * call_.products.value_dim;
  }
  HeadPanels<T> panels(const void* first, int64_t inputs, int64_t outputs) const {
    return {static_cast<const uint32_t*>(first), inputs, outputs};
  }
  HeadPanels<T> value_panels() const {
    return panels(call_.products.values, call_.latent_dim(), call_.products.value_dim);
  }
  HeadPanels<T> key_panels() const {
    return panels(call_.products.keys, call_.latent_dim(), call_.products.key_dim);
  }

  // Returns whether expanding a sequence's latents takes fewer products, of each head, than
  // absorbing them.
  bool expands(int seq) const {
    const int64_t queries = call_.batch.query_count(seq), tokens = call_.batch.seq_lens[seq];
    if (queries < 2 || tokens < queries) return false;
    int64_t seen = 0;
    for (int64_t at = tokens - queries; at < tokens; at++)
      seen += at + 1 - call_.sight.first_key(int(at));
    const int64_t keys = tokens - call_.sight.first_key(int(tokens - queries));
    const int64_t dims = call_.products.key_dim + call_.products.value_dim;
    const int64_t latent = call_.latent_dim();
    const int64_t of_absorbed = queries * dims * latent + seen * (call_.cache.key_dim + latent);
    return keys * dims * latent + seen * (dims + call_.rotated) < of_absorbed;
  }

  // Absorbs the products of some sequences.
  void attend_absorbed(const Selection& chosen) const {
    const int64_t tokens = chosen.tokens.size(), heads = call_.num_heads;
    const int64_t latent = call_.latent_dim(), wide = call_.cache.key_dim;
    const int64_t key_dim = call_.products.key_dim;
    std::vector<Stored>& queries = kept<0>();
    std::vector<Stored>& results = kept<1>();
    queries.resize(tokens * heads * wide);
    results.resize(tokens * heads * latent);
    const auto absorbing = panels(call_.products.absorbing, key_dim, latent);
    multiply_heads<T>(
        absorbing, heads, tokens, call_.threads,
        [&](int64_t head, int64_t row, uint32_t* words) {
          const Stored* from = query_of(chosen.tokens[row], head);
          take_apart<WordKind>(from, absorbing.depth(), words);
          std::copy_n(from + key_dim, call_.rotated,
                      queries.data() + (row * heads + head) * wide + latent);
        },
        [&](int64_t head, int64_t row, int64_t output, Floats values) {
          put<T>(queries.data() + (row * heads + head) * wide, output, latent, values);
        });
    const Batch batch = chosen.batch();
    attend_to_blocks(call_.cache, batch,
                     {queries.data(), 0, 3, {tokens, heads, wide}, {heads * wide, wide, 1}},
                     results.data(), latent,
                     {call_.scale, call_.sight, call_.soft_cap, nullptr, nullptr});
    const auto expanding = value_panels();
    multiply_heads<T>(
        expanding, heads, tokens, call_.threads,
        [&](int64_t head, int64_t row, uint32_t* words) {
          take_apart<WordKind>(results.data() + (row * heads + head) * latent, expanding.depth(),
                               words);
        },
        [&](int64_t head, int64_t row, int64_t output, Floats values) {
          put<T>(out_of(chosen.tokens[row], head), output, expanding.outputs, values);
        });
  }

  // This thread's buffers, kept between calls.
  template <int kNumber>
  static std::vector<Stored>& kept() {
    thread_local std::vector<Stored> memory;
    return memory;
  }

  // A sequence whose latents are expanded. Its keys are counted from `base`, a multiple of kPart.
  struct Expanded {
    int seq;
    int32_t base, first, end;        // positions of key 0 and of the keys that queries see
    std::vector<uint32_t> latents;   // packed rows from `first` on
    std::vector<Stored> rotated;     // [tiles][rotated / kPack][kTile][kPack]
    std::vector<int32_t> table;      // blocks of kTile keys in a buffer of kMostKeys
    int32_t query_starts[2], seq_len;
    Plan plan;                       // of one head; ordered by pieces
  };

  void attend_expanded(const std::vector<int>& chosen) const {
    std::vector<Expanded> sequences(chosen.size());
    for (size_t i = 0; i < chosen.size(); i++) prepare(chosen[i], sequences[i]);
    const int64_t items = sequences.size() * call_.num_heads;
    std::atomic<int64_t> free{0};
#pragma omp parallel num_threads(call_.threads)
    {
      PanelProducts<WordKind> products;
      for (int64_t item = free++; item < items; item = free++)
        attend_head(products, sequences[item / call_.num_heads], item % call_.num_heads);
    }
  }

  // Gathers a sequence's latents, and plans the work on one head.
  void prepare(int seq, Expanded& expanded) const {
    const Batch& batch = call_.batch;
    expanded.seq = seq;
    expanded.seq_len = expanded.end = batch.seq_lens[seq];
    expanded.query_starts[0] = batch.query_starts[seq];
    expanded.query_starts[1] = batch.query_starts[seq + 1];
    expanded.first = begin_at(call_.sight.first_key(expanded.end - batch.query_count(seq)));
    expanded.base = expanded.first / kPart * kPart;
    const int tiles = (expanded.end + kTile - 1) / kTile;
    expanded.table.resize(tiles);
    for (int i = expanded.base / kTile; i < tiles; i++)
      expanded.table[i] = (i - expanded.base / kTile) % (kMostKeys / kTile);
    gather(expanded, batch.block_tables + seq * batch.table_stride);
    plan(expanded);
  }

  void gather(Expanded& expanded, const int32_t* table) const {
    const int64_t depth = key_panels().depth(), stride = key_panels().row_words();
    const int64_t latent = call_.latent_dim(), wide = call_.cache.key_dim;
    const int64_t rotated_tile = call_.rotated * kTile;
    expanded.latents.resize((expanded.end - expanded.first) * stride);
    expanded.rotated.resize(((expanded.end - expanded.base + kTile - 1) / kTile) * rotated_tile);
#pragma omp parallel num_threads(call_.threads)
    {
      Stored* const row = scratch<Stored>(wide);
#pragma omp for
      for (int key = expanded.first; key < expanded.end; key++) {
        read_key(table, key, row);
        take_apart<WordKind>(row, depth, expanded.latents.data() + (key - expanded.first) * stride);
        const int place = key - expanded.base;
        Stored* to = expanded.rotated.data() + place / kTile * rotated_tile + place % kTile * kPack;
        for (int64_t k = 0; k < call_.rotated; k += kPack)
          std::memcpy(to + k * kTile, row + latent + k, kPack * sizeof *to);
      }
    }
  }

  // Reads a key from its block: a latent and the elements beside it.
  void read_key(const int32_t* table, int key, Stored* row) const {
    using Widener = Fp8Widener<T>;
    const Cache& cache = call_.cache;
    const int64_t size = cache.block_size, offset = key % size;
    const int64_t first = cache.keys_at(table[key / size], 0);
    if (!cache.fp8) {
      const Stored* from = static_cast<const Stored*>(cache.keys) + first + offset * kPack;
      for (int64_t at = 0; at < cache.key_dim; at += kPack)
        std::memcpy(row + at, from + at * size, kPack * sizeof *row);
      return;
    }
    const uint8_t* from = static_cast<const uint8_t*>(cache.keys) + first + offset * Widener::kPack;
    uint8_t bytes[kMaxKeyDim];
    for (int64_t at = 0; at < cache.key_dim; at += Widener::kPack, from += size * Widener::kPack)
      for (int i = 0; i < Widener::kPack; i++) bytes[at + i] = from[Widener::place(i)];
    Widener(cache.fp8).widen(bytes, cache.key_dim, row);
  }

  Batch batch_of(const Expanded& expanded) const {
    const int32_t width = int32_t(expanded.table.size());
    return {expanded.query_starts, &expanded.seq_len, expanded.table.data(), width, width, 1,
            nullptr, 0};
  }

  // Builds a head's items: each is a part, so that none needs keys of two pieces.
  void plan(Expanded& expanded) const {
    expanded.plan = make_plan(batch_of(expanded), 1, 1, call_.sight);
    split_items(expanded.plan);
    const auto earlier = [&](const Item& a, const Item& b) {
      return piece_of(expanded, a.key_begin) < piece_of(expanded, b.key_begin);
    };
    std::stable_sort(expanded.plan.items.begin(), expanded.plan.items.end(), earlier);
  }
  static int piece_of(const Expanded& expanded, int key) {
    return (key - expanded.base) / kMostKeys;
  }

  void attend_head(PanelProducts<WordKind>& products, const Expanded& expanded,
                   int64_t head) const {
    const int64_t key_dim = call_.query_dim(), value_dim = call_.products.value_dim;
    std::vector<Stored>& keys = kept<2>();
    std::vector<Stored>& values = kept<3>();
    keys.resize(kMostKeys * key_dim);
    values.resize(kMostKeys * value_dim);
    const Cache cache{keys.data(),      values.data(),      kTile * key_dim, kTile * value_dim,
                      kMostKeys / kTile, 1,                  int32_t(key_dim), int32_t(value_dim),
                      kTile,            call_.cache.dtype,    kNotFp8,         call_.cache.key_scale,
                      call_.cache.value_scale};
    const Batch batch = batch_of(expanded);
    const Attention attention{cache,
                              batch,
                              query_of(0, head),
                              call_.token_stride,
                              call_.head_stride,
                              out_of(0, head),
                              call_.num_heads * value_dim,
                              nullptr,
                              nullptr,
                              1,
                              int(value_dim),
                              call_.sight,
                              call_.scale,
                              call_.soft_cap};
    float* const saved =
        scratch<float>(expanded.plan.saved_rows * Worker<T>::saved_size(attention.value_width()));
    Worker<T> worker(attention, saved);
    int piece = -1;
    for (const Item& item : expanded.plan.items) {
      if (piece_of(expanded, item.key_begin) != piece) {
        piece = piece_of(expanded, item.key_begin);
        const int begin = std::max(expanded.first, expanded.base + piece * kMostKeys);
        const int end = std::min(expanded.end, expanded.base + (piece + 1) * kMostKeys);
        expand_keys(products, expanded, head, begin, end, keys.data());
        expand_values(products, expanded, head, begin, end, values.data());
      }
      worker.start(item);
      worker.run(item, nullptr);
    }
    for (const Merge& merge : expanded.plan.merges) worker.merge(merge);
  }

  // Returns the rows of latents of keys [begin, end).
  Rows rows_of(const Expanded& expanded, int begin, int end) const {
    const int64_t stride = key_panels().row_words();
    return {expanded.latents.data() + (begin - expanded.first) * stride, end - begin, stride};
  }

  // Computes a head's keys from latents, in K's layout with blocks of kTile (see cache.h).
  void expand_keys(PanelProducts<WordKind>& products, const Expanded& expanded, int64_t head,
                   int begin,
                   int end, Stored* keys) const {
    const auto panels = key_panels();
    const int64_t tile_size = call_.query_dim() * kTile, made = panels.outputs;
    const int first = (begin - expanded.base) % kMostKeys;
    const Rows rows = rows_of(expanded, begin, end);
    for (int64_t panel = 0; panel < panels.count(); panel++) {
      const uint32_t* ahead = panels.at(head, std::min(panel + 1, panels.count() - 1));
      products.run(rows, panels.at(head, panel), panels.depth(), ahead,
                   [&](int64_t row, const Floats* sums) {
                     const int64_t key = first + row, dim = panel * kPanel;
                     Stored all[kPanel];
                     for (int j = 0; j < kPanelVectors; j++)
                       T::store_floats(all + j * kLanes, sums[j]);
                     Stored* to = keys + key / kTile * tile_size + dim * kTile + key % kTile * kPack;
                     const int64_t count = std::min<int64_t>(kPanel, made - dim);
                     for (int64_t k = 0; k < count; k += kPack)
                       std::memcpy(to + k * kTile, all + k, kPack * sizeof *all);
                   });
    }
    const int64_t rotated = call_.rotated * kTile;
    for (int tile = (begin - expanded.base) / kTile; tile * kTile < end - expanded.base; tile++)
      std::copy_n(expanded.rotated.data() + tile * rotated, rotated,
                  keys + tile % (kMostKeys / kTile) * tile_size + made * kTile);
  }

  // Computes a head's values from latents, in V's layout with blocks of kTile.
  void expand_values(PanelProducts<WordKind>& products, const Expanded& expanded, int64_t head,
                     int begin,
                     int end, Stored* values) const {
    const auto panels = value_panels();
    const int64_t tile_size = panels.outputs * kTile;
    const int first = (begin - expanded.base) % kMostKeys;  // even
    const Rows rows = rows_of(expanded, begin, end);
    for (int64_t panel = 0; panel < panels.count(); panel++) {
      const uint32_t* ahead = panels.at(head, std::min(panel + 1, panels.count() - 1));
      const int64_t dim = panel * kPanel;
      const int64_t count = std::min<int64_t>(kPanel, panels.outputs - dim);
      products.run(rows, panels.at(head, panel), panels.depth(), ahead,
                   [&](int64_t row, const Floats* sums) {
                     const int64_t key = first + row;
                     Stored all[kPanel];
                     for (int j = 0; j < kPanelVectors; j++)
                       T::store_floats(all + j * kLanes, sums[j]);
                     Stored* to = values + key / kTile * tile_size +
                                  key % kTile / kPack * kPack * panels.outputs + dim * kPack +
                                  key % kPack;
                     for (int64_t i = 0; i < count; i++) to[i * kPack] = all[i];
                   });
    }
  }

  const Call& call_;
};

// Writes latents, and attends to them; each head computes keys and values from them. A query's elements
// match a key's: those computed from a latent, then those kept beside it. Dimensions are multiples
// of 8.
void latent_attention(const Result& result, const View& query, const View& key,
                      const View& absorbing, const View& keys, const View& values,
                      int64_t value_dim, int64_t rotated, int64_t number, double scale,
                      int64_t sliding_window, double soft_cap, int64_t chunk) {
  const Stopwatch stopwatch(spent.attention);
  const Layer layer(number);
  layer.check(query);
  require(!layer.cache.values && query.dtype == values.dtype &&
              query.dtype != aoti_torch_dtype_float16(),
          "latents have no values, and queries the type of the products, float32 or bfloat16");
  const LatentProducts products{absorbing.data, keys.data, values.data, query.sizes[2] - rotated,
                                value_dim};
  void* const out = make_out(result, query, value_dim);
  if (layer.is_written) layer.write(key, nullptr);
  const Sight sight{int(sliding_window), int(chunk)};
  layer.check_tables(sight);
  const Call call{layer.cache, layer.batch, query.data, query.strides[0], query.strides[1],
                  query.sizes[1], products, out, float(scale), sight, float(soft_cap),
                  num_threads(), rotated};
  if (query.is_float32())
    LatentAttention<Float32>(call).run();
  else
    LatentAttention<BFloat16>(call).run();
}
OCTAVO_OPERATOR(latent_attention)

}  // namespace
