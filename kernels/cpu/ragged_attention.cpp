// Attention of whole texts, as encoders need it: a batch without padding, of which no key or value
// is kept.

#include <atomic>
#include <cstdint>
#include <limits>
#include <vector>

#include "text_attention.h"

namespace {

constexpr int kAllKeys = std::numeric_limits<int>::max();
constexpr int64_t kMinParallelProducts = 1 << 19;  // fewer do not pay for threads
constexpr int kItems = 4;  // of a thread, so that all end at about the same time

template <class T>
void attend(const TextAttention& call, const int32_t* first, int32_t texts) {
  const int64_t kv_heads = call.key.sizes[1];
  int longest = 0;
  int64_t products = 0;
  for (int32_t text = 0; text < texts; text++) {
    const int length = first[text + 1] - first[text];
    longest = std::max(longest, length);
    products += int64_t(length) * length * call.query.sizes[1] * call.key.sizes[2];
  }
  const int threads = products < kMinParallelProducts ? 1 : num_threads();
  // An item packs all keys of its text, so it should have many queries.
  const int rows =
      TextWorker<T>::rows_of(TextWorker<T>::on_matrix_unit(call.key.sizes[2], call.value.sizes[2]));
  const int64_t whole = std::max<int64_t>(kv_heads * texts, 1), wanted = kItems * threads;
  const int parts = threads == 1 || whole >= wanted ? 1 : (wanted + whole - 1) / whole;
  const int share = ((longest + parts - 1) / parts + rows - 1) / rows * rows;
  std::vector<TextItem> items;
  for (int32_t text = 0; text < texts; text++) {
    const int length = first[text + 1] - first[text];
    for (int begin = 0; begin < length; begin += share)
      for (int head = 0; head < kv_heads; head++)
        items.push_back({first[text], length, head, begin, std::min(length, begin + share)});
  }
  std::atomic<size_t> next{0};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    TextWorker<T> worker(call, longest);
    for (size_t i = next++; i < items.size(); i = next++) worker.run(items[i]);
  }
}

// `starts` holds the first row of each text, and the number of rows. A token attends to tokens of the
// same text, up to a distance of `reach`; a negative `reach` is no limit. If `causal`, it does not
// attend to later tokens.
void ragged_attention(const Result& result, const View& query, const View& key, const View& value,
                      const View& starts, double scale, int64_t reach, bool causal) {
  const Stopwatch stopwatch(spent.attention);
  const int32_t texts = starts.sizes[0] - 1;
  const int32_t* const first = starts.as<const int32_t>();
  require(texts > 0 && first[0] == 0 && first[texts] == key.sizes[0] &&
              query.sizes[0] == key.sizes[0] && value.sizes[0] == key.sizes[0],
          "texts must hold each token once");
  for (int32_t text = 0; text < texts; text++)
    require(first[text] <= first[text + 1], "texts must follow each other");
  for (const View* each : {&query, &key, &value})
    require(each->dtype == query.dtype && each->has_whole_rows(),
            "queries, keys and values must have one type, and heads must be contiguous");
  require(query.sizes[1] % key.sizes[1] == 0 && value.sizes[1] == key.sizes[1] &&
              query.sizes[2] == key.sizes[2],
          "heads of queries, keys and values must fit");
  const int64_t key_dim = key.sizes[2], value_dim = value.sizes[2];
  require(key_dim % kMinBlock == 0 && value_dim % kMinBlock == 0 && key_dim <= kMaxKeyDim &&
              value_dim <= kMaxKeyDim,
          "heads must have a multiple of 8 elements, at most 576");
  const int near = reach < 0 ? kAllKeys : int(reach);
  const Sight sight{reach < 0 ? 0 : near + 1, 0, causal ? 0 : near};
  void* const out = result.make({query.sizes[0], query.sizes[1], value_dim}, query.dtype);
  const TextAttention call{query, key, value, out, float(scale), sight};
  with_dtype(dtype_number(query.dtype),
             [&](auto type) { attend<decltype(type)>(call, first, texts); });
}
OCTAVO_OPERATOR(ragged_attention)

}  // namespace
