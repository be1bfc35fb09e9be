// Low-rank products that adapters add to a batch's rows; low_rank.py has the same structs.
#pragma once

#include <cstdint>

// The matrices of one adapter for one layer; see make_record.
struct LowRankRecord {
  const void* down;  // [rank, inputs]
  const void* up;    // [rank, outputs], or in panels: see LowRankPart
  int64_t rank;      // 0: the adapter does not adapt the layer
  double scale;
};

// Rows of one adapter; see LowRankBatch.tiles in low_rank.py.
struct LowRankTile {
  int32_t adapter, begin, end;
};

// The rows of a batch that have adapters; the same as in low_rank.py.
struct LowRankBatch {
  const int32_t* rows;      // sorted by adapter
  const int32_t* adapters;  // of each row of the batch; -1 for none
  const LowRankTile* tiles;
  const LowRankRecord* records;  // [layers][num_adapters]
  int64_t num_rows, num_tiles, num_adapters, max_rank;
};

// The part of a packed layer's outputs that belongs to one layer of the model. `up` is in panels:
// [panels][rank][lanes], from the packed layer's panel `panel` and the panel's lane `lane` on.
struct LowRankPart {
  int32_t layer, panel, panels, lane, lanes;
};

struct LowRankLayer {
  const LowRankPart* parts;
  int32_t num_parts;
  int32_t of_logits;  // whether it runs only for the rows of logits
};

// The adapters of a step.
struct StepAdapters {
  LowRankBatch tokens, logits;
  const LowRankLayer* layers;
  int64_t num_layers;
};

// The sums of adapters that a packed layer adds to its outputs.
struct LowRankSums {
  const LowRankBatch* batch;
  const LowRankPart* parts;
  int64_t num_parts;
  const float* inner;  // [rows][num_parts][max_rank]: each row times `down`, times the scale
};
