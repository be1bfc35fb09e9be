// The weights of latent attention, per head, for queries, keys and values.
#pragma once

#include <cstdint>

// Packed weights, as in linear.h, head after head in whole panels; the same as in latent.py.
struct LatentProducts {
  const void* absorbing;  // maps a query of keys to a query of latents
  const void* keys;       // maps a latent to the first elements of a key
  const void* values;     // maps a latent to a value
  int64_t key_dim;        // elements of a key that come from a latent
  int64_t value_dim;
};
