// PagedAttention on a CPU: decodes and prefill chunks of any length, in one call.
//
// Threads share items of work: (sequence, KV head, up to kMaxRows query rows, range of keys). A
// query row is a (token, head of the group) pair, so the query heads of a KV head share each load
// of K and V. An item reads its keys in tiles of kTile, whatever the block size: the block table
// gives their addresses, and both products read them in place (see cache.h). The softmax is online,
// in float32 and base 2 (FlashAttention-2, Dao 2023, section 3.1). If there are too few items for
// the threads, long ranges of keys are split and the parts merged (Flash-Decoding, Dao et al.
// 2023). In latent attention (DeepSeek-V2, 2024, section 2.1.2, with absorbed products) a key's first
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

#include "attention_worker.h"

namespace {

constexpr int64_t kMinParallelWork = 1 << 17;  // fewer products do not pay for threads

template <class T>
void attend(const Attention& p, const Plan& plan, int threads) {
  const int items = int(plan.items.size()), merges = int(plan.merges.size());
  std::unique_ptr<float[]> parts;
  std::atomic<int> queue{0};
  if (plan.parts) parts.reset(new float[plan.parts * Worker<T>::part_size(p.value_width())]);
  const int dims = (p.cache.key_dim + p.value_dim) / 2;
  const bool parallel = items > 1 && plan.work * dims >= kMinParallelWork;
#pragma omp parallel num_threads(threads) if (parallel)
  {
    Worker<T> worker(p, parts.get());
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

}  // namespace

// Returns 0, or 1 + the index of a sequence with a bad block table.
extern "C" int octavo_paged_attention(
    const Cache* cache, const Batch* batch, const void* query, int64_t query_token_stride,
    int64_t query_head_stride, int num_heads, void* out, int value_dim, float scale,
    int sliding_window, int chunk, float soft_cap, const float* alibi_slopes, const float* sinks,
    int threads) {
  const Sight sight{sliding_window, chunk};
  if (int bad = find_bad_table(*batch, *cache, sight)) return bad;
  const Attention attention{*cache,    *batch, query,     query_token_stride, query_head_stride,
                            out,       int64_t(num_heads) * value_dim, alibi_slopes, sinks,
                            num_heads, value_dim, sight, scale, soft_cap};
  const int group = num_heads / cache->num_kv_heads;
  Plan plan = make_plan(*batch, group, cache->num_kv_heads, sight);
  split_items(plan, threads);
  with_type(*cache, [&](auto type) { attend<decltype(type)>(attention, plan, threads); });
  return 0;
}
