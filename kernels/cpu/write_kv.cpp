// Writes the keys and values of new tokens to their slots, and rotates keys and queries by their
// positions (RoFormer, Su et al. 2021).

#include <cstdint>
#include <cstring>

#include "cache.h"

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

template <class T, class Stored = typename T::Stored>
void write_key(const Cache& cache, int64_t slot, int64_t head, const Stored* key) {
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

// Returns 0, or 1 + the index of the first slot that is past the cache's end.
int64_t bad_slot(const Cache& cache, const int64_t* slots, int64_t num_tokens) {
  const int64_t num_slots = int64_t(cache.num_blocks) * cache.block_size;
  for (int64_t token = 0; token < num_tokens; token++)
    if (slots[token] >= num_slots) return 1 + token;
  return 0;
}

}  // namespace

// Returns 0, or 1 + the index of the first slot that is past the cache's end; then
// nothing has been written. Negative slots are skipped, as are values if the cache has none.
extern "C" int64_t octavo_write_kv(
    const Cache* cache, const void* key, int64_t key_token_stride, int64_t key_head_stride,
    const void* value, int64_t value_token_stride, int64_t value_head_stride,
    const int64_t* slots, int64_t num_tokens, int threads) {
  if (const int64_t bad = bad_slot(*cache, slots, num_tokens)) return bad;
  with_type(*cache, [&](auto type) {
    using T = decltype(type);
    using Stored = typename T::Stored;
    Rows<Stored> keys{static_cast<const Stored*>(key), key_token_stride, key_head_stride};
    Rows<Stored> values{static_cast<const Stored*>(value), value_token_stride,
                        value_head_stride};
    const int64_t elements = num_tokens * cache->num_kv_heads * cache->key_dim;
#pragma omp parallel for num_threads(threads) if (elements >= kMinParallelElements)
    for (int64_t token = 0; token < num_tokens; token++) {
      if (slots[token] < 0) continue;
      for (int64_t head = 0; head < cache->num_kv_heads; head++) {
        write_key<T>(*cache, slots[token], head, keys.at(token, head));
        if (cache->values) write_value<T>(*cache, slots[token], head, values.at(token, head));
      }
    }
  });
  return 0;
}

// The same for keys that are not rotated yet; writes the rotated queries to `out`, contiguous.
extern "C" int64_t octavo_rotate_and_write(
    const Cache* cache, const void* query, int64_t query_token_stride,
    int64_t query_head_stride, int num_heads, const void* key, int64_t key_token_stride,
    int64_t key_head_stride, const void* value, int64_t value_token_stride,
    int64_t value_head_stride, const float* cos, const float* sin, int64_t angle_stride,
    const int64_t* slots, int64_t num_tokens, void* out, int threads) {
  if (const int64_t bad = bad_slot(*cache, slots, num_tokens)) return bad;
  with_type(*cache, [&](auto type) {
    using T = decltype(type);
    using Stored = typename T::Stored;
    const int dim = cache->key_dim;
    Rows<Stored> queries{static_cast<const Stored*>(query), query_token_stride,
                         query_head_stride};
    Rows<Stored> keys{static_cast<const Stored*>(key), key_token_stride, key_head_stride};
    Rows<Stored> values{static_cast<const Stored*>(value), value_token_stride,
                        value_head_stride};
    const int64_t elements = num_tokens * num_heads * dim;
#pragma omp parallel for num_threads(threads) if (elements >= kMinParallelElements)
    for (int64_t token = 0; token < num_tokens; token++) {
      const Angles angles{cos + token * angle_stride, sin + token * angle_stride};
      Stored* to = static_cast<Stored*>(out) + token * num_heads * dim;
      for (int head = 0; head < num_heads; head++)
        rotate<T>(queries.at(token, head), dim / 2, angles, to + head * dim);
      if (slots[token] < 0) continue;
      for (int64_t head = 0; head < cache->num_kv_heads; head++) {
        Stored rotated[kMaxKeyDim];
        rotate<T>(keys.at(token, head), dim / 2, angles, rotated);
        write_key<T>(*cache, slots[token], head, rotated);
        if (cache->values) write_value<T>(*cache, slots[token], head, values.at(token, head));
      }
    }
  });
  return 0;
}
