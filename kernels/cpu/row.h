// A row of logits and its truncation without sorting.
//
// A bound on the logit excludes tokens that cannot be among the most likely ones. The cut among the
// remaining tens to thousands is found by narrowing a range of keys: integers that rise with the
// logits. All sums are over one row, in an order that depends only on this row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "vector.h"

constexpr int64_t kChunk = 64;  // vectors of weights summed as floats
constexpr int64_t kGroup = 16;  // logits per group; the groups' maxima bound top-k
constexpr int kBounds = 3;      // tried at a time
constexpr float kLog2E = 1.44269504f;
constexpr float kImpossible = -std::numeric_limits<float>::infinity();

inline int64_t num_vectors(int64_t count) { return (count + kLanes - 1) / kLanes; }

// Converts floats to integers of the same order, and back. -0 is 0.
inline Ints to_keys(Floats x) {
  const Ints bits = (Ints)(x + 0.f);
  return bits ^ (bits >> 31 & 0x7fffffff);
}
inline Floats from_keys(Ints keys) { return (Floats)(keys ^ (keys >> 31 & 0x7fffffff)); }
inline int32_t to_key(float x) { return to_keys(broadcast(x))[0]; }
inline float from_key(int32_t key) { return from_keys(broadcast(key))[0]; }

inline Ints number_lanes() {
  Ints lanes;
  for (int lane = 0; lane < kLanes; lane++) lanes[lane] = lane;
  return lanes;
}
inline const Ints kLane = number_lanes();

// A row of logits. The most likely token has weight 1, an impossible one 0, and NaN nearly 0.
class Row {
 public:
  Row(const float* logits, int64_t size, float inv_temperature)
      : logits_(logits), size_(size), scale_(inv_temperature * kLog2E) {
    Floats most = broadcast(kImpossible);
    for (int64_t i = 0; i < vectors(); i++) most = max(most, at(i));
    greatest_ = reduce_max(most);
  }

  int64_t size() const { return size_; }
  int64_t vectors() const { return num_vectors(size_); }
  float greatest() const { return greatest_; }

  // The i-th vector of logits, with impossible ones after the row's end.
  Floats at(int64_t i) const {
    const int64_t first = i * kLanes;
    if (first + kLanes <= size_) return load<Floats>(logits_ + first);
    Floats logits = broadcast(kImpossible);
    for (int lane = 0; first + lane < size_; lane++) logits[lane] = logits_[first + lane];
    return logits;
  }
  Floats weigh(Floats logits) const { return exp2((logits - greatest_) * scale_); }

  // Returns a lower bound of the logits of tokens with at least this weight.
  float least_logit(double weight) const { return greatest_ + std::log2(weight) / scale_; }

 private:
  const float* logits_;
  int64_t size_;
  float scale_, greatest_;
};

// Some tokens of a row, in the vocabulary's order: their logits' keys, and their ids. The last
// vector is padded with tokens of weight 0.
struct Candidates {
  std::vector<int32_t> keys, places;
  std::vector<float> weights;
  int64_t count = 0;

  int64_t vectors() const { return num_vectors(count); }
  Ints keys_at(int64_t i) const { return load<Ints>(&keys[i * kLanes]); }
  Floats weights_at(int64_t i) const { return load<Floats>(&weights[i * kLanes]); }

  // Adds the tokens with a logit of at least `least`.
  void gather(const Row& row, float least) {
    make_room(row.size());
    for (int64_t i = 0; i < row.vectors(); i++) {
      const Floats logits = row.at(i);
      append(to_keys(logits), i * kLanes, logits >= broadcast(least));
    }
    while (count && places[count - 1] >= row.size()) count--;
    store(&keys[count], broadcast(INT32_MIN));
    for (int64_t i = 0; i < vectors(); i++)
      store(&weights[i * kLanes], row.weigh(from_keys(keys_at(i))));
    store(&weights[count], Floats{});
  }

  // Returns the index after the `spare`th candidate with this key.
  int64_t end_of(int32_t key, double spare) const {
    for (int64_t i = 0; i < count; i++)
      if (keys[i] == key && --spare < 1) return i + 1;
    return count;
  }

  // Adds the greatest logit of each group of a row, without ids.
  void gather_greatest(const Row& row) {
    make_room(row.size());
    for (int64_t first = 0; first < row.vectors(); first += kGroup, count += kLanes) {
      Floats most = broadcast(kImpossible);
      for (int64_t i = first; i < std::min(first + kGroup, row.vectors()); i++)
        most = max(most, row.at(i));
      store(&keys[count], to_keys(most));
    }
  }

 private:
  void make_room(int64_t most) {
    count = 0;
    const size_t room = most + 2 * kLanes;
    if (keys.size() >= room) return;
    keys.resize(room);
    places.resize(room);
    weights.resize(room);
  }

  void append(Ints some, int32_t place, Ints chosen) {
#if defined(__AVX512F__)
    const __mmask16 mask = _mm512_test_epi32_mask((__m512i)chosen, (__m512i)chosen);
    const Ints ids_of_lanes = kLane + broadcast(place);
    store(&keys[count], _mm512_maskz_compress_epi32(mask, (__m512i)some));
    store(&places[count], _mm512_maskz_compress_epi32(mask, (__m512i)ids_of_lanes));
    count += __builtin_popcount(mask);
#else
    for (int lane = 0; lane < kLanes; lane++) {
      keys[count] = some[lane];
      places[count] = place + lane;
      count += chosen[lane] != 0;
    }
#endif
  }
};

// Sums the vectors `numbers(i)` for i in [first, end), at most kChunk of them.
template <class Numbers>
double add(int64_t first, int64_t end, Numbers numbers) {
  Floats sum{};
  for (int64_t i = first; i < end; i++) sum += numbers(i);
  return reduce_add(sum);
}

template <class Numbers>
double add_all(int64_t end, Numbers numbers) {
  double sum = 0;
  for (int64_t first = 0; first < end; first += kChunk)
    sum += add(first, std::min(first + kChunk, end), numbers);
  return sum;
}

// A cut of candidates: it keeps those with a greater key and the first `spare` with this key.
struct Cut {
  int32_t key;
  double spare;
};

// A range of keys, and the measure of the candidates with keys at or above its end.
struct Range {
  int64_t begin, end;
  double measured = 0;
};

// Narrows a range to the greatest key such that candidates from it on measure at least `target`, or
// to its first key. measure(i) returns the measures of the i-th vector's candidates.
template <class Measure>
Range narrow(const Candidates& candidates, Range range, double target, Measure measure) {
  const int64_t vectors = candidates.vectors();
  while (range.end - range.begin > 1) {
    const int64_t step = (range.end - range.begin + kBounds) / (kBounds + 1);
    int64_t bounds[kBounds];
    double reached[kBounds] = {};
    for (int b = 0; b < kBounds; b++)
      bounds[b] = std::min(range.begin + (b + 1) * step, range.end - 1);
    for (int64_t first = 0; first < vectors; first += kChunk) {
      Floats sums[kBounds] = {};
      for (int64_t i = first; i < std::min(first + kChunk, vectors); i++)
#pragma GCC unroll 3
        for (int b = 0; b < kBounds; b++) {
          const Ints within = candidates.keys_at(i) >= broadcast(int32_t(bounds[b]));
          sums[b] += within ? measure(i) : Floats{};
        }
      for (int b = 0; b < kBounds; b++) reached[b] += reduce_add(sums[b]);
    }
    int enough = 0;
    while (enough < kBounds && reached[enough] >= target) enough++;
    if (enough > 0) range.begin = bounds[enough - 1];
    if (enough < kBounds) range.end = bounds[enough], range.measured = reached[enough];
  }
  return range;
}

// Gathers the tokens that top-k may keep.
inline Cut cut_top_k(const Row& row, int64_t top_k, Candidates& candidates) {
  const auto one = [](int64_t) { return broadcast(1.f); };
  Range range{to_key(kImpossible), int64_t{to_key(row.greatest())} + 1};
  candidates.gather_greatest(row);
  // If k groups' maxima reach a bound, at least k logits do.
  if (top_k <= candidates.count) range.begin = narrow(candidates, range, top_k, one).begin;
  candidates.gather(row, from_key(range.begin));
  range = narrow(candidates, range, top_k, one);
  return {int32_t(range.begin), top_k - range.measured};
}
