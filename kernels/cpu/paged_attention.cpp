// PagedAttention on a CPU: decodes and prefill chunks of any length, in one call.
//
// Threads share items of work: (sequence, KV head, up to kMaxRows query rows, range of keys). A
// query row is a (token, head of the group) pair, so the query heads of a KV head share each load
// of K and V. An item reads its keys in tiles of kTile, whatever the block size: the block table
// gives their addresses, and both products read them in place (see cache.h). The softmax is online,
// in float32 and base 2 (FlashAttention-2, Dao 2023, section 3.1). If there are too few items for
// the threads, each part of a long range of keys is an item, and the parts are merged
// (Flash-Decoding, Dao et al. 2023). In latent attention (DeepSeek-V2, 2024, section 2.1.2, with absorbed products) a key's first
// elements are its value: each tile's are repacked once for all query heads.
//
// Packing K and V in every step, from a plain cache, took longer: 491 us per layer instead of 399
// for 48 decodes at 200 tokens, 409 instead of 325 for 4 at 2048, 3.89 ms instead of 3.79 for 512
// tokens of 1024 (AMD EPYC 9004, two threads, bf16, 9 query heads, 3 KV heads of 64; the minimum of
// three interleaved runs each, on a busy machine). Reading the K and V of those 48 alone took 306.
//
// Slots past the end of the keys may hold anything, including NaN: their logits are replaced, not
// added to, and their values are left out of the products.

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"
#include "attention_worker.h"
#include "spill.h"

namespace {

constexpr int64_t kMinParallelWork = 1 << 17;  // fewer products do not pay for threads

template <class T, bool kInCodes>
void run(const Attention& p, const Plan& plan, float* carried, int threads) {
  const int items = int(plan.items.size()), merges = int(plan.merges.size());
  std::unique_ptr<float[]> saved;
  std::atomic<int> queue{0};
  using Own = Worker<T, kInCodes>;
  if (merges) saved.reset(new float[plan.saved_rows * Own::saved_size(p.value_width())]);
  const int dims = (p.cache.key_dim + p.value_dim) / 2;
  const bool parallel = items > 1 && plan.work * dims >= kMinParallelWork;
#pragma omp parallel num_threads(threads) if (parallel)
  {
    Own worker(p, saved.get(), carried);
    // Threads take items one ahead, to prefetch the next item's keys.
    int i = queue++;
    if (i < items) worker.start(plan.items[i]);
    while (i < items) {
      const int next = queue++;
      worker.run(plan.items[i], next < items ? &plan.items[next] : nullptr);
      i = next;
    }
    if (merges) {
#pragma omp barrier
#pragma omp for schedule(dynamic)
      for (int i = 0; i < merges; i++) worker.merge(plan.merges[i]);
    }
  }
}

// Computes attention to each sequence's span of keys; `carried` holds the softmaxes that go on.
void attend_to_spans(const Attention& p, const KeySpan* spans = nullptr, float* carried = nullptr) {
  const int threads = num_threads();
  const Cache& cache = p.cache;
  Plan plan =
      make_plan(p.batch, p.num_heads / cache.num_kv_heads, cache.num_kv_heads, p.sight, spans);
  if (threads > 1 && int(plan.items.size()) < kItemsPerThread * threads) split_items(plan);
  with_dtype(cache.dtype, [&](auto type) {
    using T = decltype(type);
    (cache.in_codes ? run<T, true> : run<T, false>)(p, plan, carried, threads);
  });
}

// Attends to the units of the spilled sequence as they come, and then to all that is in the cache.
// Parts are merged in the same order as if the cache held all keys, so results have the same bits.
void attend_to_spilled(Spill& file, const Attention& p) {
  const int index = file.index();
  const int64_t rows = p.batch.query_count(index) * int64_t(p.num_heads);
  const int64_t width = Worker<Float32>::saved_size(p.value_width());
  std::vector<float> carried(rows * width);
  for (int64_t row = 0; row < rows; row++) carried[row * width] = kNoLogit;
  std::vector<KeySpan> spans(p.batch.num_seqs);
  KeySpan& span = spans[index];
  span = {0, 0, 0, false};
  Batch batch = p.batch;
  batch.query_starts += index;
  batch.seq_lens += index;
  batch.num_seqs = 1;
  const Cache ring = file.ring(p.cache);
  Attention of_file{ring,    batch,     p.query, p.query_token_stride, p.query_head_stride, p.out,
                    p.out_token_stride, p.alibi_slopes, p.sinks, p.num_heads, p.value_dim, p.sight,
                    p.scale, p.soft_cap};
  for (int first = 0, end; first < file.units(); first = end) {
    end = std::min(file.units(), first + file.most_units());
    file.wait(first, end - first);
    batch.block_tables = file.table();
    span.begin = span.end;
    span.end = file.tokens_of(end, ring);
    attend_to_spans(of_file, &span, carried.data());
    file.release(end - first);
  }
  span = {span.end, KeySpan().end, 0, true};
  attend_to_spans(p, spans.data(), carried.data());
}

Attention attention_of(const Cache& cache, const Batch& batch, const View& query, void* out,
                       int64_t value_dim, const Attending& how) {
  const int num_heads = query.sizes[1];
  return {cache,          batch,          query.data,          query.strides[0],
          query.strides[1], out,          num_heads * value_dim, how.alibi_slopes,
          how.sinks,      num_heads,      int(value_dim),      how.sight,
          how.scale,      how.soft_cap};
}

}  // namespace

void attend_to_blocks(const Cache& cache, const Batch& batch, const View& query, void* out,
                      int64_t value_dim, const Attending& how) {
  attend_to_spans(attention_of(cache, batch, query, out, value_dim, how));
}

namespace {

void attend_to_layer(const Layer& layer, const View& query, void* out, int64_t value_dim,
                     const Attending& how) {
  layer.check_query(query);
  require(value_dim <= (layer.cache.values ? layer.cache.value_dim : layer.cache.key_dim),
          "values are not so wide");
  layer.check_tables(how.sight);
  const Attention attention = attention_of(layer.cache, layer.batch, query, out, value_dim, how);
  spill ? attend_to_spilled(*spill, attention) : attend_to_spans(attention);
}

Attending attending(double scale, int64_t sliding_window, double soft_cap, int64_t chunk,
                    const View* sinks, const View* alibi_slopes) {
  return {float(scale), {int(sliding_window), int(chunk)}, float(soft_cap),
          maybe<float>(alibi_slopes), maybe<float>(sinks)};
}

// Attends to a layer's cache.
void attend(const Result& result, const View& query, int64_t value_dim, int64_t layer,
            double scale, int64_t sliding_window, double soft_cap, int64_t chunk,
            const View* sinks, const View* alibi_slopes) {
  attend_to_layer(Layer(layer), query, make_out(result, query, value_dim), value_dim,
                  attending(scale, sliding_window, soft_cap, chunk, sinks, alibi_slopes));
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
  attend_to_layer(layer, queries, out, value_dim,
                  attending(scale, sliding_window, soft_cap, chunk, sinks, alibi_slopes));
}
OCTAVO_OPERATOR(paged_attention)

}  // namespace
