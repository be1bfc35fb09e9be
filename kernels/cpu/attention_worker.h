// A thread's share of attention: computes a plan's items and merges their parts.
//
// An item reads its keys in tiles of kTile, whatever the block size: the block table gives their
// addresses, and both products read them in place (see cache.h). The softmax is online, in float32
// and base 2 (FlashAttention-2, Dao 2023, section 3.1).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "cache.h"
#include "fetcher.h"
#include "plan.h"
#include "product.h"
#include "repack.h"
#include "vector.h"

constexpr float kNoLogit = -1e30f;  // the maximum without logits; -inf would give NaN
constexpr float kLog2E = 1.4426950408889634f;

// Keys that are contiguous in every cache; a tile has kRuns runs of them.
constexpr int kRun = std::min(kLanes, kMinBlock);
constexpr int kRuns = kTile / kRun;
constexpr int kLine = 64;  // bytes

// One call. Strides are in elements.
struct Attention {
  const Cache& cache;
  const Batch& batch;
  const void* query;
  int64_t query_token_stride;
  int64_t query_head_stride;
  void* out;
  int64_t out_token_stride;
  const float* alibi_slopes;  // or null
  const float* sinks;         // or null
  int num_heads;
  int value_dim;
  Sight sight;
  float scale;
  float soft_cap;  // or 0

  // Values are parts of keys.
  bool latent() const { return !cache.values; }
  // Returns the elements of a row of values, padded to whole vectors.
  int value_width() const { return (value_dim + kLanes - 1) / kLanes * kLanes; }
};

// Each row's softmax so far: weights are relative to the maximum, out is their sum of values.
struct Softmax {
  float* out;  // [rows][value_width]
  float maximum[kMaxRows] = {}, total[kMaxRows] = {};
};

// One thread's buffers for an item.
template <class T>
struct Scratch {
  using Stored = typename T::Stored;

  Scratch(int key_dim, int value_width)
      : key_dim(key_dim),
        value_width(value_width),
        query(allocate<uint32_t>(kMaxRows * key_dim)),
        keys(allocate<Stored>(kTile * key_dim)),
        values(allocate<Stored>(kTile * value_width)),
        logits(allocate<float>(kMaxRows * kTile)),
        sums{allocate<float>(kMaxRows * value_width)},
        merged{allocate<float>(kMaxRows * value_width)} {}
  ~Scratch() {
    const std::initializer_list<void*> all{query, keys, values, logits, sums.out, merged.out};
    for (void* memory : all)
      ::operator delete(memory, std::align_val_t(64));
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  const int key_dim, value_width;  // the maxima
  uint32_t* query;                 // [rows][words of a key]
  Stored* keys;                    // [words of a key][kTile][kPack], if copied
  Stored* values;                  // [kTile / kPack][value_width][kPack], if copied
  float* logits;                   // [rows][kTile]; the weights overwrite them, as T's words
  Softmax sums, merged;               // of the current part, and of those before it
  float rescale[kMaxRows];
  float query_unit[kMaxRows], weight_unit[kMaxRows];  // for codes

 private:
  template <class Element>
  static Element* allocate(int count) {
    void* memory = ::operator new(count * sizeof(Element), std::align_val_t(64));
    return static_cast<Element*>(std::memset(memory, 0, count * sizeof(Element)));
  }
};

// This thread's buffers, kept for the next layer: allocating and clearing 50 KiB in each layer
// would take a sixth of the attention of one sequence of 200.
template <class T>
Scratch<T>& scratch_for(int key_dim, int value_width) {
  thread_local std::unique_ptr<Scratch<T>> kept;
  if (!kept || kept->key_dim < key_dim || kept->value_width < value_width) {
    if (kept) {
      key_dim = std::max(key_dim, kept->key_dim);
      value_width = std::max(value_width, kept->value_width);
    }
    kept = std::make_unique<Scratch<T>>(key_dim, value_width);
  }
  return *kept;
}

// The addresses of a tile's K and V, per run of keys, in the cache or in a copy.
struct Tile {
  int count;  // keys
  const void *keys[kRuns], *values[kRuns];  // runs past the end repeat the first
  const char *key_scales[kRuns], *value_scales[kRuns];  // of codes
};

// Loads packs of four fp8 elements, which become two words.
template <class T>
struct Packs {
  using Stored = uint8_t;
  static constexpr int kPack = 4, kLane = kPack, kWords = 2;

  Words load(const Stored* from) const { return ::load<Words>(from); }
  Words word(Words loaded, int i) const { return widener.word(loaded, i); }

  Fp8Widener<T> widener;
};

// The operands of the two products. Strides are in stored elements.
template <class Loads>
struct KeyMatrix : Loads {
  using Stored = typename Loads::Stored;

  KeyMatrix(Loads loads, const void* const* runs, int64_t stride)
      : Loads(loads), runs(runs), stride(stride) {}

  Words load(int k, int j) const {
    return Loads::load(static_cast<const Stored*>(runs[j * (kLanes / kRun)]) +
                       k / Loads::kWords * stride);
  }

  const void* const* runs;
  int64_t stride;
};

template <class Loads>
struct ValueMatrix : Loads {
  using Stored = typename Loads::Stored;

  ValueMatrix(Loads loads, const void* const* runs, int64_t stride)
      : Loads(loads), runs(runs), stride(stride) {}

  Words load(int k, int j) const {
    const int value = k / Loads::kWords * Loads::kPack;
    return Loads::load(static_cast<const Stored*>(runs[value / kRun]) +
                       value % kRun / Loads::kPack * stride + j * kLanes * Loads::kLane);
  }

  const void* const* runs;
  int64_t stride;
};

template <class T, bool kInCodes = false>
class Worker {
  using Stored = typename T::Stored;
  using Widener = Fp8Widener<T>;
  static constexpr int kPack = T::kPack;
  static constexpr bool kWidensInProduct = kPack == 2;
  static constexpr int kMostWidening = 4;  // maximum rows whose sums also fit into registers

 public:
  Worker(const Attention& p, float* saved, float* carried = nullptr)
      : p_(p), cache_(p.cache), group_(p.num_heads / p.cache.num_kv_heads),
        words_(p.cache.key_dim / (kInCodes ? 2 : kPack)), width_(p.value_width()),
        block_shift_(__builtin_ctz(p.cache.block_size)),
        joined_runs_(p.cache.block_size % kLanes ? 1 : kLanes / kRun),
        copies_keys_(p.cache.fp8 || p.cache.block_size % kLanes),
        copies_values_(p.cache.fp8 || p.latent() || p.value_dim % kLanes),
        pack_(kInCodes ? Codes::kPack : p.cache.fp8 ? Widener::kPack : kPack),
        pack_bytes_(pack_ * p.cache.template element_bytes<T>()), widener_(p.cache.fp8),
        grown_(p.cache.fp8 ? std::ldexp(1.f, Widener::kGrown) : 1),
        scale_(p.scale * p.cache.key_scale * (p.cache.fp8 ? widener_.unit() : 1)),
        value_scale_(p.cache.value_scale * (p.cache.fp8 ? widener_.unit() : 1)),
        scratch_(scratch_for<T>(p.cache.key_dim, width_)), saved_(saved), carried_(carried) {}

  // Finds the first item's keys; each `run` finds the next item's.
  void start(const Item& item) { find_tile(item, item.key_begin, tile_); }

  // Computes an item. `next` is this thread's next item, or null.
  void run(const Item& item, const Item* next) {
    const int seq_len = p_.batch.seq_lens[item.seq];
    const int context = seq_len - p_.batch.query_count(item.seq);
    const bool merges = item.saved < 0 && (item.carried >= 0 || item.key_end > end_of_part(item.key_begin));
    load_queries(item);
    clear(scratch_.sums, item.rows);
    if (merges) begin_merging(item);
    for (int begin = item.key_begin, end; begin < item.key_end; begin = end) {
      end = end_of_tile(begin);
      if (end < item.key_end)
        find_tile(item, end, coming_);
      else if (next)
        find_tile(*next, next->key_begin, coming_);
      else
        coming_.count = 0;
      multiply_keys(item.rows);
      const int vectors = (tile_.count + kFirstKey - 1) / kFirstKey * (kFirstKey / kLanes);
      for (int row = 0; row < item.rows; row++) {
        const int position = context + token_of(item, row);
        softmax(row, head_of(item, row), position - begin, p_.sight.first_key(position) - begin,
                p_.sight.last_key(position, seq_len) - begin, vectors);
      }
      multiply_values(item.rows);
      std::swap(tile_, coming_);
      if (end % kPart && end < item.key_end) continue;
      if (merges) {
        for (int row = 0; row < item.rows; row++)
          merge_row(row, scratch_.sums.maximum[row], scratch_.sums.total[row],
                    scratch_.sums.out + row * width_);
        clear(scratch_.sums, item.rows);
      }
    }
    if (item.key_begin == item.key_end && next) start(*next);
    if (item.saved < 0)
      finish(item, merges ? scratch_.merged : scratch_.sums);
    else
      save(item, scratch_.sums, saved_ + item.saved * saved_size(width_));
  }

  // Merges the parts of a result.
  void merge(const Merge& merge) {
    const float* saved = saved_ + merge.saved * saved_size(width_);
    begin_merging(merge.item);
    for (int part = 0; part < merge.parts; part++)
      for (int row = 0; row < merge.item.rows; row++, saved += saved_size(width_))
        merge_row(row, saved[0], saved[1], saved + 2);
    finish(merge.item, scratch_.merged);
  }

  // The floats of a saved row: its maximum, its total and its sums.
  static int64_t saved_size(int value_width) { return value_width + 2; }

 private:
  int token_of(const Item& item, int row) const { return (item.row_begin + row) / group_; }
  int head_of(const Item& item, int row) const {
    return item.kv_head * group_ + (item.row_begin + row) % group_;
  }

  void clear(Softmax& sums, int rows) {
    std::fill_n(sums.maximum, rows, kNoLogit);
    std::fill_n(sums.total, rows, 0.f);
    std::fill_n(sums.out, rows * width_, 0.f);
  }

  // Begins with no keys, or with those before the item's.
  void begin_merging(const Item& item) {
    Softmax& merged = scratch_.merged;
    clear(merged, item.rows);
    if (item.carried < 0) return;
    const float* from = carried_ + item.carried * saved_size(width_);
    for (int row = 0; row < item.rows; row++, from += saved_size(width_)) {
      merged.maximum[row] = from[0];
      merged.total[row] = from[1];
      std::copy_n(from + 2, width_, merged.out + row * width_);
    }
  }

  // Adds a part of a row, weighted by its share of the softmax.
  void merge_row(int row, float maximum, float total, const float* out) {
    Softmax& merged = scratch_.merged;
    const float greatest = std::max(merged.maximum[row], maximum);
    const float old_share = exp2(broadcast(merged.maximum[row] - greatest))[0];
    const float new_share = exp2(broadcast(maximum - greatest))[0];
    merged.maximum[row] = greatest;
    merged.total[row] = merged.total[row] * old_share + total * new_share;
    float* to = merged.out + row * width_;
    for (int i = 0; i < width_; i++) to[i] = to[i] * old_share + out[i] * new_share;
  }

  void load_queries(const Item& item) {
    for (int row = 0; row < item.rows; row++) {
      const int64_t token = p_.batch.query_starts[item.seq] + token_of(item, row);
      const Stored* from = static_cast<const Stored*>(p_.query) +
                           token * p_.query_token_stride +
                           head_of(item, row) * p_.query_head_stride;
      uint32_t* to = scratch_.query + row * words_;
      if constexpr (kInCodes) {
        round_query(from, row, to);
        continue;
      }
      for (int at = 0; at < words_; at += kLanes) {
        if (words_ - at >= kLanes) {
          store(to + at, T::load_words(from + at * kPack));
        } else {
          Stored tail[kLanes * kPack] = {};
          std::memcpy(tail, from + at * kPack, (words_ - at) * kPack * sizeof *tail);
          Words v = T::load_words(tail);
          std::memcpy(to + at, &v, (words_ - at) * sizeof *to);
        }
      }
      if (grown_ != 1) grow(reinterpret_cast<Stored*>(to), words_ * kPack);
    }
  }

  // Rounds a query to 16-bit integers, so small that sums of products fit into 32 bits.
  void round_query(const Stored* from, int row, void* to) const {
    float all[kMaxKeyDim + kLanes];
    const int count = cache_.key_dim;
    widen_head<T>(from, count, all);
    spread(all, count);
    Floats greatest{}, nothing{};
    for (int i = 0; i < count; i += kLanes) {
      const Floats x = load<Floats>(all + i);
      greatest = max(max(x, -x), greatest);
      nothing += x * 0.f;  // NaN if an element is not finite
    }
    const float most = std::min(32767.f, 0x1p31f / (128 * count) - 1);
    const float unit = std::max(reduce_max(greatest), 0x1p-100f) / most;
    scratch_.query_unit[row] = unit + reduce_add(nothing);
    for (int i = 0; i < count; i += kLanes)
      store_first(static_cast<int16_t*>(to) + i, count - i,
                  __builtin_convertvector(round_to_ints(load<Floats>(all + i) / unit), Integers));
  }

  void grow(Stored* elements, int count) const {
    for (int at = 0; at < count; at += kLanes) {
      Stored all[kLanes] = {};
      const int some = std::min(kLanes, count - at);
      std::memcpy(all, elements + at, some * sizeof *all);
      T::store_floats(all, T::load_floats(all) * grown_);
      std::memcpy(elements + at, all, some * sizeof *all);
    }
  }

  // Finds the item's tile that begins at key `begin`.
  void find_tile(const Item& item, int begin, Tile& tile) const {
    const int32_t* table = p_.batch.block_tables + item.seq * p_.batch.table_stride;
    tile.count = std::max(0, std::min(item.key_end, end_of_tile(begin)) - begin);
    for (int i = 0; tile.count && i < kRuns; i++) {
      const int key = i * kRun < tile.count ? begin + i * kRun : begin;
      const int block = key >> block_shift_, offset = key & (cache_.block_size - 1);
      const char* keys = element(cache_.keys, cache_.keys_at(table[block], item.kv_head));
      tile.keys[i] = keys + offset * pack_bytes_;
      if (p_.latent()) continue;
      const char* values = element(cache_.values, cache_.values_at(table[block], item.kv_head));
      tile.values[i] = values + offset / pack_ * p_.value_dim * pack_bytes_;
      if (!kInCodes) continue;
      tile.key_scales[i] = keys + cache_.block_size * cache_.key_dim + offset * kScaleBytes;
      tile.value_scales[i] = values + cache_.block_size * p_.value_dim + offset * kScaleBytes;
    }
  }
  const char* element(const void* first, int64_t index) const {
    return static_cast<const char*>(first) + index * cache_.template element_bytes<T>();
  }

  // Computes the tile's logits, and prefetches the next tile's V.
  void multiply_keys(int rows) {
    const void* pieces[kRuns];
    int count = 0;
    if (!p_.latent())
      for (; count * kRun < coming_.count; count++) pieces[count] = coming_.values[count];
    const int lines = (kRun * p_.value_dim * pack_bytes_ / pack_ + kLine - 1) / kLine;
    const Fetcher fetcher(pieces, count, lines, kLine, words_);
    const int vectors = (tile_.count + kLanes - 1) / kLanes;
    const int columns = (vectors + kMicroColumns - 1) / kMicroColumns * kMicroColumns;
    if constexpr (kInCodes)
      return multiply_keys(
          KeyMatrix<Codes>({}, tile_.keys, cache_.block_size), rows, columns, fetcher);
    if constexpr (kWidensInProduct)
      if (widens_in_product(rows))
        return multiply_keys(KeyMatrix<Packs<T>>({widener_}, tile_.keys, cache_.block_size * 4),
                             rows, columns, fetcher);
    if (copies_keys_) copy_keys();
    multiply_keys(KeyMatrix<Elements<T>>({}, tile_.keys, key_stride()), rows, columns, fetcher);
  }
  template <class Matrix>
  void multiply_keys(const Matrix& keys, int rows, int columns, const Fetcher& fetcher) {
    Product<Multiplied, Matrix>(words_, scratch_.query, words_, keys, scratch_.logits, kTile,
                                nullptr, fetcher)
        .run(rows, columns);
  }

  // Adds the tile's weighted V, and prefetches the next tile's K.
  void multiply_values(int rows) {
    const void* pieces[kRuns];
    int count = 0;
    for (int run = 0; run * kRun < coming_.count; run += joined_runs_)
      pieces[count++] = coming_.keys[run];
    const int depth = kInCodes ? (tile_.count + pack_ - 1) / pack_ * pack_ / 2
                            : (tile_.count + kPack - 1) / kPack;
    const int stride = cache_.block_size * pack_bytes_;
    const int packs = cache_.key_dim / pack_;
    const int lines = stride < kLine ? (packs * stride + kLine - 1) / kLine : packs;
    const Fetcher fetcher(pieces, count, lines, std::max(stride, kLine), depth);
    if constexpr (kInCodes)
      return multiply_values(
          ValueMatrix<Codes>({}, tile_.values, p_.value_dim), rows, depth, fetcher);
    if constexpr (kWidensInProduct)
      if (widens_in_product(rows))  // values past the end are finite and have weight zero
        return multiply_values(ValueMatrix<Packs<T>>({widener_}, tile_.values, p_.value_dim * 4),
                               rows, depth, fetcher);
    if (p_.latent())
      repack_values();
    else if (copies_values_)
      for (int run = 0; run * kRun < tile_.count; run++) copy_values(run);
    if (tile_.count % kPack) drop_second();
    multiply_values(ValueMatrix<Elements<T>>({}, tile_.values, value_stride()), rows, depth,
                    fetcher);
  }
  template <class Matrix>
  void multiply_values(const Matrix& values, int rows, int depth, const Fetcher& fetcher) {
    Product<Multiplied, Matrix>(depth, reinterpret_cast<uint32_t*>(scratch_.logits), kTile, values,
                                scratch_.sums.out, width_, scratch_.rescale, fetcher,
                                scratch_.weight_unit)
        .run(rows, width_ / kLanes);
  }

  // Returns whether the products widen fp8 in registers. With many rows this would widen each
  // element several times; then a whole tile is widened first.
  bool widens_in_product(int rows) const {
    return cache_.fp8 && rows <= kMostWidening && joined_runs_ * kRun == kLanes && !p_.latent() &&
           p_.value_dim % kLanes == 0;
  }

  // The stride between words of the tile's keys.
  int key_stride() const { return (copies_keys_ ? kTile : cache_.block_size) * kPack; }

  // Copies a pack of each of `count` keys or dimensions; the packs of a word go to a row of `to`.
  void copy(const void* from, int64_t count, Stored* to, int64_t stride) const {
    auto* const bytes = static_cast<const uint8_t*>(from);
    if (!cache_.fp8)
      std::memcpy(to, from, count * kPack * sizeof *to);
    else if constexpr (Widener::kPack == 1)
      widener_.widen(bytes, count, to);
    else
      widener_.widen_packs(bytes, count, to, to + stride);
  }

  // Joins runs shorter than a vector.
  void copy_keys() {
    const int64_t stride = cache_.block_size * pack_bytes_;
    for (int run = 0; run < kRuns; run += joined_runs_) {
      auto* from = static_cast<const char*>(tile_.keys[run]);
      Stored* to = scratch_.keys + run * kRun * kPack;
      for (int i = 0; i < joined_runs_; i++) tile_.keys[run + i] = to + i * kRun * kPack;
      if (run * kRun >= tile_.count) continue;
      for (int at = 0; at < cache_.key_dim; at += pack_, from += stride, to += kTile * pack_)
        copy(from, joined_runs_ * kRun, to, kTile * kPack);
    }
  }

  // If rows of V are not whole vectors, copies are padded.
  int value_stride() const { return (copies_values_ ? width_ : p_.value_dim) * kPack; }

  void copy_values(int run) {
    auto* from = static_cast<const char*>(tile_.values[run]);
    Stored* to = copied_values(run);
    tile_.values[run] = to;
    const int64_t row = p_.value_dim * pack_bytes_;
    for (int at = 0; at < kRun; at += pack_, from += row, to += value_stride() * pack_ / kPack)
      copy(from, p_.value_dim, to, value_stride());
  }

  // Copies values out of the keys that contain them.
  void repack_values() {
    for (int run = 0; run < kRuns; run++) tile_.values[run] = copied_values(run);
    for (int run = 0; run * kRun < tile_.count; run += kMinBlock / kRun)
      repack<T>(static_cast<const Stored*>(tile_.keys[run]), key_stride(), p_.value_dim,
                copied_values(run), value_stride());
  }

  Stored* copied_values(int run) const { return scratch_.values + run * kRun * width_; }

  // Clears the second key of the last pair, which is past the end.
  void drop_second() {
    const int run = tile_.count / kRun, pair = tile_.count % kRun / kPack;
    if (!copies_values_) copy_values(run);
    Stored* row = copied_values(run) + pair * value_stride();
    for (int i = 0; i < p_.value_dim; i++) row[i * kPack + 1] = 0;
  }

  // Converts a row of logits to weights, relative to the greatest logit so far. `position` is the
  // query's, `first` and `last` those of the first and last key it sees, all counted from the tile's
  // first key.
  void softmax(int row, int head, int position, int first, int last, int vectors) {
    Ints lane;
    for (int i = 0; i < kLanes; i++) lane[i] = i;
    float* logits = scratch_.logits + row * kTile;
    const float slope = p_.alibi_slopes ? p_.alibi_slopes[head] * kLog2E : 0.f;
    Floats x[kTile / kLanes];
    Floats greatest = broadcast(scratch_.sums.maximum[row]);
    for (int i = 0; i < vectors; i++) {
      Ints key = lane + i * kLanes;
      x[i] = load<Floats>(logits + i * kLanes);
      if (kInCodes) x[i] = x[i] * scratch_.query_unit[row] * scales(tile_.key_scales, i);
      if (p_.soft_cap)
        x[i] = cap(x[i] * (scale_ / p_.soft_cap)) * (p_.soft_cap * kLog2E);
      else
        x[i] = x[i] * (scale_ * kLog2E);
      if (p_.alibi_slopes) x[i] += slope * __builtin_convertvector(key - position, Floats);
      Ints seen = (key <= last) & (key >= first);
      x[i] = seen ? x[i] : broadcast(-INFINITY);
      greatest = max(greatest, x[i]);
    }
    const float maximum = reduce_max(greatest);
    Floats sum{};
    auto* weights = reinterpret_cast<typename Weights::Stored*>(logits);
    for (int i = 0; i < vectors; i++) {
      x[i] = exp2(x[i] - maximum);
      sum += x[i];
      if (!kInCodes) Weights::store_floats(weights + i * kLanes, x[i] * grown_);
    }
    Softmax& sums = scratch_.sums;
    const float rescale = exp2(broadcast(sums.maximum[row] - maximum))[0];
    if constexpr (kInCodes) round_weights(row, x, vectors);
    sums.maximum[row] = maximum;
    sums.total[row] = sums.total[row] * rescale + reduce_add(sum);
    scratch_.rescale[row] = rescale;
  }

  // Multiplies a row's weights by the values' scales, and rounds them to 16-bit integers. Scales of
  // values past the end may be NaN, and their weights are zeros.
  void round_weights(int row, Floats (&x)[kTile / kLanes], int vectors) {
    Floats greatest{}, nothing{};
    for (int i = 0; i < vectors; i++) {
      x[i] = x[i] > 0.f ? x[i] * scales(tile_.value_scales, i) : Floats{};
      greatest = max(x[i], greatest);
      nothing += x[i] * 0.f;
    }
    const float unit = std::max(reduce_max(greatest), 0x1p-100f) / 32767;
    scratch_.weight_unit[row] = unit + reduce_add(nothing);
    auto* to = reinterpret_cast<int16_t*>(scratch_.logits + row * kTile);
    for (int i = 0; i < vectors; i++)
      store(to + i * kLanes, __builtin_convertvector(round_to_ints(x[i] / unit), Integers));
  }

  // Returns the scales of a tile's vector of keys or of values.
  static Floats scales(const char* const* runs, int vector) {
    return BFloat16::load_floats(
        reinterpret_cast<const uint16_t*>(runs[vector * (kLanes / kRun)]));
  }

  // Stores the weights in words like V's.
  using Weights = std::conditional_t<kPack == 2, BFloat16, Float32>;
  using Multiplied = std::conditional_t<kInCodes, CodePairs, T>;
  typedef int16_t Integers __attribute__((vector_size(kLanes * 2)));

  // tanh as 1 - 2 / (e^2y + 1), which does not overflow and keeps the sign.
  static Floats cap(Floats y) {
    Floats limited = y > 40.f ? broadcast(40.f) : y;
    return 1.f - 2.f / (exp2(limited * (2 * kLog2E)) + 1.f);
  }

  void finish(const Item& item, const Softmax& sums) {
    if (!item.is_last) return save(item, sums, carried_ + item.carried * saved_size(width_));
    for (int row = 0; row < item.rows; row++) {
      const int64_t token = p_.batch.query_starts[item.seq] + token_of(item, row);
      Stored* to = static_cast<Stored*>(p_.out) +
                   token * p_.out_token_stride + head_of(item, row) * p_.value_dim;
      const float factor = weigh(sums, row, head_of(item, row)) * value_scale_;
      for (int at = 0; at < p_.value_dim; at += kLanes) {
        Floats v = load<Floats>(sums.out + row * width_ + at) * factor;
        if (p_.value_dim - at >= kLanes) {
          T::store_floats(to + at, v);
        } else {
          Stored tail[kLanes];
          T::store_floats(tail, v);
          std::memcpy(to + at, tail, (p_.value_dim - at) * sizeof *tail);
        }
      }
    }
  }

  // Returns the factor of a row's sums: 1 / the softmax's denominator, which includes the sink.
  float weigh(const Softmax& sums, int row, int head) const {
    const float maximum = sums.maximum[row], total = sums.total[row];
    if (!(total > 0)) return 0;  // a row without keys gives zeros
    if (!p_.sinks) return 1 / total;
    const float sink = p_.sinks[head] * kLog2E, greatest = std::max(maximum, sink);
    const float share = std::exp2(maximum - greatest);
    return share / (total * share + std::exp2(sink - greatest));
  }

  void save(const Item& item, const Softmax& sums, float* to) const {
    for (int row = 0; row < item.rows; row++, to += saved_size(width_)) {
      to[0] = sums.maximum[row];
      to[1] = sums.total[row];
      std::copy_n(sums.out + row * width_, width_, to + 2);
    }
  }

  const Attention& p_;
  const Cache& cache_;
  const int group_, words_, width_, block_shift_;
  const int joined_runs_;                   // runs of keys that are contiguous in this cache
  const bool copies_keys_, copies_values_;  // for fp8, or for partial vectors
  const int pack_, pack_bytes_;  // of the cache
  const Widener widener_;
  const float grown_, scale_, value_scale_;
  Scratch<T>& scratch_;
  float *const saved_, *const carried_;
  Tile tile_, coming_;  // the current one and the next one
};
