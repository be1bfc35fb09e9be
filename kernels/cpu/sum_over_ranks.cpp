// What ranks tell each other within a step: sums in memory that the ranks of one machine share, and
// by a function of Python sums elsewhere and the hidden states that one stage hands to the next.
//
// Each rank has two slots in the shared memory, which it uses in turn. It copies a piece of its part
// to a slot, counts the piece in `written`, waits until the others have counted it too, and adds all
// parts in rank order. When all have counted a piece, all have read the one before: its slot is free.

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>

#include "operators.h"
#include "vector.h"

// What Python does with `x`; the same as in sums.py.
enum { kSum, kReceive, kSend };

// Does `what` with `elements` of `x` and writes the result to `out`; `dtype` is 0 for float32, 1 for
// float16 and 2 for bfloat16. Returns 0 on success.
using Exchange = int (*)(int what, const void* x, void* out, int64_t elements, int dtype);
static Exchange exchange = nullptr;

extern "C" void octavo_set_exchange(Exchange function) { exchange = function; }

namespace {

constexpr int64_t kSlotBytes = 1 << 19;
constexpr int64_t kElementsOfThread = 1 << 15;  // fewer do not pay for a thread
constexpr int kSpins = 500;                     // about 20 microseconds
constexpr double kYieldingSeconds = 0.002;      // a core that sleeps wakes up later than most sums end
constexpr timespec kSleep{0, 50'000};

struct alignas(64) Counter {
  std::atomic<uint64_t> written;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

struct Ring {
  Counter* counters = nullptr;  // of each rank
  char* slots = nullptr;        // of each rank, two
  int rank = 0, ranks = 0;
  double patience = 0;          // seconds to wait for another rank
  uint64_t number = 0;          // of the latest piece
  double seconds = 0;           // spent in sums

  char* slot(int rank) const { return slots + (2 * rank + number % 2) * kSlotBytes; }
};
Ring ring;

void pause_core() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until another rank has written the current piece; returns whether it has.
bool wait_for(int rank) {
  const auto& written = ring.counters[rank].written;
  const auto arrived = [&] { return written.load(std::memory_order_acquire) >= ring.number; };
  for (int i = 0; i < kSpins; i++, pause_core())
    if (arrived()) return true;
  double waited = 0;
  Stopwatch watch(waited);
  while (!arrived()) {
    const double seconds = watch.elapsed();
    if (seconds > ring.patience) return false;
    if (seconds < kYieldingSeconds)
      sched_yield();
    else
      nanosleep(&kSleep, nullptr);
  }
  return true;
}

template <class Type>
using Stored = typename Type::Stored;

// Loads at most kLanes elements.
template <class Type>
Floats load_floats(const void* from, int64_t at, int64_t count) {
  const auto* elements = static_cast<const Stored<Type>*>(from) + at;
  if (count >= kLanes) return Type::load_floats(elements);
  Stored<Type> padded[kLanes] = {};
  std::memcpy(padded, elements, count * sizeof *padded);
  return Type::load_floats(padded);
}

template <class Type>
void store_floats(void* to, int64_t at, int64_t count, Floats x) {
  auto* elements = static_cast<Stored<Type>*>(to) + at;
  if (count >= kLanes) return Type::store_floats(elements, x);
  Stored<Type> padded[kLanes];
  Type::store_floats(padded, x);
  std::memcpy(elements, padded, count * sizeof *padded);
}

// Rounds where the model does: a sum is a tensor before a residual is added.
template <class Type>
Floats rounded(Floats x) {
  Stored<Type> elements[kLanes];
  Type::store_floats(elements, x);
  return Type::load_floats(elements);
}

template <class Function>
void in_parallel(int64_t elements, Function function) {
  const int threads = std::clamp<int64_t>(elements / kElementsOfThread, 1, num_threads());
  const int64_t part = (elements / threads / kLanes + 1) * kLanes;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t first = 0; first < elements; first += part)
    function(first, std::min(first + part, elements));
}

// Sums in the shared memory; returns whether all ranks came.
template <class Type>
bool sum(const void* x, const void* residual, void* out, int64_t elements) {
  constexpr int64_t kPiece = kSlotBytes / sizeof(Stored<Type>);
  for (int64_t at = 0; at < elements; at += kPiece) {
    const int64_t count = std::min(kPiece, elements - at);
    ring.number++;
    const auto* from = static_cast<const Stored<Type>*>(x) + at;
    auto* own = reinterpret_cast<Stored<Type>*>(ring.slot(ring.rank));
    in_parallel(count, [&](int64_t first, int64_t end) {
      std::memcpy(own + first, from + first, (end - first) * sizeof *own);
    });
    ring.counters[ring.rank].written.store(ring.number, std::memory_order_release);
    for (int rank = 0; rank < ring.ranks; rank++)
      if (!wait_for(rank)) return false;
    in_parallel(count, [&](int64_t first, int64_t end) {
      for (int64_t i = first; i < end; i += kLanes) {
        Floats total = load_floats<Type>(ring.slot(0), i, end - i);
        for (int rank = 1; rank < ring.ranks; rank++)
          total += load_floats<Type>(ring.slot(rank), i, end - i);
        if (residual)
          total = rounded<Type>(total) + load_floats<Type>(residual, at + i, end - i);
        store_floats<Type>(out, at + i, end - i, total);
      }
    });
  }
  return true;
}

template <class Type>
void add(const void* residual, void* out, int64_t elements) {
  for (int64_t i = 0; i < elements; i += kLanes) {
    const int64_t left = elements - i;
    store_floats<Type>(out, i, left,
                       load_floats<Type>(out, i, left) + load_floats<Type>(residual, i, left));
  }
}

}  // namespace

// Sums `elements` of `x` over all ranks and adds `residual` unless it is null; see Exchange.
extern "C" int octavo_sum_over_ranks(const void* x, const void* residual, void* out,
                                     int64_t elements, int dtype) {
  if (dtype < 0) return 1;
  if (ring.ranks) {
    Stopwatch watch(ring.seconds);
    const auto run = dtype == 0 ? sum<Float32> : dtype == 1 ? sum<Float16> : sum<BFloat16>;
    return run(x, residual, out, elements) ? 0 : 1;
  }
  if (!exchange || exchange(kSum, x, out, elements, dtype)) return 1;
  const auto run = dtype == 0 ? add<Float32> : dtype == 1 ? add<Float16> : add<BFloat16>;
  if (residual) run(residual, out, elements);
  return 0;
}

// The bytes of memory that so many ranks share.
extern "C" int64_t octavo_ring_bytes(int ranks) {
  return ranks * (int64_t{sizeof(Counter)} + 2 * kSlotBytes);
}

// Sums in memory from now on, which all ranks share and which was zeros. `patience` is the most
// seconds to wait for another rank.
extern "C" void octavo_set_ring(void* memory, int rank, int ranks, double patience) {
  auto* counters = static_cast<Counter*>(memory);
  ring = {counters, reinterpret_cast<char*>(counters + ranks), rank, ranks, patience};
}

// The seconds that this process has spent in sums in shared memory.
extern "C" double octavo_ring_seconds() { return ring.seconds; }

namespace {

int64_t elements_of(const View& view) {
  int64_t elements = 1;
  for (int i = view.dimensions - 1; i >= 0; i--) {
    require(view.sizes[i] <= 1 || view.strides[i] == elements, "exchanged tensors are contiguous");
    elements *= view.sizes[i];
  }
  return elements;
}

void sum_over_ranks(const Result& result, const View& x, const View* residual) {
  const int64_t elements = elements_of(x);
  require(!residual || (residual->dtype == x.dtype && elements_of(*residual) == elements),
          "a residual has another dtype or size");
  void* const out = result.make(x.sizes, x.dimensions, x.dtype);
  if (octavo_sum_over_ranks(x.data, maybe<void>(residual), out, elements, dtype_number(x.dtype)))
    throw std::runtime_error("a sum over ranks failed");
}
OCTAVO_OPERATOR(sum_over_ranks)

template <int what>
void exchange_hidden(const Result& result, const View& x) {
  void* const out = result.make(x.sizes, x.dimensions, x.dtype);
  if (!exchange || exchange(what, x.data, out, elements_of(x), dtype_number(x.dtype)))
    throw std::runtime_error("another stage failed");
}
void receive_hidden(const Result& result, const View& x) { exchange_hidden<kReceive>(result, x); }
OCTAVO_OPERATOR(receive_hidden)
void send_hidden(const Result& result, const View& x) { exchange_hidden<kSend>(result, x); }
OCTAVO_OPERATOR(send_hidden)

}  // namespace
