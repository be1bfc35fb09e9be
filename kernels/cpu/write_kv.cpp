// Writes the keys and values of new tokens into their slots: a scatter.

#include <cstdint>
#include <cstring>

// Returns 0, or 1 + the index of the first slot that is past the cache's end, before
// which everything has been written. Strides are in bytes; a token's head is
// contiguous. Negative slots are skipped.
extern "C" int64_t octavo_write_kv(
    const char* key, int64_t key_token_stride, int64_t key_head_stride,
    const char* value, int64_t value_token_stride, int64_t value_head_stride,
    char* key_cache, char* value_cache, int64_t block_stride, int64_t num_blocks,
    int64_t block_size, const int64_t* slots, int64_t num_tokens,
    int64_t num_kv_heads, int64_t head_bytes) {
  for (int64_t token = 0; token < num_tokens; token++) {
    if (slots[token] < 0) continue;
    int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
    if (block >= num_blocks) return 1 + token;
    for (int64_t head = 0; head < num_kv_heads; head++) {
      int64_t place = block * block_stride + (head * block_size + offset) * head_bytes;
      std::memcpy(key_cache + place,
                  key + token * key_token_stride + head * key_head_stride, head_bytes);
      std::memcpy(value_cache + place,
                  value + token * value_token_stride + head * value_head_stride, head_bytes);
    }
  }
  return 0;
}
