// One layer's cache, and the order in which K and V lie inside a block of it.
//
// The tensor's shape says [num_blocks, num_kv_heads, block_size, head_dim], but the
// head of a block is stored as the products of attention read it, so that a step packs
// nothing. With P = kPack of the type, the elements that one dot product joins in a
// word:
//
//   K: [head_dim / P][block_size][P], a word of every key side by side;
//   V: [block_size / P][head_dim][P], a word of every dimension side by side.
//
// P is 2 for bfloat16 where the CPU has its dot product, else 1, which leaves V plain.
// Blocks are copied and swapped whole, so only write_kv and attention know this.
#pragma once

#include <cstdint>

#include "vector.h"

constexpr int kMinBlock = 8;  // every block size is a multiple of it

// Mirrored by a ctypes.Structure. The stride is in elements.
struct Cache {
  void* keys;
  void* values;
  int64_t block_stride;
  int32_t num_blocks;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  int32_t dtype;

  // The first element of a block's head.
  int64_t head_at(int64_t block, int64_t head) const {
    return block * block_stride + head * block_size * head_dim;
  }
};

// Calls `work` with the storage type that the cache is of.
template <class Work>
void with_type(const Cache& cache, Work work) {
  switch (cache.dtype) {
    case 0: return work(Float32());
    case 1: return work(Float16());
    case 2: return work(BFloat16());
  }
}
