// The rows of the cache in which layers keep states, and the functions that their kernels share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "fetcher.h"
#include "product.h"
#include "vector.h"

constexpr float kLog2OfE = 1.4426950408889634f;
constexpr int kFloatsPerLine = 16;

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

  // Returns 0, or 1 + a sequence whose first `count` rows are in a block that does not exist.
  int find_bad_table(int count) const {
    const int first = first_row / rows_per_block, end = (first_row + count - 1) / rows_per_block;
    for (int seq = 0; seq < num_seqs; seq++)
      for (int i = first; !is_padding(seq) && i <= end; i++)
        if (uint32_t(tables[seq * table_stride + i]) >= uint32_t(num_blocks)) return 1 + seq;
    return 0;
  }
};

// Calls `work` with the type of a number of states.py.
template <class Work>
void with_dtype(int dtype, Work work) {
  switch (dtype) {
    case 0: return work(Float32());
    case 1: return work(Float16());
    case 2: return work(BFloat16());
  }
}

inline int num_vectors(int count) { return (count + kLanes - 1) / kLanes; }
inline int whole_vectors(int count) { return num_vectors(count) * kLanes; }

// Copies `count` elements as floats, with zeros up to a whole vector.
template <class T>
void widen(const typename T::Stored* from, int count, float* to) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, T::load_floats(from + i));
  if (i == count) return;
  typename T::Stored tail[kLanes] = {};
  std::memcpy(tail, from + i, (count - i) * sizeof *tail);
  store(to + i, T::load_floats(tail));
}

// Stores `count` floats, which are readable up to a whole vector.
template <class T>
void narrow(const float* from, int count, typename T::Stored* to) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) T::store_floats(to + i, load<Floats>(from + i));
  if (i == count) return;
  typename T::Stored tail[kLanes];
  T::store_floats(tail, load<Floats>(from + i));
  std::memcpy(to + i, tail, (count - i) * sizeof *tail);
}

// 2^x and e^x, at most 2^127.
inline Floats power_of_2(Floats x) { return exp2(min(x, broadcast(127.f))); }
inline Floats power_of_e(Floats x) { return power_of_2(x * kLog2OfE); }
inline float power_of_e(float x) { return power_of_e(broadcast(x))[0]; }

// log(1 + e^x), to 1e-6 of it. With u = e^-|x|, log(1 + u) = 2 atanh(u / (2 + u)).
inline Floats softplus(Floats x) {
  const Floats u = power_of_e(x > 0.f ? -x : x);
  const Floats s = u / (u + 2.f), square = s * s;  // at most 1/9
  Floats series = broadcast(1 / 15.f);
  series = series * square + 1 / 13.f;
  series = series * square + 1 / 11.f;
  series = series * square + 1 / 9.f;
  series = series * square + 1 / 7.f;
  series = series * square + 1 / 5.f;
  series = series * square + 1 / 3.f;
  series = series * square + 1.f;
  return max(x, Floats{}) + 2.f * s * series;
}

template <int kOdd, size_t... kIndex>
Floats every_other(Floats a, Floats b, std::index_sequence<kIndex...>) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, int(2 * kIndex + kOdd)...);
#endif
#endif
  float both[2 * kLanes];
  store(both, a);
  store(both + kLanes, b);
  return Floats{both[2 * kIndex + kOdd]...};
}

// Returns the sums of the lanes of kLanes vectors, which are overwritten.
inline Floats sum_lanes(Floats* vectors) {
  constexpr std::make_index_sequence<kLanes> lanes;
#pragma GCC unroll 4
  for (int count = kLanes / 2; count; count /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
      const Floats a = vectors[2 * i], b = vectors[2 * i + 1];
      vectors[i] = every_other<0>(a, b, lanes) + every_other<1>(a, b, lanes);
    }
  return vectors[0];
}

// A matrix of floats whose rows are whole vectors.
struct Matrix {
  const float* first;
  int64_t stride;
  const float* at(int row, int vector) const { return first + row * stride + vector * kLanes; }
};

// c = rescale * c + a * b, for `rows` rows of a and c; see product.h.
inline void multiply(int rows, int depth, const float* a, int a_stride, Matrix b, int columns,
                     float* c, int c_stride, const float* rescale) {
  Product<Float32, Matrix>(depth, reinterpret_cast<const uint32_t*>(a), a_stride, b, c, c_stride,
                           rescale, Fetcher(nullptr, 0, 0, 0, 1))
      .run(rows, columns);
}
