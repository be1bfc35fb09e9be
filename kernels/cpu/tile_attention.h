// Attention of whole texts on Intel's matrix unit (AMX).
//
// An item is a KV head of a text and a range of its queries. Its keys and values are packed once,
// into tiles, for all query heads of the KV head. The logits of a block of queries and up to kKeys
// keys are computed at once, so that the softmax passes over whole rows; that of more keys is online.
#pragma once

#include "amx.h"

#if OCTAVO_HAS_AMX

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "operators.h"
#include "plan.h"
#include "vector.h"

// A call; all tensors are bfloat16, and elements of a head are adjacent.
struct TextAttention {
  const View &query, &key, &value;
  uint16_t* out;  // contiguous
  float scale;
  Sight sight;
};

struct TextItem {
  int64_t first;  // row of the text's first token
  int length, kv_head, begin, end;  // the text's tokens, and the queries
};

class TextWorker {
 public:
  static constexpr int kQueries = 256;  // of an item

  static bool fits(int64_t key_dim, int64_t value_dim) {
    return key_dim % kPairs == 0 && value_dim % kSide == 0 && octavo_allow_amx();
  }

  // `longest` is the maximum length of a text.
  TextWorker(const TextAttention& call, int longest)
      : call_(call), heads_(call.query.sizes[1]), group_(heads_ / call.key.sizes[1]),
        key_dim_(call.key.sizes[2]), value_dim_(call.value.sizes[2]) {
    const int64_t keys = (longest + kPairs - 1) / kPairs * kPairs;
    const int64_t floats = kRows * (kKeys + 2 * value_dim_), words = kRows * kKeys / 2;
    const int64_t bytes =
        2 * (keys * (key_dim_ + value_dim_) + kRows * key_dim_) + 4 * (floats + words);
    thread_local Memory kept;
    thread_local int64_t size = 0;
    if (size < bytes) {
      kept = allocate(bytes);
      size = bytes;
    }
    keys_ = static_cast<uint16_t*>(kept.get());
    values_ = keys_ + keys * key_dim_;
    queries_ = values_ + keys * value_dim_;
    weights_ = queries_ + kRows * key_dim_;
    logits_ = reinterpret_cast<float*>(weights_ + kRows * kKeys);
    out_ = logits_ + kRows * kKeys;
    sums_ = out_ + kRows * value_dim_;
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
  ~TextWorker() { _tile_release(); }
  TextWorker(const TextWorker&) = delete;
  TextWorker& operator=(const TextWorker&) = delete;

  void run(const TextItem& item) {
    pack(item);
    for (int head = item.kv_head * group_; head < (item.kv_head + 1) * group_; head++)
      for (int query = item.begin; query < item.end; query += kRows)
        attend(item, head, query, std::min(kRows, item.end - query));
  }

 private:
  static constexpr int kSide = 16;    // rows of a tile, and its words in a row
  static constexpr int kPairs = 32;   // bfloat16 in a row of a tile
  static constexpr int kRows = 32;    // queries of a block: two tiles
  static constexpr int kKeys = 256;   // of a block
  static constexpr int kTileSize = kSide * kPairs;

  static const uint16_t* row_of(const View& x, int64_t token, int64_t head) {
    return x.as<const uint16_t>() + token * x.strides[0] + head * x.strides[1];
  }

  // Packs keys and values. Tiles of keys have a word of 16 keys in each row; those of values have two
  // tokens' elements in a word. Tokens after the last one are zeros.
  void pack(const TextItem& item) {
    const int end = (item.length + kPairs - 1) / kPairs * kPairs;
    for (int key = 0; key < end; key++) {
      auto* to = reinterpret_cast<uint32_t*>(keys_ + key / kSide * kSide * key_dim_) + key % kSide;
      const uint16_t* const from =
          key < item.length ? row_of(call_.key, item.first + key, item.kv_head) : nullptr;
      for (int at = 0; at < key_dim_; at += 2, to += kSide) {
        if (from)
          std::memcpy(to, from + at, sizeof *to);
        else
          *to = 0;
      }
    }
    for (int key = 0; key < end; key += 2) {
      const uint16_t* rows[2];
      for (int i = 0; i < 2; i++)
        rows[i] = key + i < item.length ? row_of(call_.value, item.first + key + i, item.kv_head)
                                        : nullptr;
      uint16_t* to =
          values_ + key / kPairs * kPairs * value_dim_ + key % kPairs / 2 * kPairs;
      for (int at = 0; at < value_dim_; at += kSide, to += kTileSize) {
        Words word{};
        for (int i = 0; i < 2; i++)
          if (rows[i])
            word |= __builtin_convertvector(load<Halves>(rows[i] + at), Words) << (16 * i);
        store(to, word);
      }
    }
  }

  void attend(const TextItem& item, int head, int query, int rows) {
    std::memset(queries_, 0, kRows * key_dim_ * sizeof *queries_);
    for (int row = 0; row < rows; row++)
      std::memcpy(queries_ + row * key_dim_, row_of(call_.query, item.first + query + row, head),
                  key_dim_ * sizeof *queries_);
    const int first = call_.sight.first_key(query) / kPairs * kPairs;
    const int last = call_.sight.last_key(query + rows - 1, item.length);
    std::fill_n(maximum_, rows, -1e30f);
    std::fill_n(total_, rows, 0.f);
    for (int begin = first; begin <= last; begin += kKeys) {
      const int keys = (std::min(last + 1 - begin, kKeys) + kPairs - 1) / kPairs * kPairs;
      multiply_keys(begin, keys, rows > kSide);
      for (int row = 0; row < rows; row++) {
        const int position = query + row;
        weigh(row, keys, std::max(call_.sight.first_key(position) - begin, 0),
              std::min(call_.sight.last_key(position, item.length) + 1 - begin, keys));
      }
      float* const sums = begin == first ? out_ : sums_;
      multiply_values(begin, keys, rows > kSide, sums);
      if (sums == sums_)
        for (int row = 0; row < rows; row++)
          for (int i = row * value_dim_; i < (row + 1) * value_dim_; i += kLanes)
            store(out_ + i, load<Floats>(out_ + i) * rescale_[row] + load<Floats>(sums_ + i));
    }
    for (int row = 0; row < rows; row++) {
      uint16_t* const to =
          call_.out + ((item.first + query + row) * heads_ + head) * value_dim_;
      for (int at = 0; at < value_dim_; at += kLanes)
        BFloat16::store_floats(to + at,
                               load<Floats>(out_ + row * value_dim_ + at) / total_[row]);
    }
  }

  void multiply_keys(int begin, int keys, bool both) {
    before_tiles();
    for (int key = 0; key < keys; key += kSide) {
      const uint16_t* tile = keys_ + (begin + key) * key_dim_;
      _tile_zero(0);
      _tile_zero(1);
      for (int at = 0; at < key_dim_; at += kPairs, tile += kTileSize) {
        _tile_loadd(4, tile, 64);
        _tile_loadd(2, queries_ + at, 2 * key_dim_);
        _tile_dpbf16ps(0, 2, 4);
        if (!both) continue;
        _tile_loadd(3, queries_ + kSide * key_dim_ + at, 2 * key_dim_);
        _tile_dpbf16ps(1, 3, 4);
      }
      _tile_stored(0, logits_ + key, 4 * kKeys);
      if (both) _tile_stored(1, logits_ + kSide * kKeys + key, 4 * kKeys);
    }
  }

  void multiply_values(int begin, int keys, bool both, float* to) {
    before_tiles();
    for (int at = 0; at < value_dim_; at += kSide) {
      _tile_zero(0);
      _tile_zero(1);
      for (int key = 0; key < keys; key += kPairs) {
        _tile_loadd(4, values_ + (begin + key) * value_dim_ + at * kPairs, 64);
        _tile_loadd(2, weights_ + key, 2 * kKeys);
        _tile_dpbf16ps(0, 2, 4);
        if (!both) continue;
        _tile_loadd(3, weights_ + kSide * kKeys + key, 2 * kKeys);
        _tile_dpbf16ps(1, 3, 4);
      }
      _tile_stored(0, to + at, 4 * value_dim_);
      if (both) _tile_stored(1, to + kSide * value_dim_ + at, 4 * value_dim_);
    }
  }

  // Converts a row of logits to weights, relative to the greatest logit so far. It sees keys from
  // `first` on, before `end`.
  void weigh(int row, int keys, int first, int end) {
    Ints lane;
    for (int i = 0; i < kLanes; i++) lane[i] = i;
    const float* const logits = logits_ + row * kKeys;
    uint16_t* const weights = weights_ + row * kKeys;
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
      const Halves weight = BFloat16::narrow(exp2(logit(key) - most));
      sum += BFloat16::widen(weight);  // as they are multiplied, so that they add up to 1
      store(weights + key, weight);
    }
    rescale_[row] = exp2(broadcast(maximum_[row] - most))[0];
    maximum_[row] = most;
    total_[row] = total_[row] * rescale_[row] + reduce_add(sum);
  }

  const TextAttention& call_;
  const int heads_, group_, key_dim_, value_dim_;
  uint16_t *keys_, *values_, *queries_, *weights_;
  float *logits_, *out_, *sums_;  // the results so far, and a block's
  float maximum_[kRows], total_[kRows], rescale_[kRows];
};

#endif
