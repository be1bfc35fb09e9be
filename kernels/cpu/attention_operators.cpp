// The operators of attention, on the current step's caches and batches. They take a layer's number.

#include <cstdint>
#include <string>

#include "cache.h"
#include "latent.h"
#include "operators.h"

extern "C" {
int64_t octavo_write_kv(const Cache*, const void*, int64_t, int64_t, const void*, int64_t, int64_t,
                        const int64_t*, int64_t, int);
int64_t octavo_rotate_and_write(const Cache*, const void*, int64_t, int64_t, int, const void*,
                                int64_t, int64_t, const void*, int64_t, int64_t, const float*,
                                const float*, int64_t, const int64_t*, int64_t, void*, int);
int octavo_paged_attention(const Cache*, const Batch*, const void*, int64_t, int64_t, int, void*,
                           int, float, int, int, float, const float*, const float*, int);
int octavo_latent_attention(const Cache*, const Batch*, const void*, int64_t, int64_t, int, int,
                            const LatentProducts*, void*, float, int, int, float, int);
}

namespace {

std::string text(const View& x) {
  std::string sizes = "[";
  for (int i = 0; i < x.dimensions; i++) sizes += (i ? ", " : "") + std::to_string(x.sizes[i]);
  return sizes + "]";
}

const char* name_of(int number) {
  return number == 0 ? "float32" : number == 1 ? "float16" : number == 2 ? "bfloat16" : "others";
}

// A layer of the current step.
struct Layer {
  const Cache& cache;
  const Batch& batch;
  bool is_written;  // by this layer; else an earlier one writes the cache

  explicit Layer(int64_t number)
      : cache(step.layers[number]), batch(step.batches[step.groups[number]]),
        is_written(step.written[number]) {}

  // Checks that a kernel can read keys, values or queries.
  void check(const View& tokens) const {
    if (dtype_number(tokens.dtype) != cache.dtype)
      throw std::invalid_argument(std::string("tokens are ") + name_of(dtype_number(tokens.dtype)) +
                                  " and the cache is for " + name_of(cache.dtype));
    require(tokens.has_whole_rows(), "heads of tokens must be contiguous");
  }
  void check_query(const View& query) const {
    check(query);
    if (query.sizes[2] != cache.key_dim || query.sizes[1] % cache.num_kv_heads)
      throw std::invalid_argument(
          std::to_string(query.sizes[1]) + " query heads of " + std::to_string(query.sizes[2]) +
          " do not fit a cache of " + std::to_string(cache.num_kv_heads) + " heads of " +
          std::to_string(cache.key_dim));
  }
  void check_written(const View& tokens, int64_t dim) const {
    check(tokens);
    if (tokens.sizes[0] != batch.num_tokens || tokens.sizes[1] != cache.num_kv_heads ||
        tokens.sizes[2] != dim)
      throw std::invalid_argument("keys or values " + text(tokens) + " do not fit " +
                                  std::to_string(batch.num_tokens) + " slots of a cache of " +
                                  std::to_string(cache.num_kv_heads) + " heads of " +
                                  std::to_string(dim));
  }
  void check_written(const View& key, const View* value) const {
    check_written(key, cache.key_dim);
    require(value || !cache.values, "the cache has values and none are given");
    if (value && cache.values) check_written(*value, cache.value_dim);
  }

  // Throws an exception for a slot, counted from 1, past the cache's end.
  void check_slot(int64_t bad) const {
    if (bad)
      throw std::out_of_range("token " + std::to_string(bad - 1) + " goes to slot " +
                              std::to_string(batch.slots[bad - 1]) + ", of " +
                              std::to_string(int64_t(cache.num_blocks) * cache.block_size));
  }
  // Throws an exception for a sequence, counted from 1, with a bad block table.
  void check_table(int bad) const {
    if (!bad) return;
    std::string blocks;
    for (int i = 0; i < batch.table_width; i++)
      blocks += (i ? ", " : "") +
                std::to_string(batch.block_tables[(bad - 1) * batch.table_stride + i]);
    throw std::out_of_range("the block table of sequence " + std::to_string(bad - 1) + ", " +
                            std::to_string(batch.seq_lens[bad - 1]) +
                            " tokens long, does not hold enough blocks out of " +
                            std::to_string(cache.num_blocks) + ": [" + blocks + "]");
  }

  void write(const View& key, const View* value) const {
    check_written(key, value);
    const View none{};
    const View& values = value ? *value : none;
    check_slot(octavo_write_kv(&cache, key.data, key.strides[0], key.strides[1], values.data,
                               values.strides[0], values.strides[1], batch.slots, batch.num_tokens,
                               num_threads()));
  }
  void rotate_and_write(const View& query, const View& key, const View& value, const View& cos,
                        const View& sin, void* rotated) const {
    check_query(query);
    check_written(key, &value);
    require(query.sizes[0] == batch.num_tokens && cos.is_float32() && sin.is_float32(),
            "queries must be those of the slots, and angles float32");
    check_slot(octavo_rotate_and_write(
        &cache, query.data, query.strides[0], query.strides[1], query.sizes[1], key.data,
        key.strides[0], key.strides[1], value.data, value.strides[0], value.strides[1],
        cos.as<float>(), sin.as<float>(), cos.strides[0], batch.slots, batch.num_tokens, rotated,
        num_threads()));
  }
  void attend(const View& query, void* out, int64_t value_dim, double scale,
              int64_t sliding_window, double soft_cap, int64_t chunk, const View* sinks,
              const View* alibi_slopes) const {
    check_query(query);
    require(value_dim <= (cache.values ? cache.value_dim : cache.key_dim),
            "values are not so wide");
    check_table(octavo_paged_attention(
        &cache, &batch, query.data, query.strides[0], query.strides[1], query.sizes[1], out,
        value_dim, scale, sliding_window, chunk, soft_cap, maybe<float>(alibi_slopes),
        maybe<float>(sinks), num_threads()));
  }
};

void* make_out(const Result& result, const View& query, int64_t value_dim) {
  return result.make({query.sizes[0], query.sizes[1], value_dim}, query.dtype);
}

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

void attend(const Result& result, const View& query, int64_t value_dim, int64_t layer,
            double scale, int64_t sliding_window, double soft_cap, int64_t chunk,
            const View* sinks, const View* alibi_slopes) {
  Layer(layer).attend(query, make_out(result, query, value_dim), value_dim, scale, sliding_window,
                      soft_cap, chunk, sinks, alibi_slopes);
}
OCTAVO_OPERATOR(attend)

// Writes keys and values, and attends. With angles, it rotates queries and keys first; if another
// layer has written these keys and values, it writes the same again.
void paged_attention(const Result& result, const View& query, const View& key, const View& value,
                     int64_t number, double scale, int64_t sliding_window, double soft_cap,
                     int64_t chunk, const View* sinks, const View* alibi_slopes, const View* cos,
                     const View* sin) {
  const Stopwatch stopwatch(spent.attention);
  const Layer layer(number);
  const int64_t key_dim = query.sizes[2], value_dim = value.sizes[2];
  void* const out = make_out(result, query, value_dim);
  View queries = query;
  Memory rotated;
  if (cos) {
    // The rotated queries are written into the results' memory if sizes match: nothing else reads a
    // token's query.
    queries.data = out;
    if (key_dim != value_dim) {
      rotated = allocate(query.sizes[0] * query.sizes[1] * key_dim * bytes_of(query.dtype));
      queries.data = rotated.get();
    }
    queries.strides[0] = query.sizes[1] * key_dim;
    queries.strides[1] = key_dim;
    layer.rotate_and_write(query, key, value, *cos, *sin, queries.data);
  } else if (layer.is_written) {
    layer.write(key, &value);
  }
  layer.attend(queries, out, value_dim, scale, sliding_window, soft_cap, chunk, sinks,
               alibi_slopes);
}
OCTAVO_OPERATOR(paged_attention)

// Writes latents, and attends to them; each head computes keys and values from them.
void latent_attention(const Result& result, const View& query, const View& key,
                      const View& absorbing, const View& keys, const View& values,
                      int64_t value_dim, int64_t rotated, int64_t number, double scale,
                      int64_t sliding_window, double soft_cap, int64_t chunk) {
  const Stopwatch stopwatch(spent.attention);
  const Layer layer(number);
  layer.check(query);
  require(!layer.cache.values && query.dtype == values.dtype,
          "latents have no values, and queries have the type of the products");
  const int64_t query_dim = query.sizes[2];
  const LatentProducts products{absorbing.data, keys.data, values.data, query_dim - rotated,
                                value_dim};
  void* const out = make_out(result, query, value_dim);
  if (layer.is_written) layer.write(key, nullptr);
  layer.check_table(octavo_latent_attention(
      &layer.cache, &layer.batch, query.data, query.strides[0], query.strides[1], query.sizes[1],
      query_dim, &products, out, scale, sliding_window, chunk, soft_cap, num_threads()));
}
OCTAVO_OPERATOR(latent_attention)

}  // namespace
