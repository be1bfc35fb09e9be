// One layer's cache, and the layout of K and V in its blocks.
//
// The tensor's shape is [num_blocks, num_kv_heads, block_size, head_dim], but a block's head is
// stored as the products of attention read it, so that a step packs nothing. With P = kPack of the
// type, the number of elements in a word of a dot product:
//
//   K: [head_dim / P][block_size][P], adjacent words of all keys;
//   V: [block_size / P][head_dim][P], adjacent words of all dimensions.
//
// P is 2 for bfloat16 if the CPU has its dot product, else 1, where V has the tensor's layout.
// Blocks are copied and swapped whole, so only write_kv and attention depend on this.
#pragma once

#include <cstdint>

#include "vector.h"

constexpr int kMinBlock = 8;  // all block sizes are multiples of it

// The same as in native.py. The stride is in elements.
struct Cache {
  void* keys;
  void* values;
  int64_t block_stride;
  int32_t num_blocks;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  int32_t dtype;

  // Returns the first element of a block's head.
  int64_t head_at(int64_t block, int64_t head) const {
    return block * block_stride + head * block_size * head_dim;
  }
};

// Calls `work` with the cache's storage type.
template <class Work>
void with_type(const Cache& cache, Work work) {
  switch (cache.dtype) {
    case 0: return work(Float32());
    case 1: return work(Float16());
    case 2: return work(BFloat16());
  }
}
