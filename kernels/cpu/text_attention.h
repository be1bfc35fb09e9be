// Attention of whole texts, of which no key or value is kept.
//
// An item is a KV head of a text and a range of its queries. Its keys and values are packed once, for
// all query heads of the KV head, into words as T's dot products take them. The logits of a block of
// queries and up to kKeys keys are computed at once, so that the softmax passes over whole rows; that
// of more keys is online. Intel's matrix unit (AMX) multiplies bfloat16 heads that fit its tiles.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "amx.h"
#include "operators.h"
#include "plan.h"
#include "product.h"
#include "repack.h"
#include "vector.h"

// A call; elements of a head are adjacent.
struct TextAttention {
  const View &query, &key, &value;
  void* out;  // contiguous
  float scale;
  Sight sight;
};

struct TextItem {
  int64_t first;  // row of the text's first token
  int length, kv_head, begin, end;  // the text's tokens, and the queries
};

// A matrix of words in tiles of 16 x 16, whose words are adjacent. Strides are in words.
struct WordTiles {
  static constexpr int kSide = 16, kWords = 1;

  Words load(int row, int vector) const {
    const int column = vector * kLanes;
    return ::load<Words>(words + row / kSide * below + column / kSide * beside +
                         row % kSide * kSide + column % kSide);
  }
  Words word(Words loaded, int) const { return loaded; }

  const uint32_t* words;
  int64_t below, beside;  // strides of tiles
};

template <class T>
class TextWorker {
 public:
  // Returns the queries of a block. Blocks begin at multiples of it, so that results do not depend on
  // the division into items.
  static int rows_of(bool matrix) { return matrix ? 32 : kMaxRows; }

  // Returns whether the matrix unit multiplies heads of these sizes.
  static bool on_matrix_unit(int64_t key_dim, int64_t value_dim) {
#if OCTAVO_HAS_AMX
    return std::is_same_v<T, BFloat16> && key_dim % 32 == 0 && value_dim % kSide == 0 &&
           octavo_allow_amx();
#else
    return false;
#endif
  }

  // `longest` is the maximum length of a text.
  TextWorker(const TextAttention& call, int longest)
      : call_(call), heads_(call.query.sizes[1]), group_(heads_ / call.key.sizes[1]),
        words_(call.key.sizes[2] / kPack), value_dim_(call.value.sizes[2]),
        width_((value_dim_ + kSide - 1) / kSide * kSide),
        matrix_(on_matrix_unit(call.key.sizes[2], value_dim_)) {
    const int64_t keys = padded(longest);
    const int64_t size = keys * words_ + keys / kPack * width_ + kMaxRows * words_ +
                         kMaxRows * (kKeys / kPack + kKeys + 2 * width_);
    thread_local Memory kept;
    thread_local int64_t kept_size = 0;
    if (kept_size < size) {
      kept = allocate(size * sizeof *keys_);
      kept_size = size;
    }
    keys_ = static_cast<uint32_t*>(kept.get());
    values_ = keys_ + keys * words_;
    queries_ = values_ + keys / kPack * width_;
    weights_ = queries_ + kMaxRows * words_;
    logits_ = reinterpret_cast<float*>(weights_ + kMaxRows * kKeys / kPack);
    out_ = logits_ + kMaxRows * kKeys;
    sums_ = out_ + kMaxRows * width_;
    if (matrix_) configure();
  }
#if OCTAVO_HAS_AMX
  ~TextWorker() {
    if (matrix_) _tile_release();
  }
#endif
  TextWorker(const TextWorker&) = delete;
  TextWorker& operator=(const TextWorker&) = delete;

  void run(const TextItem& item) {
    pack_keys(item);
    pack_values(item);
    const int rows = rows_of(matrix_);
    for (int head = item.kv_head * group_; head < (item.kv_head + 1) * group_; head++)
      for (int query = item.begin; query < item.end; query += rows)
        attend(item, head, query, std::min(rows, item.end - query));
  }

 private:
  using Stored = typename T::Stored;
  static constexpr int kPack = T::kPack;
  static constexpr int kSide = WordTiles::kSide;
  static constexpr int64_t kTile = kSide * kSide;
  static constexpr int kGroup = kSide * kPack;  // keys whose values are a group of tiles
  static constexpr int kKeys = 256;             // of a block

  static int64_t padded(int64_t keys) { return (keys + kGroup - 1) / kGroup * kGroup; }

  static const Stored* row_of(const View& x, int64_t token, int64_t head) {
    return x.as<const Stored>() + token * x.strides[0] + head * x.strides[1];
  }

  // Loads up to kLanes words of a row; elements after the first `count` are zeros.
  static Words load_words(const Stored* from, int count) {
    if (count >= kLanes * kPack) return T::load_words(from);
    Stored tail[kLanes * kPack] = {};
    std::memcpy(tail, from, count * sizeof *tail);
    return T::load_words(tail);
  }

  // Copies a row's words.
  void copy(const Stored* from, uint32_t* to) const {
    for (int at = 0; at < words_; at += kLanes)
      store_first(to + at, words_ - at, load_words(from + at * kPack, (words_ - at) * kPack));
  }

  // Packs keys: a row of a tile has a word of 16 keys. Keys after the last one are zeros.
  void pack_keys(const TextItem& item) {
    for (int key = 0; key < padded(item.length); key += kSide) {
      const int count = std::clamp(item.length - key, 0, kSide);
      for (int i = 0; i < count; i++)
        copy(row_of(call_.key, item.first + key + i, item.kv_head), queries_ + i * words_);
      std::fill(queries_ + count * words_, queries_ + kSide * words_, 0);
      uint32_t* const tile = keys_ + key * words_;
      for (int i = 0; i < kSide; i += 4)
        for (int at = 0; at < words_; at += 4) {
          Four square[4];
#pragma GCC unroll 4
          for (int row = 0; row < 4; row++)
            square[row] = ::load<Four>(queries_ + (i + row) * words_ + at);
          transpose(square);
#pragma GCC unroll 4
          for (int row = 0; row < 4; row++) store(tile + (at + row) * kSide + i, square[row]);
        }
    }
  }

  // Packs values: a word has an element of kPack tokens.
  void pack_values(const TextItem& item) {
    for (int key = 0; key < padded(item.length); key += kPack) {
      const Stored* rows[kPack];
      for (int i = 0; i < kPack; i++)
        rows[i] = key + i < item.length ? row_of(call_.value, item.first + key + i, item.kv_head)
                                        : nullptr;
      const int row = key / kPack;
      uint32_t* const to = values_ + row / kSide * kSide * width_ + row % kSide * kSide;
      for (int at = 0; at < width_; at += kLanes) {
        const int left = value_dim_ - at;
        Words words{};
        if constexpr (kPack == 1) {
          if (rows[0] && left > 0) words = load_words(rows[0] + at, left);
        } else if (left > 0) {
          for (int i = 0; i < kPack; i++)
            if (rows[i])
              words |= __builtin_convertvector(load_first<Halves>(rows[i] + at, left), Words)
                       << (16 * i);
        }
        store(to + at / kSide * kSide * kSide + at % kSide, words);
      }
    }
  }

  void attend(const TextItem& item, int head, int query, int rows) {
    for (int row = 0; row < rows; row++)
      copy(row_of(call_.query, item.first + query + row, head), queries_ + row * words_);
    const int first = call_.sight.first_key(query) / kGroup * kGroup;
    const int last = call_.sight.last_key(query + rows - 1, item.length);
    std::fill_n(maximum_, rows, -1e30f);
    std::fill_n(total_, rows, 0.f);
    for (int begin = first; begin <= last; begin += kKeys) {
      const int keys = padded(std::min(last + 1 - begin, kKeys));
      multiply_keys(begin, keys, rows);
      for (int row = 0; row < rows; row++) {
        const int position = query + row;
        weigh(row, keys, std::max(call_.sight.first_key(position) - begin, 0),
              std::min(call_.sight.last_key(position, item.length) + 1 - begin, keys));
      }
      multiply_values(begin, keys, rows, begin == first);
    }
    for (int row = 0; row < rows; row++) {
      Stored* const to = static_cast<Stored*>(call_.out) +
                         ((item.first + query + row) * heads_ + head) * value_dim_;
      for (int at = 0; at < value_dim_; at += kLanes) {
        Stored all[kLanes];
        T::store_floats(all, load<Floats>(out_ + row * width_ + at) / total_[row]);
        std::memcpy(to + at, all, std::min(kLanes, value_dim_ - at) * sizeof *all);
      }
    }
  }

  // Sets the logits of a block's queries and of `keys` keys from `begin` on.
  void multiply_keys(int begin, int keys, int rows) {
    const uint32_t* const packed = keys_ + begin * words_;
    if (matrix_) return multiply_keys_in_tiles(packed, keys, rows > kSide);
    // A few keys at a time stay in the L1 cache while all queries are multiplied by them.
    constexpr int kColumns = kMicroColumns * kLanes > kSide ? kMicroColumns * kLanes : kSide;
    for (int key = 0; key < keys; key += kColumns)
      Product<T, WordTiles>(words_, queries_, words_, {packed + key * words_, kTile, kSide * words_},
                            logits_ + key, kKeys, nullptr, kNothing)
          .run(rows, std::min(kColumns, keys - key) / kLanes);
  }

  // Adds the weighted values of a block's keys to the results so far, or sets them.
  void multiply_values(int begin, int keys, int rows, bool is_first) {
    const uint32_t* const packed = values_ + begin / kPack * width_;
    if (!matrix_)
      return Product<T, WordTiles>(keys / kPack, weights_, kKeys / kPack,
                                   {packed, kSide * width_, kTile}, out_, width_,
                                   is_first ? nullptr : rescale_, kNothing)
          .run(rows, width_ / kLanes);
    multiply_values_in_tiles(packed, keys, rows > kSide, is_first ? out_ : sums_);
    if (is_first) return;
    for (int row = 0; row < rows; row++)
      for (int i = row * width_; i < (row + 1) * width_; i += kLanes)
        store(out_ + i, load<Floats>(out_ + i) * rescale_[row] + load<Floats>(sums_ + i));
  }

#if OCTAVO_HAS_AMX
  static void configure() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    std::fill_n(config.row_bytes, 8, 64);
    std::fill_n(config.rows, 8, kSide);
    before_tiles();
    _tile_loadconfig(&config);
  }

  void multiply_keys_in_tiles(const uint32_t* packed, int keys, bool both) {
    before_tiles();
    for (int key = 0; key < keys; key += kSide) {
      const uint32_t* tile = packed + key * words_;
      _tile_zero(0);
      _tile_zero(1);
      for (int at = 0; at < words_; at += kSide, tile += kSide * kSide) {
        _tile_loadd(4, tile, 64);
        _tile_loadd(2, queries_ + at, 4 * words_);
        _tile_dpbf16ps(0, 2, 4);
        if (!both) continue;
        _tile_loadd(3, queries_ + kSide * words_ + at, 4 * words_);
        _tile_dpbf16ps(1, 3, 4);
      }
      _tile_stored(0, logits_ + key, 4 * kKeys);
      if (both) _tile_stored(1, logits_ + kSide * kKeys + key, 4 * kKeys);
    }
  }

  void multiply_values_in_tiles(const uint32_t* packed, int keys, bool both, float* to) {
    before_tiles();
    for (int at = 0; at < width_; at += kSide) {
      _tile_zero(0);
      _tile_zero(1);
      for (int row = 0; row < keys / kPack; row += kSide) {
        _tile_loadd(4, packed + row * width_ + at * kSide, 64);
        _tile_loadd(2, weights_ + row, 4 * kKeys / kPack);
        _tile_dpbf16ps(0, 2, 4);
        if (!both) continue;
        _tile_loadd(3, weights_ + (kSide * kKeys) / kPack + row, 4 * kKeys / kPack);
        _tile_dpbf16ps(1, 3, 4);
      }
      _tile_stored(0, to + at, 4 * width_);
      if (both) _tile_stored(1, to + kSide * width_ + at, 4 * width_);
    }
  }
#else
  static void configure() {}
  void multiply_keys_in_tiles(const uint32_t*, int, bool) {}
  void multiply_values_in_tiles(const uint32_t*, int, bool, float*) {}
#endif

  // Converts a row of logits to weights, relative to the greatest logit so far. It sees keys from
  // `first` on, before `end`.
  void weigh(int row, int keys, int first, int end) {
    using Weights = std::conditional_t<kPack == 2, BFloat16, Float32>;
    Ints lane;
    for (int i = 0; i < kLanes; i++) lane[i] = i;
    const float* const logits = logits_ + row * kKeys;
    auto* const weights = reinterpret_cast<typename Weights::Stored*>(weights_ + row * kKeys / kPack);
    const Floats scale = broadcast(call_.scale * 1.4426950408889634f);  // to base 2
    const auto logit = [&](int key) {
      const Floats x = load<Floats>(logits + key) * scale;
      if (key >= first && key + kLanes <= end) return x;
      const Ints number = lane + key;
      return ((number >= first) & (number < end)) ? x : broadcast(-INFINITY);
    };
    Floats greatest = broadcast(maximum_[row]);
    for (int key = 0; key < keys; key += kLanes) greatest = max(greatest, logit(key));
    const float most = reduce_max(greatest);
    Floats sum{};
    for (int key = 0; key < keys; key += kLanes) {
      Weights::store_floats(weights + key, exp2(logit(key) - most));
      sum += Weights::load_floats(weights + key);  // as they are multiplied, so that they add up to 1
    }
    rescale_[row] = exp2(broadcast(maximum_[row] - most))[0];
    maximum_[row] = most;
    total_[row] = total_[row] * rescale_[row] + reduce_add(sum);
  }

  static inline const Fetcher kNothing{nullptr, 0, 0, 0, 1};

  const TextAttention& call_;
  const int heads_, group_, words_, value_dim_, width_;
  const bool matrix_;
  uint32_t *keys_, *values_, *queries_, *weights_;
  float *logits_, *out_, *sums_;  // the results so far, and a block's on the matrix unit
  float maximum_[kMaxRows], total_[kMaxRows], rescale_[kMaxRows];
};
