// A sequence whose first keys and values lie in a file, as memory has no room for them.
//
// The file holds units of tokens, layer by layer. A step reads each layer's units in order into a
// ring in memory: threads read ahead while the layers before are computed, up to the ring's size.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "cache.h"
#include "operators.h"
#include "plan.h"

// The file and the ring; the same as in spill.py. A unit is a multiple of kPart tokens.
struct SpillLayout {
  int64_t unit_bytes;      // of one layer
  int64_t num_units;       // in the file
  int64_t block_elements;  // of one layer, in elements of its cache
  int64_t values_at;       // bytes from a block's keys to its values
  int32_t file;            // its descriptor
  int32_t num_layers;
  int32_t unit_blocks;
  int32_t ring_units;
  int32_t threads;
};

class HIDDEN Spill {
 public:
  explicit Spill(const SpillLayout& layout);
  ~Spill();
  Spill(const Spill&) = delete;
  Spill& operator=(const Spill&) = delete;

  // Starts to read a step's units: the first `units` of each layer. They are those of the sequence
  // with this index in the batch.
  void begin(int index, int units);

  // Ends the step, also before all is read. Returns whether a read failed: then the sequence's
  // results are meaningless.
  bool end();

  int index() const { return index_; }
  int units() const { return units_; }
  int tokens_of(int units, const Cache& cache) const {
    return units * layout_.unit_blocks * cache.block_size;
  }

  // The units that attention reads from the ring at once, while the next ones are read from the file.
  int most_units() const { return layout_.ring_units / 2; }

  // Waits for the next `count` units of the step, which are a layer's from unit `first` on.
  void wait(int first, int count);

  // Lets these units be overwritten.
  void release(int count);

  // The ring as a layer's cache, and the block table of the units in it.
  Cache ring(Cache cache) const;
  const int32_t* table() const { return table_.data(); }

 private:
  void read_ahead();
  bool read(int64_t number);
  bool can_read() const { return next_ < total_ && next_ < released_ + layout_.ring_units; }

  const SpillLayout layout_;
  const Memory memory_;  // the ring
  std::vector<int32_t> table_;
  int index_ = 0, units_ = 0;
  std::mutex mutex_;            // guards what follows
  std::condition_variable changed_;
  std::vector<int64_t> ready_;  // the read that each place of the ring holds
  int64_t next_ = 0, released_ = 0, total_ = 0;  // numbers of reads
  int running_ = 0;
  bool failed_ = false, stopped_ = false;
  std::vector<std::thread> threads_;
};

// The file of this thread's step; null: it has no spilled sequence.
extern __thread Spill* spill HIDDEN;
