// Log-probabilities of one token per row, and of the row's most likely tokens.

#include <utility>

#include "operators.h"
#include "row.h"

namespace {

// Writes the ids and log-probabilities of a row's `most` most likely tokens, most likely first,
// lowest ids first on a tie. A row with NaN may have fewer.
void write_top(const Row& row, float normaliser, int64_t most, int64_t* places,
               float* logprobs) {
  thread_local Candidates candidates;
  thread_local std::vector<std::pair<int32_t, int32_t>> top;  // negated keys, and ids
  const Cut cut = cut_top_k(row, most, candidates);
  const int64_t end_of_ties = candidates.end_of(cut.key, cut.spare);
  top.clear();
  for (int64_t i = 0; i < candidates.count; i++) {
    const int32_t key = candidates.keys[i];
    if (key > cut.key || (key == cut.key && i < end_of_ties))
      top.emplace_back(~key, candidates.places[i]);
  }
  std::sort(top.begin(), top.end());
  for (int64_t i = 0; i < most; i++) {
    const bool there = i < static_cast<int64_t>(top.size());
    places[i] = there ? top[i].second : 0;
    logprobs[i] = there ? from_key(~top[i].first) - normaliser : NAN;
  }
}

// `tokens` and `logprobs` have one element per row, `top` and `top_logprobs` several.
void score_tokens(const View& logits, const View& tokens, const View& logprobs, const View& top,
                  const View& top_logprobs) {
  const int64_t num_rows = logits.sizes[0], size = logits.sizes[1], most = top.sizes[1];
#pragma omp parallel for num_threads(num_threads()) if (num_rows > 1) schedule(dynamic)
  for (int64_t i = 0; i < num_rows; i++) {
    const float* row_logits = logits.as<float>() + i * logits.strides[0];
    const Row row(row_logits, size, 1);
    const double total =
        add_all(row.vectors(), [&](int64_t at) { return row.weigh(row.at(at)); });
    const float normaliser = row.greatest() + std::log(total);
    const int64_t token = tokens.as<int64_t>()[i];
    const bool known = token >= 0 && token < size;
    logprobs.as<float>()[i] = known ? row_logits[token] - normaliser : NAN;
    if (most)
      write_top(row, normaliser, most, top.as<int64_t>() + i * most,
                top_logprobs.as<float>() + i * most);
  }
}
OCTAVO_OPERATOR(score_tokens)

}  // namespace
