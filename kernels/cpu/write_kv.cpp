// Writes the keys and values of new tokens to their slots, and rotates keys and queries by their
// positions (RoFormer, Su et al. 2021).

#include <cstdint>
#include <cstring>

#include "attention.h"

namespace {

constexpr int64_t kMinParallelElements = 1 << 13;  // fewer do not pay for threads

// Tokens in the model's layout: a token's head is contiguous. Strides are in elements.
template <class Stored>
struct Rows {
  const Stored* first;
  int64_t token_stride, head_stride;
  const Stored* at(int64_t token, int64_t head) const {
    return first + token * token_stride + head * head_stride;
  }
};

// Put a key or a value into its slot.
template <int kPack, class Element>
void put_key(const Cache& cache, int64_t slot, int64_t head, const Element* key) {
  Element* to = static_cast<Element*>(cache.keys) +
                cache.keys_at(slot / cache.block_size, head) + slot % cache.block_size * kPack;
  for (int64_t at = 0; at < cache.key_dim; at += kPack)
    std::memcpy(to + at * cache.block_size, key + at, kPack * sizeof *key);
}

template <int kPack, class Element>
void put_value(const Cache& cache, int64_t slot, int64_t head, int place, const Element* value) {
  const int64_t offset = slot % cache.block_size;
  Element* to = static_cast<Element*>(cache.values) +
                cache.values_at(slot / cache.block_size, head) +
                offset / kPack * kPack * cache.value_dim + place;
  for (int64_t at = 0; at < cache.value_dim; at++) to[at * kPack] = value[at];
}

// Put the scale of a key or a value behind the codes of a block's head.
void put_scale(int8_t* head, const Cache& cache, int64_t slot, int64_t dim, const Coded& coded) {
  std::memcpy(head + cache.block_size * dim + slot % cache.block_size * kScaleBytes, &coded.scale,
              kScaleBytes);
}

template <class T, class Stored = typename T::Stored>
void write_key(const Cache& cache, int64_t slot, int64_t head, const Stored* key) {
  if (cache.in_codes) {
    Coded coded;
    float all[kMaxKeyDim + kLanes];
    int8_t packed[kMaxKeyDim];
    widen_head<T>(key, cache.key_dim, all);
    encode(all, cache.key_dim, true, coded);
    for (int at = 0; at < cache.key_dim; at++)
      packed[at / Codes::kPack * Codes::kPack + Codes::place(at % Codes::kPack)] = coded.codes[at];
    put_key<Codes::kPack>(cache, slot, head, packed);
    int8_t* const keys = static_cast<int8_t*>(cache.keys);
    return put_scale(keys + cache.keys_at(slot / cache.block_size, head), cache, slot,
                     cache.key_dim, coded);
  }
  if (!cache.fp8) return put_key<T::kPack>(cache, slot, head, key);
  using Widener = Fp8Widener<T>;
  uint8_t bytes[kMaxKeyDim], packed[kMaxKeyDim];
  to_fp8<T>(key, cache.key_dim, cache.key_scale, cache.fp8, bytes);
  for (int at = 0; at < cache.key_dim; at += Widener::kPack)
    for (int i = 0; i < Widener::kPack; i++) packed[at + Widener::place(i)] = bytes[at + i];
  put_key<Widener::kPack>(cache, slot, head, packed);
}

template <class T, class Stored = typename T::Stored>
void write_value(const Cache& cache, int64_t slot, int64_t head, const Stored* value) {
  if (cache.in_codes) {
    Coded coded;
    float all[kMaxKeyDim + kLanes];
    widen_head<T>(value, cache.value_dim, all);
    encode(all, cache.value_dim, false, coded);
    put_value<Codes::kPack>(cache, slot, head, Codes::place(slot % Codes::kPack), coded.codes);
    int8_t* const values = static_cast<int8_t*>(cache.values);
    return put_scale(values + cache.values_at(slot / cache.block_size, head), cache, slot,
                     cache.value_dim, coded);
  }
  if (!cache.fp8) return put_value<T::kPack>(cache, slot, head, slot % T::kPack, value);
  using Widener = Fp8Widener<T>;
  uint8_t bytes[kMaxKeyDim];
  to_fp8<T>(value, cache.value_dim, cache.value_scale, cache.fp8, bytes);
  put_value<Widener::kPack>(cache, slot, head, Widener::place(slot % Widener::kPack), bytes);
}

// A token's angles: the cosine and sine of each pair.
struct Angles {
  const float *cos, *sin;
};

// Rotates pairs of a head's elements; the second is half a head after the first.
template <class T, class Stored = typename T::Stored>
void rotate_lanes(const Stored* low, const Stored* high, Angles angles, Stored* to_low,
                  Stored* to_high) {
  const Floats x = T::load_floats(low), y = T::load_floats(high);
  const Floats c = load<Floats>(angles.cos), s = load<Floats>(angles.sin);
  T::store_floats(to_low, x * c - y * s);
  T::store_floats(to_high, y * c + x * s);
}

template <class T, class Stored = typename T::Stored>
void rotate(const Stored* head, int half, Angles angles, Stored* to) {
  int at = 0;
  for (; at + kLanes <= half; at += kLanes)
    rotate_lanes<T>(head + at, head + half + at, {angles.cos + at, angles.sin + at}, to + at,
                    to + half + at);
  if (at == half) return;
  const int rest = half - at;
  Stored parts[4][kLanes] = {};
  float cos[kLanes] = {}, sin[kLanes] = {};
  std::memcpy(parts[0], head + at, rest * sizeof *head);
  std::memcpy(parts[1], head + half + at, rest * sizeof *head);
  std::memcpy(cos, angles.cos + at, rest * sizeof *cos);
  std::memcpy(sin, angles.sin + at, rest * sizeof *sin);
  rotate_lanes<T>(parts[0], parts[1], {cos, sin}, parts[2], parts[3]);
  std::memcpy(to + at, parts[2], rest * sizeof *head);
  std::memcpy(to + half + at, parts[3], rest * sizeof *head);
}

template <class Stored>
Rows<Stored> rows_of(const View& tokens) {
  return {tokens.as<const Stored>(), tokens.strides[0], tokens.strides[1]};
}

}  // namespace

// Nothing is written if a slot is past the cache's end. Negative slots are skipped, as are values if
// the cache has none.
void Layer::write(const View& key, const View* value) const {
  check_written(key, value);
  check_slots();
  const int64_t* const slots = batch.slots;
  with_dtype(cache.dtype, [&](auto type) {
    using T = decltype(type);
    using Stored = typename T::Stored;
    const auto keys = rows_of<Stored>(key), values = rows_of<Stored>(value ? *value : key);
    const int64_t elements = batch.num_tokens * cache.num_kv_heads * cache.key_dim;
#pragma omp parallel for num_threads(num_threads()) if (elements >= kMinParallelElements)
    for (int64_t token = 0; token < batch.num_tokens; token++) {
      if (slots[token] < 0) continue;
      for (int64_t head = 0; head < cache.num_kv_heads; head++) {
        write_key<T>(cache, slots[token], head, keys.at(token, head));
        if (cache.values) write_value<T>(cache, slots[token], head, values.at(token, head));
      }
    }
  });
}

void Layer::rotate_and_write(const View& query, const View& key, const View& value,
                             const View& cos, const View& sin, void* rotated) const {
  check_query(query);
  check_written(key, &value);
  require(query.sizes[0] == batch.num_tokens && cos.is_float32() && sin.is_float32(),
          "queries must be those of the slots, and angles float32");
  check_slots();
  const int64_t* const slots = batch.slots;
  with_dtype(cache.dtype, [&](auto type) {
    using T = decltype(type);
    using Stored = typename T::Stored;
    const int num_heads = query.sizes[1], dim = cache.key_dim;
    const auto queries = rows_of<Stored>(query), keys = rows_of<Stored>(key),
               values = rows_of<Stored>(value);
    const int64_t elements = batch.num_tokens * num_heads * dim;
#pragma omp parallel for num_threads(num_threads()) if (elements >= kMinParallelElements)
    for (int64_t token = 0; token < batch.num_tokens; token++) {
      const int64_t angle = token * cos.strides[0];
      const Angles angles{cos.as<float>() + angle, sin.as<float>() + angle};
      Stored* to = static_cast<Stored*>(rotated) + token * num_heads * dim;
      for (int head = 0; head < num_heads; head++)
        rotate<T>(queries.at(token, head), dim / 2, angles, to + head * dim);
      if (slots[token] < 0) continue;
      for (int64_t head = 0; head < cache.num_kv_heads; head++) {
        Stored rotated_key[kMaxKeyDim];
        rotate<T>(keys.at(token, head), dim / 2, angles, rotated_key);
        write_key<T>(cache, slots[token], head, rotated_key);
        if (cache.values) write_value<T>(cache, slots[token], head, values.at(token, head));
      }
    }
  });
}

namespace {

void write_kv(const View& key, const View* value, int64_t layer) {
  Layer(layer).write(key, value);
}
OCTAVO_OPERATOR(write_kv)

void rotate_and_write(const Result& result, const View& query, const View& key, const View& value,
                      const View& cos, const View& sin, int64_t layer) {
  Layer(layer).rotate_and_write(query, key, value, cos, sin,
                                make_out(result, query, query.sizes[2]));
}
OCTAVO_OPERATOR(rotate_and_write)

}  // namespace
