// One layer's cache, and the layout of K and V in its blocks.
//
// The tensors' shapes are [num_blocks, num_kv_heads, block_size, key_dim] and [..., value_dim], but
// a block stores each head as attention's products read it, so that a step packs nothing. With P =
// kPack of the type, the number of elements in a word of a dot product:
//
//   K: [key_dim / P][block_size][P], adjacent words of all keys;
//   V: [block_size / P][value_dim][P], adjacent words of all dimensions.
//
// P is 2 for bfloat16 if the CPU has its dot product, else 1, where V has the tensor's layout.
// Blocks are copied and swapped whole, so only write_kv and attention depend on this.
//
// A cache of latent attention has K alone: a key's first elements are its value, and attention
// repacks them (repack.h).
//
// An fp8 cache stores bytes, with its own P (fp8.h): 4 where the model's type has 2.
//
// A cache of whole numbers (whole_numbers.h) has P = 4, the codes of a 32-bit word. After the words
// of a block's head come the scales of its tokens.
#pragma once

#include <cstdint>

#include "fp8.h"
#include "whole_numbers.h"
#include "vector.h"

constexpr int kMinBlock = 8;  // all block sizes are multiples of it

// The same as in caches.py. Strides are between blocks, in elements: in bytes for whole numbers.
struct Cache {
  void* keys;
  void* values;  // or null: values are parts of keys
  int64_t key_stride;
  int64_t value_stride;
  int32_t num_blocks;
  int32_t num_kv_heads;
  int32_t key_dim;
  int32_t value_dim;  // or 0 without values
  int32_t block_size;
  int32_t dtype;  // of queries and results, and of the cache unless it is fp8 or of whole numbers
  Fp8 fp8 = kNotFp8;
  float key_scale = 1;    // a key is its stored value times this
  float value_scale = 1;  // the same for values; for latents it equals key_scale
  int32_t in_codes = 0;   // whether it is of whole numbers

  // Returns the bytes of an element of T in the cache.
  template <class T>
  int64_t element_bytes() const {
    return fp8 || in_codes ? 1 : sizeof(typename T::Stored);
  }

  // Returns the elements that a token's key or value takes.
  int64_t width(int64_t dim) const { return in_codes ? dim + kScaleBytes : dim; }

  // Return the first element of a block's head.
  int64_t keys_at(int64_t block, int64_t head) const {
    return block * key_stride + head * block_size * width(key_dim);
  }
  int64_t values_at(int64_t block, int64_t head) const {
    return block * value_stride + head * block_size * width(value_dim);
  }
};
