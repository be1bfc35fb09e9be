// Divides a batch's attention into items of work.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <vector>

#include "cache.h"

constexpr int kTile = 64;       // keys per step of the online softmax
constexpr int kMaxRows = 48;    // query rows per item
constexpr int kPart = 512;      // keys of a partial result
constexpr int kItemsPerThread = 4;
constexpr int kFirstKey = std::max(kLanes, kMinBlock);  // items begin at multiples of it

// A batch's sequences as one layer group sees them; the same as in caches.py.
struct Batch {
  const int32_t* query_starts;
  const int32_t* seq_lens;
  const int32_t* block_tables;
  int64_t table_stride;
  int32_t table_width;
  int32_t num_seqs;
  const int64_t* slots;
  int64_t num_tokens;

  int query_count(int seq) const { return query_starts[seq + 1] - query_starts[seq]; }
};

// The keys that a query sees, up to its own: all, those of a window, or those of its chunk; and the
// keys after its own, of which decoders see none.
struct Sight {
  int sliding_window;  // number of keys, or 0
  int chunk;           // keys per chunk, or 0
  int ahead = 0;       // number of keys after its own

  int first_key(int position) const {
    if (sliding_window) return std::max(0, position - sliding_window + 1);
    return chunk ? position - position % chunk : 0;
  }
  int last_key(int position, int seq_len) const {
    return ahead < seq_len - position ? position + ahead : seq_len - 1;
  }
};

// Returns the first key of an item whose first query sees keys from `first_key` on.
inline int begin_at(int first_key) { return first_key - first_key % kFirstKey; }

// Tiles and parts end at multiples of their size, wherever an item begins, and parts are merged in
// order. So a query's result has the same bits alone and among others, in any chunk of a prompt and
// with any number of threads.
inline int end_of_tile(int key) { return (key / kTile + 1) * kTile; }
inline int end_of_part(int key) { return (key / kPart + 1) * kPart; }

// Row r is token r / group of the sequence and head r % group of those that share the KV head.
struct Item {
  int seq, kv_head;
  int row_begin, rows;
  int key_begin, key_end;
  int saved;               // first saved row, if the item is one part; else -1
  int64_t carried = -1;    // first row of the softmax of earlier keys, from which it goes on; or -1
  bool is_last = true;     // whether no keys follow; else the softmax is carried on
};

// A part of a sequence's keys, where they are read in several calls; begins at a multiple of kPart.
struct KeySpan {
  int begin = 0, end = INT_MAX;
  int64_t carried = -1;  // the sequence's first row of the softmax of earlier keys, or -1
  bool is_last = true;
};

// A result that merges parts, whose rows are saved from `saved` on.
struct Merge {
  Item item;
  int saved, parts;
};

struct Plan {
  std::vector<Item> items;
  std::vector<Merge> merges;
  int saved_rows = 0;
  int64_t work = 0;  // (query row, key) pairs
};

// Divides the batch into items; a sequence's last (longest) rows come first. `spans` holds each
// sequence's keys of this call; null: all.
inline Plan make_plan(const Batch& batch, int group, int num_kv_heads, Sight sight,
                      const KeySpan* spans = nullptr) {
  Plan plan;
  for (int seq = 0; seq < batch.num_seqs; seq++) {
    const KeySpan span = spans ? spans[seq] : KeySpan();
    const int queries = batch.query_count(seq);
    const int context = batch.seq_lens[seq] - queries;
    const int rows = queries * group;
    const int pieces = (rows + kMaxRows - 1) / kMaxRows;
    for (int piece = pieces - 1; piece >= 0; piece--) {
      Item item{seq, 0, piece * kMaxRows, std::min(kMaxRows, rows - piece * kMaxRows), 0, 0, -1};
      const int first = context + item.row_begin / group;
      const int last = context + (item.row_begin + item.rows - 1) / group;
      item.key_begin = std::max(span.begin, begin_at(sight.first_key(std::max(0, first))));
      const int last_key = std::min(span.end - 1, sight.last_key(last, batch.seq_lens[seq]));
      item.key_end = std::max(item.key_begin, last_key + 1);
      item.is_last = span.is_last;
      plan.work += int64_t(item.rows) * (item.key_end - item.key_begin) * num_kv_heads;
      for (item.kv_head = 0; item.kv_head < num_kv_heads; item.kv_head++) {
        if (span.carried >= 0) item.carried = span.carried + item.kv_head * rows + item.row_begin;
        plan.items.push_back(item);
      }
    }
  }
  return plan;
}

// Makes an item of each part.
inline void split_items(Plan& plan) {
  std::vector<Item> whole;
  whole.swap(plan.items);
  for (Item item : whole) {
    const int end = item.key_end;
    if (end <= end_of_part(item.key_begin)) {
      plan.items.push_back(item);
      continue;
    }
    plan.merges.push_back({item, plan.saved_rows, 0});
    for (; item.key_begin < end; item.key_begin = item.key_end) {
      item.key_end = std::min(end, end_of_part(item.key_begin));
      item.saved = plan.saved_rows;
      plan.saved_rows += item.rows;
      plan.merges.back().parts++;
      plan.items.push_back(item);
    }
  }
}

// Returns 0, or 1 + the index of a sequence whose queries see a block that does not exist.
inline int find_bad_table(const Batch& batch, const Cache& cache, Sight sight) {
  for (int seq = 0; seq < batch.num_seqs; seq++) {
    const int32_t* table = batch.block_tables + seq * batch.table_stride;
    const int blocks = (batch.seq_lens[seq] + cache.block_size - 1) / cache.block_size;
    if (blocks > batch.table_width) return 1 + seq;
    const int context = std::max(0, batch.seq_lens[seq] - batch.query_count(seq));
    for (int i = begin_at(sight.first_key(context)) / cache.block_size; i < blocks; i++)
      if (uint32_t(table[i]) >= uint32_t(cache.num_blocks)) return 1 + seq;
  }
  return 0;
}
