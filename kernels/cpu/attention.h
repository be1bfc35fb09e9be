// What the operators of attention share: a layer of the current step, and its checks.
#pragma once

#include <cstdint>
#include <string>

#include "cache.h"
#include "operators.h"
#include "plan.h"

inline std::string text(const View& x) {
  std::string sizes = "[";
  for (int i = 0; i < x.dimensions; i++) sizes += (i ? ", " : "") + std::to_string(x.sizes[i]);
  return sizes + "]";
}

inline const char* name_of(int number) {
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

  // Throws an exception for a slot past the cache's end.
  void check_slots() const {
    const int64_t num_slots = int64_t(cache.num_blocks) * cache.block_size;
    for (int64_t token = 0; token < batch.num_tokens; token++)
      if (batch.slots[token] >= num_slots)
        throw std::out_of_range("token " + std::to_string(token) + " goes to slot " +
                                std::to_string(batch.slots[token]) + ", of " +
                                std::to_string(num_slots));
  }
  // Throws an exception for a sequence whose queries see a block that does not exist.
  void check_tables(Sight sight) const {
    const int bad = find_bad_table(batch, cache, sight);
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

  // Writes new tokens' keys and values; see write_kv.cpp.
  void write(const View& key, const View* value) const HIDDEN;

  // The same for keys that are not rotated yet; writes the rotated queries to `rotated`, contiguous.
  void rotate_and_write(const View& query, const View& key, const View& value, const View& cos,
                        const View& sin, void* rotated) const HIDDEN;
};

// How queries attend.
struct Attending {
  float scale;
  Sight sight;
  float soft_cap;             // or 0
  const float* alibi_slopes;  // or null
  const float* sinks;         // or null
};

// Attends to blocks that exist; see paged_attention.cpp. `out` is contiguous.
void attend_to_blocks(const Cache& cache, const Batch& batch, const View& query, void* out,
                      int64_t value_dim, const Attending& how) HIDDEN;

// Returns memory for the results of queries.
inline void* make_out(const Result& result, const View& query, int64_t value_dim) {
  return result.make({query.sizes[0], query.sizes[1], value_dim}, query.dtype);
}
