// The weights of latent attention: each head's products of queries, keys and values.
#pragma once

#include <cstdint>

// Packed weights, as in linear.h: of each head in turn, in whole panels. The same as in native.py.
struct LatentProducts {
  const void* absorbing;  // from a query of keys to one of latents
  const void* keys;       // from a latent to the first elements of a key
  const void* values;     // from a latent to a value
  int64_t key_dim;        // elements of a key that are made from a latent
  int64_t value_dim;
};
