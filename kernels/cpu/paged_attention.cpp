// PagedAttention on CPU: decodes and prefill chunks of any length, in one call.
//
// Work is cut into items of (sequence, KV head, up to kMaxRows query rows, range of
// keys), spread over threads. A query row is a (token, head of the group) pair, so
// the query heads that share a KV head share each load of K and V. An item walks its
// keys in tiles of kTile, whatever the block size: it finds each row through the
// block table, packs K transposed and V as it lies into a scratch that stays in the
// L1/L2 cache, and from there both products are the same small matrix product. The
// softmax is online, in float32 and base 2 (FlashAttention-2, Dao 2023, section 3.1).
// Where there are fewer items than threads would like, long ranges of keys are split
// and the parts merged (Flash-Decoding, Dao et al. 2023).
//
// Packing costs a decode a third of its arithmetic, but less than the memory it waits
// for; it lets prefill chunks reach the speed of a plain matrix product. Gathering a
// chunk's K and V for PyTorch's own attention instead was 1.3 to 2.8 times slower
// (AMD EPYC 9004, one thread, bf16: 64 queries on 64 keys 231 us against 91, 512 on 512
// 9.4 ms against 3.3, 512 on 2048 39 ms against 19; 9 query heads, 3 KV heads of 64).
//
// Rows past the end of the keys are packed as zeros: garbage in unused slots never
// enters the arithmetic.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "vector.h"

namespace {

constexpr int kTile = 64;       // keys per step of the online softmax
constexpr int kMaxRows = 48;    // query rows per item
constexpr int kMinSplit = 256;  // the fewest keys worth an item of their own
constexpr int kItemsPerThread = 4;
constexpr int64_t kMinParallelWork = 1 << 17;  // products below which threads cost more
constexpr float kNoLogit = -1e30f;             // a maximum over nothing; not -inf: no NaNs
constexpr float kLog2E = 1.4426950408889634f;

constexpr int kMicroRows = 6;  // the register block of the matrix product
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kMicroColumns = 4;  // vectors; 32 registers
#else
constexpr int kMicroColumns = 2;  // vectors; 16 registers
#endif

}  // namespace

// What Python passes; mirrored by a ctypes.Structure. Strides are in elements.
struct Attention {
  const void* query;
  const void* key_cache;
  const void* value_cache;
  void* out;
  const int32_t* query_starts;
  const int32_t* seq_lens;
  const int32_t* block_tables;
  const float* alibi_slopes;  // or null
  int64_t query_token_stride;
  int64_t query_head_stride;
  int64_t block_stride;
  int64_t table_stride;
  int32_t table_width;
  int32_t num_seqs;
  int32_t num_blocks;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  int32_t sliding_window;  // or 0
  int32_t threads;
  float scale;
  float soft_cap;  // or 0
};

namespace {

struct Item {
  int seq, kv_head;
  int row_begin, rows;  // row r is token r / group and head r % group of the sequence
  int key_begin, key_end;
  int part;  // where the unfinished result goes; -1: it is the whole
};

// The parts [part, part + parts) make up one result.
struct Merge {
  Item item;
  int part, parts;
};

// ---- the matrix product ----

// c[kRows][kColumns vectors] = rescale * c + a * b, with `depth` words in a's rows.
// c counts as zero where rescale is null.
template <class T, int kRows, int kColumns>
inline void multiply_block(int depth, const uint32_t* a, int a_stride, const uint32_t* b,
                           int b_stride, float* c, int c_stride, const float* rescale) {
  Floats sum[kRows][kColumns];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; i++)
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; j++)
      sum[i][j] = rescale ? load<Floats>(c + i * c_stride + j * kLanes) * rescale[i] : Floats{};
  for (int k = 0; k < depth; k++) {
    Words column[kColumns];
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; j++) column[j] = load<Words>(b + k * b_stride + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; i++) {
      Words element = broadcast(a[i * a_stride + k]);
#pragma GCC unroll 8
      for (int j = 0; j < kColumns; j++)
        sum[i][j] = T::multiply_add(sum[i][j], element, column[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; i++)
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; j++) store(c + i * c_stride + j * kLanes, sum[i][j]);
}

template <class T, int kRows>
inline void multiply_rows(int columns, int depth, const uint32_t* a, int a_stride,
                          const uint32_t* b, int b_stride, float* c, int c_stride,
                          const float* rescale) {
  int j = 0;
  for (; j + kMicroColumns <= columns; j += kMicroColumns)
    multiply_block<T, kRows, kMicroColumns>(depth, a, a_stride, b + j * kLanes, b_stride,
                                            c + j * kLanes, c_stride, rescale);
  for (; j < columns; j++)
    multiply_block<T, kRows, 1>(depth, a, a_stride, b + j * kLanes, b_stride, c + j * kLanes,
                                c_stride, rescale);
}

// c[rows][columns vectors] = rescale[row] * c + a[rows][depth] * b[depth][columns].
template <class T>
void multiply(int rows, int columns, int depth, const uint32_t* a, int a_stride,
              const uint32_t* b, int b_stride, float* c, int c_stride, const float* rescale) {
  auto block = [&](auto kernel, int i) {
    kernel(columns, depth, a + i * a_stride, a_stride, b, b_stride, c + i * c_stride, c_stride,
           rescale ? rescale + i : nullptr);
  };
  int i = 0;
  for (; i + kMicroRows <= rows; i += kMicroRows) block(multiply_rows<T, kMicroRows>, i);
  switch (rows - i) {
    case 5: return block(multiply_rows<T, 5>, i);
    case 4: return block(multiply_rows<T, 4>, i);
    case 3: return block(multiply_rows<T, 3>, i);
    case 2: return block(multiply_rows<T, 2>, i);
    case 1: return block(multiply_rows<T, 1>, i);
  }
}

// ---- packing ----

// What one thread needs to work on an item. Rows of K and V are padded to `width`.
struct Scratch {
  explicit Scratch(int head_dim)
      : width((head_dim + kLanes - 1) / kLanes * kLanes),
        query(allocate(kMaxRows * width)),
        keys(allocate(kTile * width)),
        values(allocate(kTile * width)),
        logits(reinterpret_cast<float*>(allocate(kMaxRows * kTile))),
        out(reinterpret_cast<float*>(allocate(kMaxRows * width))) {}
  ~Scratch() {
    for (void* memory : {(void*)query, (void*)keys, (void*)values, (void*)logits, (void*)out})
      ::operator delete(memory, std::align_val_t(64));
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  int width;
  uint32_t* query;   // [rows][words of a head]
  uint32_t* keys;    // [words of a head][kTile]
  uint32_t* values;  // [kTile / kPack][width]
  float* logits;     // [rows][kTile]; the weights overwrite them, as T's words
  float* out;        // [rows][width]
  float maximum[kMaxRows], total[kMaxRows], rescale[kMaxRows];

 private:
  static uint32_t* allocate(int words) {
    return static_cast<uint32_t*>(::operator new(words * 4, std::align_val_t(64)));
  }
};

// One vector of words from a row of `head_dim` elements, from its word `at` on.
template <class T>
inline Words row_words(const typename T::Stored* row, int head_dim, int at) {
  int left = head_dim - at * T::kPack;
  if (left >= kLanes * T::kPack) return T::load_words(row + at * T::kPack);
  typename T::Stored padded[kLanes * T::kPack] = {};
  std::memcpy(padded, row + at * T::kPack, left * sizeof *row);
  return T::load_words(padded);
}

// One vector of elements, likewise.
template <class T>
inline Floats row_floats(const typename T::Stored* row, int head_dim, int at) {
  if (head_dim - at >= kLanes) return T::load_floats(row + at);
  typename T::Stored padded[kLanes] = {};
  std::memcpy(padded, row + at, (head_dim - at) * sizeof *row);
  return T::load_floats(padded);
}

// keys[word][key] from up to kLanes rows; the columns past them become zero.
template <class T>
inline void pack_keys(const typename T::Stored* const* rows, int count, int head_dim,
                      uint32_t* keys) {
  int words = head_dim / T::kPack;
  for (int at = 0; at < words; at += kLanes) {
    Words square[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++)
      square[i] = i < count ? row_words<T>(rows[i], head_dim, at) : Words{};
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++)
      if (at + i < words) store(keys + (at + i) * kTile, square[i]);
  }
}

// values[key / kPack][element], elements of kPack keys side by side in each word.
template <class T>
inline void pack_values(const typename T::Stored* first, const typename T::Stored* second,
                        int head_dim, uint32_t* values) {
  for (int at = 0; at < head_dim; at += kLanes) {
    Words word = first ? (Words)row_floats<T>(first, head_dim, at) : Words{};
    if constexpr (T::kPack == 2) {
      Words other = second ? (Words)row_floats<T>(second, head_dim, at) : Words{};
      word = word >> 16 | other;  // a bf16 is the upper half of its float
    }
    store(values + at, word);
  }
}

// ---- one item ----

template <class T>
class Worker {
  using Stored = typename T::Stored;

 public:
  Worker(const Attention& p, float* parts) : p_(p), scratch_(p.head_dim), parts_(parts) {}

  // Makes the first item's rows known; each `run` does so for the next item.
  void start(const Item& item) { find_rows(item, item.key_begin, tile_); }

  // Works on an item. `next` is the one that follows on this thread, or null.
  void run(const Item& item, const Item* next) {
    const int group = p_.num_heads / p_.num_kv_heads;
    const int context = p_.seq_lens[item.seq] - query_count(item.seq);
    load_queries(item, group);
    std::fill_n(scratch_.maximum, item.rows, kNoLogit);
    std::fill_n(scratch_.total, item.rows, 0.f);
    std::fill_n(scratch_.out, item.rows * scratch_.width, 0.f);
    const int words = p_.head_dim / T::kPack;
    int begin = item.key_begin;
    do {
      const int vectors = (tile_.count + kLanes - 1) / kLanes;
      if (begin + kTile < item.key_end)
        find_rows(item, begin + kTile, coming_);
      else if (next)
        find_rows(*next, next->key_begin, coming_);
      else
        coming_.count = 0;
      pack();
      multiply<T>(item.rows, vectors, words, scratch_.query, words, scratch_.keys, kTile,
                  scratch_.logits, kTile, nullptr);
      for (int row = 0; row < item.rows; row++) {
        int token = (item.row_begin + row) / group;
        int head = item.kv_head * group + (item.row_begin + row) % group;
        softmax(row, head, context + token - begin, vectors);
      }
      multiply<T>(item.rows, scratch_.width / kLanes, vectors * kLanes / T::kPack,
                  reinterpret_cast<uint32_t*>(scratch_.logits), kTile, scratch_.values,
                  scratch_.width, scratch_.out, scratch_.width, scratch_.rescale);
      std::swap(tile_, coming_);
      begin += kTile;
    } while (begin < item.key_end);
    if (item.part < 0)
      finish(item, group);
    else
      save_part(item);
  }

  // Joins the parts of one result, each weighed by its share of the softmax.
  void merge(const Merge& merge) {
    const Item& item = merge.item;
    std::fill_n(scratch_.maximum, item.rows, kNoLogit);
    std::fill_n(scratch_.total, item.rows, 0.f);
    std::fill_n(scratch_.out, item.rows * scratch_.width, 0.f);
    for (int part = merge.part; part < merge.part + merge.parts; part++) {
      const float* saved = parts_ + part * part_size(scratch_.width);
      for (int row = 0; row < item.rows; row++, saved += scratch_.width + 2) {
        float maximum = std::max(scratch_.maximum[row], saved[0]);
        float old_share = std::exp2(scratch_.maximum[row] - maximum);
        float new_share = std::exp2(saved[0] - maximum);
        scratch_.maximum[row] = maximum;
        scratch_.total[row] = scratch_.total[row] * old_share + saved[1] * new_share;
        float* out = scratch_.out + row * scratch_.width;
        for (int i = 0; i < scratch_.width; i++)
          out[i] = out[i] * old_share + saved[2 + i] * new_share;
      }
    }
    finish(item, p_.num_heads / p_.num_kv_heads);
  }

  static int64_t part_size(int width) { return int64_t(kMaxRows) * (width + 2); }

 private:
  int query_count(int seq) const { return p_.query_starts[seq + 1] - p_.query_starts[seq]; }

  void load_queries(const Item& item, int group) {
    const int words = p_.head_dim / T::kPack;
    for (int row = 0; row < item.rows; row++) {
      int64_t token = p_.query_starts[item.seq] + (item.row_begin + row) / group;
      int64_t head = item.kv_head * group + (item.row_begin + row) % group;
      const Stored* from = static_cast<const Stored*>(p_.query) +
                           token * p_.query_token_stride + head * p_.query_head_stride;
      uint32_t* to = scratch_.query + row * words;
      for (int at = 0; at < words; at += kLanes) {
        Words v = row_words<T>(from, p_.head_dim, at);
        std::memcpy(to + at, &v, std::min(kLanes, words - at) * 4);
      }
    }
  }

  // Where the rows of a tile lie.
  struct Tile {
    int count = 0;
    const Stored* keys[kTile];
    const Stored* values[kTile];
  };

  // Finds the rows of the item's tile that begins at key `begin`.
  void find_rows(const Item& item, int begin, Tile& tile) {
    const int32_t* table = p_.block_tables + item.seq * p_.table_stride;
    tile.count = std::clamp(item.key_end - begin, 0, kTile);
    for (int i = 0; i < tile.count;) {
      int block = (begin + i) / p_.block_size, offset = (begin + i) % p_.block_size;
      int64_t at = table[block] * p_.block_stride +
                   (int64_t(item.kv_head) * p_.block_size + offset) * p_.head_dim;
      for (; offset < p_.block_size && i < tile.count; offset++, i++, at += p_.head_dim) {
        tile.keys[i] = static_cast<const Stored*>(p_.key_cache) + at;
        tile.values[i] = static_cast<const Stored*>(p_.value_cache) + at;
      }
    }
  }

  // Asks for some rows of the coming tile. Blocks lie anywhere, so the hardware cannot
  // guess them; and few at a time, for it stalls when too many are under way.
  void prefetch(const Stored* const* rows, int from, int to) {
    for (int i = from; i < std::min(to, coming_.count); i++)
      for (int byte = 0; byte < p_.head_dim * int(sizeof(Stored)); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(rows[i]) + byte, 0, 2);
  }

  void pack() {
    constexpr int kStep = 4;  // rows prefetched at a time
    for (int i = 0; i < kTile; i += kLanes) {
      if (i < tile_.count)
        pack_keys<T>(tile_.keys + i, std::min(kLanes, tile_.count - i), p_.head_dim,
                     scratch_.keys + i);
      prefetch(coming_.keys, i, i + kLanes);
    }
    int padded = (tile_.count + kLanes - 1) / kLanes * kLanes;
    std::fill(tile_.values + tile_.count, tile_.values + padded, nullptr);
    for (int i = 0; i < kTile; i += kStep) {
      for (int j = i; j < std::min(i + kStep, padded); j += T::kPack)
        pack_values<T>(tile_.values[j], tile_.values[j + T::kPack - 1], p_.head_dim,
                       scratch_.values + j / T::kPack * scratch_.width);
      prefetch(coming_.values, i, i + kStep);
    }
  }

  // Turns a row of logits into weights, relative to the greatest logit so far.
  // `position` is the query's own, counted from the tile's first key.
  void softmax(int row, int head, int position, int vectors) {
    Ints lane;
    for (int i = 0; i < kLanes; i++) lane[i] = i;
    float* logits = scratch_.logits + row * kTile;
    const int first = p_.sliding_window ? position - p_.sliding_window + 1 : 0;
    const float slope = p_.alibi_slopes ? p_.alibi_slopes[head] * kLog2E : 0.f;
    Floats x[kTile / kLanes];
    Floats greatest = broadcast(scratch_.maximum[row]);
    for (int i = 0; i < vectors; i++) {
      Ints key = lane + i * kLanes;
      x[i] = load<Floats>(logits + i * kLanes);
      if (p_.soft_cap)
        x[i] = cap(x[i] * (p_.scale / p_.soft_cap)) * (p_.soft_cap * kLog2E);
      else
        x[i] = x[i] * (p_.scale * kLog2E);
      if (p_.alibi_slopes) x[i] += slope * __builtin_convertvector(key - position, Floats);
      Ints seen = (key <= position) & (key >= first);
      x[i] = seen ? x[i] : broadcast(-INFINITY);
      greatest = max(greatest, x[i]);
    }
    const float maximum = reduce_max(greatest);
    Floats sum{};
    auto* weights = reinterpret_cast<typename Weights::Stored*>(logits);
    for (int i = 0; i < vectors; i++) {
      x[i] = exp2(x[i] - maximum);
      sum += x[i];
      Weights::store_floats(weights + i * kLanes, x[i]);
    }
    const float rescale = std::exp2(scratch_.maximum[row] - maximum);
    scratch_.maximum[row] = maximum;
    scratch_.total[row] = scratch_.total[row] * rescale + reduce_add(sum);
    scratch_.rescale[row] = rescale;
  }

  // The weights are stored as the words that V is packed in.
  using Weights = std::conditional_t<T::kPack == 2, BFloat16, Float32>;

  // tanh, from 1 - 2 / (e^2y + 1), which neither overflows nor loses the sign.
  static Floats cap(Floats y) {
    Floats limited = y > 40.f ? broadcast(40.f) : y;
    return 1.f - 2.f / (exp2(limited * (2 * kLog2E)) + 1.f);
  }

  void finish(const Item& item, int group) {
    for (int row = 0; row < item.rows; row++) {
      int64_t token = p_.query_starts[item.seq] + (item.row_begin + row) / group;
      int64_t head = item.kv_head * group + (item.row_begin + row) % group;
      Stored* to = static_cast<Stored*>(p_.out) + (token * p_.num_heads + head) * p_.head_dim;
      float total = scratch_.total[row];
      float inverse = total > 0 ? 1 / total : 0;  // nothing to attend to gives zeros
      for (int at = 0; at < p_.head_dim; at += kLanes) {
        Floats v = load<Floats>(scratch_.out + row * scratch_.width + at) * inverse;
        if (p_.head_dim - at >= kLanes) {
          T::store_floats(to + at, v);
        } else {
          Stored tail[kLanes];
          T::store_floats(tail, v);
          std::memcpy(to + at, tail, (p_.head_dim - at) * sizeof *tail);
        }
      }
    }
  }

  void save_part(const Item& item) {
    float* to = parts_ + item.part * part_size(scratch_.width);
    for (int row = 0; row < item.rows; row++, to += scratch_.width + 2) {
      to[0] = scratch_.maximum[row];
      to[1] = scratch_.total[row];
      std::copy_n(scratch_.out + row * scratch_.width, scratch_.width, to + 2);
    }
  }

  const Attention& p_;
  Scratch scratch_;
  float* parts_;
  Tile tile_, coming_;  // the one at work and the one after it
};

// ---- the whole ----

struct Plan {
  std::vector<Item> items;
  std::vector<Merge> merges;
  int parts = 0;
  int64_t work = 0;  // products of a query row and a key
};

// Cuts the batch into items, the last (longest) tiles of a sequence first.
Plan make_plan(const Attention& p) {
  Plan plan;
  const int group = p.num_heads / p.num_kv_heads;
  for (int seq = 0; seq < p.num_seqs; seq++) {
    const int queries = p.query_starts[seq + 1] - p.query_starts[seq];
    const int context = p.seq_lens[seq] - queries;
    const int rows = queries * group;
    const int tiles = (rows + kMaxRows - 1) / kMaxRows;
    for (int tile = tiles - 1; tile >= 0; tile--) {
      Item item{seq, 0, tile * kMaxRows, std::min(kMaxRows, rows - tile * kMaxRows), 0, 0, -1};
      int first = context + item.row_begin / group;
      int last = context + (item.row_begin + item.rows - 1) / group;
      item.key_begin = p.sliding_window ? std::max(0, first - p.sliding_window + 1) : 0;
      item.key_end = std::max(item.key_begin, last + 1);
      plan.work += int64_t(item.rows) * (item.key_end - item.key_begin) * p.num_kv_heads;
      for (item.kv_head = 0; item.kv_head < p.num_kv_heads; item.kv_head++)
        plan.items.push_back(item);
    }
  }
  return plan;
}

// Splits long items by keys until every thread has a few.
void split_items(const Attention& p, Plan& plan) {
  const int wanted = kItemsPerThread * p.threads;
  if (p.threads == 1 || plan.items.empty() || int(plan.items.size()) >= wanted) return;
  const int shares = (wanted + int(plan.items.size()) - 1) / int(plan.items.size());
  std::vector<Item> whole;
  whole.swap(plan.items);
  for (Item item : whole) {
    const int keys = item.key_end - item.key_begin, end = item.key_end;
    const int parts = std::clamp(keys / kMinSplit, 1, shares);
    if (parts == 1) {
      plan.items.push_back(item);
      continue;
    }
    plan.merges.push_back({item, plan.parts, parts});
    const int step = ((keys + parts - 1) / parts + kTile - 1) / kTile * kTile;
    for (int i = 0; i < parts; i++) {
      item.key_end = std::min(end, item.key_begin + step);
      item.part = plan.parts++;
      plan.items.push_back(item);
      item.key_begin = item.key_end;
    }
  }
}

template <class T>
void attend(const Attention& p, const Plan& plan) {
  const int items = int(plan.items.size()), merges = int(plan.merges.size());
  const int width = (p.head_dim + kLanes - 1) / kLanes * kLanes;
  std::unique_ptr<float[]> parts;
  std::atomic<int> queue{0};
  if (plan.parts) parts.reset(new float[plan.parts * Worker<T>::part_size(width)]);
  const bool parallel = items > 1 && plan.work * p.head_dim >= kMinParallelWork;
#pragma omp parallel num_threads(p.threads) if (parallel)
  {
    Worker<T> worker(p, parts.get());
    // Taken one ahead, so that a thread can fetch its next item's keys in time.
    int i = queue++;
    if (i < items) worker.start(plan.items[i]);
    while (i < items) {
      const int next = queue++;
      worker.run(plan.items[i], next < items ? &plan.items[next] : nullptr);
      i = next;
    }
    if (merges) {
#pragma omp barrier
#pragma omp for schedule(dynamic)
      for (int i = 0; i < merges; i++) worker.merge(plan.merges[i]);
    }
  }
}

// Returns 0, or 1 + a sequence whose block table names a block that does not exist.
int find_bad_table(const Attention& p) {
  for (int seq = 0; seq < p.num_seqs; seq++) {
    const int32_t* table = p.block_tables + seq * p.table_stride;
    const int blocks = (p.seq_lens[seq] + p.block_size - 1) / p.block_size;
    if (blocks > p.table_width) return 1 + seq;
    for (int i = 0; i < blocks; i++)
      if (uint32_t(table[i]) >= uint32_t(p.num_blocks)) return 1 + seq;
  }
  return 0;
}

}  // namespace

// Returns 0, or 1 + the index of a sequence with a bad block table.
extern "C" int octavo_paged_attention(const Attention* p, int dtype) {
  if (int bad = find_bad_table(*p)) return bad;
  Plan plan = make_plan(*p);
  split_items(*p, plan);
  switch (dtype) {
    case 0: attend<Float32>(*p, plan); break;
    case 1: attend<Float16>(*p, plan); break;
    case 2: attend<BFloat16>(*p, plan); break;
  }
  return 0;
}
