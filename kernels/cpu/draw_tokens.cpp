// Samples tokens from rows of logits: inverts the running sum of the weights that top-k, top-p and
// min-p keep. No sample depends on the batch.

#include "operators.h"
#include "row.h"

namespace {

constexpr float kSlack = 0.99f;  // for rounding
constexpr double kMinTemperature = 1e-30;  // MIN_TEMPERATURE in kernels/sampling_tensors.py
constexpr double kMostUniform = 1 - 0x1p-53;  // times a sum is below the sum

// Cuts candidates by weight, after an earlier cut.
Cut cut_top_p(const Row& row, double target, const Candidates& candidates, Cut before) {
  const auto weight = [&](int64_t i) { return candidates.weights_at(i); };
  const Range range = narrow(
      candidates, {before.key, int64_t{to_key(row.greatest())} + 1}, target, weight);
  const int32_t key = range.begin;
  // As many tokens as needed to reach the target, at least one.
  const double each = std::max(row.weigh(broadcast(from_key(key)))[0], 1e-38f);
  const double spare = std::max(std::ceil((target - range.measured) / each), 1.0);
  return {key, key > before.key ? spare : std::min(spare, before.spare)};
}

// A token, and the sum of the weights up to it.
struct Reached {
  int64_t token;
  double sum;
};

// Adds the weights of the vectors [first, end) to `sum`, in the vocabulary's order. Returns the
// first token at which the sum exceeds `target`, else the last token with weight.
template <class Weights>
Reached reach(int64_t first, int64_t end, double sum, double target, Weights weights) {
  int64_t last = 0;
  for (int64_t i = first; i < end; i++) {
    const Floats some = weights(i);
    for (int lane = 0; lane < kLanes; lane++) {
      if (!(some[lane] > 0)) continue;
      last = i * kLanes + lane;
      sum += some[lane];
      if (sum > target) return {last, sum};
    }
  }
  return {last, sum};
}

// Returns the token at which the running sum of weights(i) exceeds `uniform` times the total.
template <class Weights>
int64_t invert(int64_t vectors, double uniform, Weights weights) {
  thread_local std::vector<double> sums;
  sums.clear();
  double total = 0;
  for (int64_t first = 0; first < vectors; first += kChunk) {
    sums.push_back(add(first, std::min(first + kChunk, vectors), weights));
    total += sums.back();
  }
  if (sums.empty()) return 0;  // all weights are NaN
  uniform = std::min(uniform, kMostUniform);
  double target = uniform * total, before = 0;
  size_t chunk = 0;
  while (chunk + 1 < sums.size() && before + sums[chunk] <= target) before += sums[chunk++];
  const int64_t first = chunk * kChunk, end = std::min(first + kChunk, vectors);

  // The chunk's sum in the vocabulary's order differs by rounding: scale the target to it.
  // Otherwise tokens lighter than the difference would be sampled too often, or never.
  const double sum = reach(first, end, before, HUGE_VAL, weights).sum;
  if (before + sums[chunk] == total)  // later tokens have no weight
    target = uniform * sum;
  else
    target = before + (target - before) / sums[chunk] * (sum - before);
  return reach(first, end, before, std::min(target, kMostUniform * sum), weights).token;
}

int64_t draw(const Row& row, int64_t top_k, double top_p, float min_p, double uniform) {
  const auto likely = [=](Floats weights) {
    return weights >= broadcast(min_p) ? weights : Floats{};
  };
  const auto weights = [&](int64_t i) { return row.weigh(row.at(i)); };
  const bool by_number = top_k > 0 && top_k < row.size();
  if (!by_number && top_p >= 1)
    return invert(row.vectors(), uniform, [&](int64_t i) { return likely(weights(i)); });

  thread_local Candidates candidates;
  Cut cut{INT32_MIN, double(row.size())};
  double total;
  if (by_number) {
    cut = cut_top_k(row, top_k, candidates);
    total = cut.spare * row.weigh(broadcast(from_key(cut.key)))[0] +
            add_all(candidates.vectors(), [&](int64_t i) {
              const Ints above = candidates.keys_at(i) > broadcast(cut.key);
              return above ? candidates.weights_at(i) : Floats{};
            });
  } else {
    total = add_all(row.vectors(), weights);
    // All tokens below this weight together weigh less than the tail that top-p cuts off.
    const float least = row.least_logit(kSlack * (1 - top_p) * total / row.size());
    candidates.gather(row, least);
    cut.key = to_key(least);
  }
  if (top_p < 1) cut = cut_top_p(row, top_p * total, candidates, cut);

  const int64_t end_of_ties = candidates.end_of(cut.key, cut.spare);
  const int64_t at = invert(candidates.vectors(), uniform, [&](int64_t i) {
    const Ints keys = candidates.keys_at(i), key = broadcast(cut.key);
    const Ints tied = (keys == key) & (kLane < broadcast(int32_t(end_of_ties - i * kLanes)));
    return (keys > key) | tied ? likely(candidates.weights_at(i)) : Floats{};
  });
  return candidates.count ? candidates.places[at] : 0;
}

// Returns a token for each row. Arrays have one number per row; see SamplingTensors in
// kernels/sampling_tensors.py.
void draw_tokens(const View& logits, const View& temperatures, const View& top_k,
                 const View& top_p, const View& min_p, const View& uniforms, const View& tokens) {
  const int64_t num_rows = logits.sizes[0], size = logits.sizes[1];
#pragma omp parallel for num_threads(num_threads()) if (num_rows > 1) schedule(dynamic)
  for (int64_t i = 0; i < num_rows; i++) {
    const double given = temperatures.as<double>()[i];
    const bool greedy = given == 0;  // the first of the most likely tokens
    const double temperature = greedy ? 1 : std::max(given, kMinTemperature);
    const Row row(logits.as<float>() + i * logits.strides[0], size, 1 / temperature);
    const int64_t token =
        draw(row, greedy ? 1 : top_k.as<int64_t>()[i], greedy ? 1 : top_p.as<double>()[i],
             min_p.as<double>()[i], uniforms.as<double>()[i]);
    tokens.as<int64_t>()[i] = std::min(token, size - 1);  // past the end if none is possible
  }
}
OCTAVO_OPERATOR(draw_tokens)

}  // namespace
