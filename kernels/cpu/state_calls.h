// The arguments of the kernels of stateful layers.
#pragma once

#include <cstdint>
#include <cstring>

// The states of a batch's sequences; the same as in states.py. Strides and sizes are in elements.
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

  // Returns 0, or 1 + the index of a sequence with one of its first `count` rows in no block.
  int find_bad_table(int count) const {
    const int first = first_row / rows_per_block, end = (first_row + count - 1) / rows_per_block;
    for (int seq = 0; seq < num_seqs; seq++)
      for (int i = first; !is_padding(seq) && i <= end; i++)
        if (uint32_t(tables[seq * table_stride + i]) >= uint32_t(num_blocks)) return 1 + seq;
    return 0;
  }
};

// The kernels' arguments; the same as in states.py. Strides are those of tokens, in elements.
struct CausalConv {
  StateRows rows;
  const void* x;
  int64_t x_stride;
  const void *weight, *bias;
  void* out;
  int32_t channels, channels_per_row, width, dtype, weight_dtype, silu;
};

struct Ssd {
  StateRows rows;
  const void *x, *b, *c;
  int64_t x_stride, b_stride, c_stride;
  const float *dt, *a, *d, *dt_bias;
  void* out;
  int32_t heads, head_dim, groups, state_size, dtype, softplus;
  float least_dt, greatest_dt;
};

struct GatedDelta {
  StateRows rows;
  const void *query, *key, *value;
  int64_t query_stride, key_stride, value_stride;
  const float *g, *beta;
  void* out;
  int32_t key_heads, value_heads, key_dim, value_dim, dtype, decays_elements, normalize;
  float scale;
};

struct SelectiveScan {
  StateRows rows;
  const void *x, *b, *c;
  int64_t x_stride, b_stride, c_stride;
  const void* dt;
  int64_t dt_stride;
  const float *a, *d, *dt_bias;
  void* out;
  int32_t channels, channels_per_row, state_size, dtype, dt_dtype, softplus;
};

// They return 0, or 1 + the index of a sequence whose table names a block that does not exist.
extern "C" {
int octavo_causal_conv(const CausalConv*, int threads);
int octavo_ssd(const Ssd*, int threads);
int octavo_gated_delta(const GatedDelta*, int threads);
int octavo_selective_scan(const SelectiveScan*, int threads);
}
