// The states and the tensors of the operators of stateful layers.
//
// Step sizes, rates and gates of recurrences must be contiguous float32, as in the graph.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "operators.h"

// The states of the current step's sequences. Strides and sizes are in elements.
struct StateRows {
  void* state;
  int64_t block_stride, row_size;
  const int32_t* tables;
  int64_t table_stride;
  const int32_t* query_starts;
  const int32_t* seq_lens;
  int32_t num_blocks, rows_per_block, first_row, num_seqs;

  int first_token(int seq) const { return query_starts[seq]; }
  int query_count(int seq) const { return query_starts[seq + 1] - query_starts[seq]; }
  bool is_new(int seq) const { return seq_lens[seq] == query_count(seq); }
  bool is_padding(int seq) const { return !seq_lens[seq] || !query_count(seq); }

  template <class Element>
  Element* row(int seq, int index) const {
    const int place = first_row + index;
    const int64_t block = tables[seq * table_stride + place / rows_per_block];
    return static_cast<Element*>(state) + block * block_stride +
           place % rows_per_block * row_size;
  }

  // Sets the results of padding to zeros.
  void clear_padding(void* out, int64_t bytes_per_token) const {
    for (int seq = 0; seq < num_seqs; seq++)
      if (is_padding(seq))
        std::memset(static_cast<char*>(out) + first_token(seq) * bytes_per_token, 0,
                    query_count(seq) * bytes_per_token);
  }

  // Throws an exception if one of a sequence's first `count` rows is in no block.
  void check(int count) const {
    const int first = first_row / rows_per_block, end = (first_row + count - 1) / rows_per_block;
    for (int seq = 0; seq < num_seqs; seq++)
      for (int i = first; !is_padding(seq) && i <= end; i++)
        if (uint32_t(tables[seq * table_stride + i]) >= uint32_t(num_blocks))
          throw std::out_of_range("the table of sequence " + std::to_string(seq) +
                                  " names a block of a state that is not in the cache's " +
                                  std::to_string(num_blocks));
  }
};

inline StateRows rows_of(const StateCache& cache) {
  const Batch& batch = step.batches[cache.group];
  return {cache.state,      cache.block_stride,   cache.row_size,    batch.block_tables,
          batch.table_stride, batch.query_starts, batch.seq_lens,    cache.num_blocks,
          cache.rows_per_block, cache.first_row,  batch.num_seqs};
}

// Returns a tensor whose tokens are contiguous.
inline const View& tokens(const View& x) {
  int64_t stride = 1;
  for (int i = x.dimensions - 1; i > 0; stride *= x.sizes[i--])
    require(x.strides[i] == stride || x.sizes[i] == 1, "tokens must be contiguous");
  return x;
}

// Returns the elements of a contiguous tensor of one dtype; null if it is absent.
template <class T = float>
const T* elements(const View* x, int32_t dtype = aoti_torch_dtype_float32()) {
  if (!x) return nullptr;
  int64_t stride = 1;
  for (int i = x->dimensions - 1; i >= 0; stride *= x->sizes[i--])
    require(x->strides[i] == stride || x->sizes[i] == 1, "a state's parameter must be contiguous");
  require(x->dtype == dtype, "a state's parameter has another dtype");
  return x->as<const T>();
}
