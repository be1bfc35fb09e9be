// Reads the units of a spilled sequence; see spill.h.

#include "spill.h"

#include <cerrno>
#include <unistd.h>

__thread Spill* spill;

namespace {

constexpr int64_t kPage = 4096;  // bytes; direct reads of files need its alignment

}  // namespace

Spill::Spill(const SpillLayout& layout)
    : layout_(layout), memory_(allocate(layout.ring_units * layout.unit_bytes, kPage)),
      ready_(layout.ring_units) {
  for (int i = 0; i < layout.threads; i++) threads_.emplace_back([this] { read_ahead(); });
}

Spill::~Spill() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Spill::begin(int index, int units) {
  end();
  const std::lock_guard<std::mutex> lock(mutex_);
  index_ = index;
  units_ = units;
  total_ = int64_t(layout_.num_layers) * units;
  next_ = released_ = 0;
  ready_.assign(layout_.ring_units, -1);
  failed_ = false;
  changed_.notify_all();
}

bool Spill::end() {
  std::unique_lock<std::mutex> lock(mutex_);
  total_ = 0;
  changed_.wait(lock, [this] { return !running_; });
  return failed_;
}

void Spill::wait(int first, int count) {
  std::unique_lock<std::mutex> lock(mutex_);
  const int64_t begin = released_, end = begin + count;
  if (end > total_) throw std::runtime_error("a step attends more often than its spilled keys are read");
  const int last_block = (first + count) * layout_.unit_blocks;
  if (int(table_.size()) < last_block) table_.resize(last_block);
  for (int64_t i = begin; i < end; i++) {
    const int place = i % layout_.ring_units;
    changed_.wait(lock, [&] { return ready_[place] == i; });
    for (int block = 0; block < layout_.unit_blocks; block++)
      table_[(first + i - begin) * layout_.unit_blocks + block] = place * layout_.unit_blocks + block;
  }
}

void Spill::release(int count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  released_ += count;
  changed_.notify_all();
}

Cache Spill::ring(Cache cache) const {
  cache.keys = memory_.get();
  cache.values = static_cast<char*>(memory_.get()) + layout_.values_at;
  cache.key_stride = cache.value_stride = layout_.block_elements;
  cache.num_blocks = layout_.ring_units * layout_.unit_blocks;
  return cache;
}

void Spill::read_ahead() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopped_ || can_read(); });
    if (stopped_) return;
    const int64_t number = next_++;
    running_++;
    lock.unlock();
    const bool done = read(number);
    lock.lock();
    running_--;
    failed_ |= !done;
    ready_[number % layout_.ring_units] = number;
    changed_.notify_all();
  }
}

// Reads a unit of a layer; returns false if the file cannot be read.
bool Spill::read(int64_t number) {
  const int64_t layer = number / units_, unit = number % units_;
  char* to = static_cast<char*>(memory_.get()) + number % layout_.ring_units * layout_.unit_bytes;
  int64_t from = (layer * layout_.num_units + unit) * layout_.unit_bytes;
  for (int64_t left = layout_.unit_bytes; left;) {
    const ssize_t count = pread(layout_.file, to, left, from);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    to += count;
    from += count;
    left -= count;
  }
  return true;
}

// The exported functions have no type that is hidden.

// Opens a file's ring and starts its threads; null without memory for it.
extern "C" void* octavo_open_spill(const SpillLayout* layout) try {
  return new Spill(*layout);
} catch (const std::exception&) {
  return nullptr;
}

extern "C" void octavo_close_spill(void* closed) { delete static_cast<Spill*>(closed); }

// Begins a step of this thread: the first `units` units are of the sequence with this index.
extern "C" void octavo_begin_spill(void* begun, int32_t index, int32_t units) {
  spill = static_cast<Spill*>(begun);
  spill->begin(index, units);
}

// Ends this thread's step; returns whether a read failed.
extern "C" bool octavo_end_spill(void* ended) {
  spill = nullptr;
  return static_cast<Spill*>(ended)->end();
}
