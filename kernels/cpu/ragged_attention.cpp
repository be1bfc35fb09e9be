// Attention of whole texts, as encoders need it: a batch without padding, of which no key or value
// is kept.
//
// With a matrix unit, tile_attention.h computes heads of bfloat16 that fit its tiles. Otherwise keys
// and values are first packed into blocks, as the tiles of paged attention read them. The blocks of one
// layer are in a core's cache, and all layers use the same memory.

#include <atomic>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention.h"
#include "tile_attention.h"

namespace {

constexpr int kBlock = kTile;
constexpr int kAllKeys = std::numeric_limits<int>::max();

// The blocks of a batch's texts: each text begins with a block of its own.
struct Blocks {
  std::vector<int32_t> lengths, tables;
  std::vector<int64_t> slots;
  int32_t count = 0, width = 0;

  Blocks(const int32_t* starts, int32_t texts) {
    for (int32_t text = 0; text < texts; text++) {
      lengths.push_back(starts[text + 1] - starts[text]);
      width = std::max(width, (lengths.back() + kBlock - 1) / kBlock);
    }
    tables.reserve(int64_t(texts) * width);
    for (const int32_t length : lengths) {
      for (int i = 0; i < width; i++) tables.push_back(count + i);
      for (int i = 0; i < length; i++) slots.push_back(int64_t(count) * kBlock + i);
      count += (length + kBlock - 1) / kBlock;
    }
  }
};

// Returns this thread's memory for blocks; it is kept for the next layer.
char* memory_for(int64_t bytes) {
  thread_local Memory kept;
  thread_local int64_t size = 0;
  if (size < bytes) {
    kept = allocate(bytes);
    size = bytes;
  }
  return static_cast<char*>(kept.get());
}

#if OCTAVO_HAS_AMX
constexpr int64_t kMinParallelProducts = 1 << 19;  // fewer do not pay for threads

void attend_in_tiles(const TextAttention& call, const int32_t* first, int32_t texts) {
  std::vector<TextItem> items;
  int longest = 0;
  int64_t products = 0;
  for (int32_t text = 0; text < texts; text++) {
    const int length = first[text + 1] - first[text];
    longest = std::max(longest, length);
    products += int64_t(length) * length * call.query.sizes[1] * call.key.sizes[2];
    for (int begin = 0; begin < length; begin += TextWorker::kQueries)
      for (int head = 0; head < call.key.sizes[1]; head++)
        items.push_back({first[text], length, head, begin,
                         std::min(length, begin + TextWorker::kQueries)});
  }
  std::atomic<size_t> next{0};
  const int threads = products < kMinParallelProducts ? 1 : num_threads();
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    TextWorker worker(call, longest);
    for (size_t i = next++; i < items.size(); i = next++) worker.run(items[i]);
  }
}
#endif

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
  const int near = reach < 0 ? kAllKeys : int(reach);
  const Sight sight{reach < 0 ? 0 : near + 1, 0, causal ? 0 : near};
#if OCTAVO_HAS_AMX
  if (query.dtype == aoti_torch_dtype_bfloat16() &&
      TextWorker::fits(key.sizes[2], value.sizes[2])) {
    for (const View* each : {&query, &key, &value})
      require(each->dtype == query.dtype && each->has_whole_rows(),
              "queries, keys and values must have one type, and heads must be contiguous");
    require(query.sizes[1] % key.sizes[1] == 0 && value.sizes[1] == key.sizes[1] &&
                query.sizes[2] == key.sizes[2],
            "heads of queries, keys and values must fit");
    auto* const out = static_cast<uint16_t*>(make_out(result, query, value.sizes[2]));
    return attend_in_tiles({query, key, value, out, float(scale), sight}, first, texts);
  }
#endif
  const Blocks blocks(first, texts);
  const int kv_heads = key.sizes[1], key_dim = key.sizes[2], value_dim = value.sizes[2];
  require(key_dim % kMinBlock == 0 && value_dim % kMinBlock == 0 && key_dim <= kMaxKeyDim &&
              value_dim <= kMaxKeyDim,
          "heads must have a multiple of 8 elements, at most 576");
  const int64_t head = int64_t(kv_heads) * kBlock, bytes = bytes_of(query.dtype);
  const int64_t of_keys = blocks.count * head * key_dim * bytes;
  char* const memory = memory_for(of_keys + blocks.count * head * value_dim * bytes);
  const Cache cache{memory,       memory + of_keys, head * key_dim, head * value_dim,
                    blocks.count, kv_heads,         key_dim,        value_dim,
                    kBlock,       dtype_number(query.dtype)};
  const Batch batch{first,       blocks.lengths.data(), blocks.tables.data(),
                    blocks.width, blocks.width,          texts,
                    blocks.slots.data(), int64_t(blocks.slots.size())};
  const Layer layer(cache, batch);
  layer.check_query(query);
  layer.write(key, &value);
  attend_to_blocks(cache, batch, query, make_out(result, query, value_dim), value_dim,
                   {float(scale), sight, 0, nullptr, nullptr});
}
OCTAVO_OPERATOR(ragged_attention)

}  // namespace
