// Writes the keys and values of new tokens into their slots: a scatter.

#include <cstdint>
#include <cstring>

#include "cache.h"

namespace {

constexpr int64_t kMinParallelElements = 1 << 13;  // below which threads cost more

// Tokens as the model lays them out: a token's head is contiguous. Strides are in
// elements.
template <class Stored>
struct Rows {
  const Stored* first;
  int64_t token_stride, head_stride;
  const Stored* at(int64_t token, int64_t head) const {
    return first + token * token_stride + head * head_stride;
  }
};

template <class T, class Stored = typename T::Stored>
void write_token(const Cache& cache, int64_t slot, int64_t token, Rows<Stored> keys,
                 Rows<Stored> values) {
  constexpr int kPack = T::kPack;
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  for (int64_t head = 0; head < cache.num_kv_heads; head++) {
    const int64_t place = cache.head_at(block, head);
    const Stored* key = keys.at(token, head);
    Stored* key_to = static_cast<Stored*>(cache.keys) + place + offset * kPack;
    for (int64_t at = 0; at < cache.head_dim; at += kPack)
      std::memcpy(key_to + at * cache.block_size, key + at, kPack * sizeof *key);
    const Stored* value = values.at(token, head);
    Stored* value_to = static_cast<Stored*>(cache.values) + place +
                       offset / kPack * kPack * cache.head_dim + offset % kPack;
    for (int64_t at = 0; at < cache.head_dim; at++) value_to[at * kPack] = value[at];
  }
}

}  // namespace

// Returns 0, or 1 + the index of the first slot that is past the cache's end; then
// nothing has been written. Negative slots are skipped.
extern "C" int64_t octavo_write_kv(
    const Cache* cache, const void* key, int64_t key_token_stride, int64_t key_head_stride,
    const void* value, int64_t value_token_stride, int64_t value_head_stride,
    const int64_t* slots, int64_t num_tokens, int threads) {
  const int64_t num_slots = int64_t(cache->num_blocks) * cache->block_size;
  for (int64_t token = 0; token < num_tokens; token++)
    if (slots[token] >= num_slots) return 1 + token;
  with_type(*cache, [&](auto type) {
    using T = decltype(type);
    using Stored = typename T::Stored;
    Rows<Stored> keys{static_cast<const Stored*>(key), key_token_stride, key_head_stride};
    Rows<Stored> values{static_cast<const Stored*>(value), value_token_stride,
                        value_head_stride};
    const int64_t elements = num_tokens * cache->num_kv_heads * cache->head_dim;
#pragma omp parallel for num_threads(threads) if (elements >= kMinParallelElements)
    for (int64_t token = 0; token < num_tokens; token++)
      if (slots[token] >= 0) write_token<T>(*cache, slots[token], token, keys, values);
  });
  return 0;
}
