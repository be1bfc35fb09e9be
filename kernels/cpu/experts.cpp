// A mixture of experts: each row's gated MLPs, weighted and summed, in one call.
//
// Rows are sorted by expert, so that each expert's weights are read once. An item of work of the
// first product is a panel of one expert. An item of the second product is the same panel of all
// experts, so that one thread alone adds to its outputs, in the order of the experts.

#include "experts.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "activation.h"
#include "linear.h"
#include "nibbles.h"
#include "operators.h"
#include "prepare_rows.h"

namespace {

constexpr int64_t kMostBytes = 64 << 20;  // of prepared rows at a time

// An expert's range of the sorted rows.
struct ExpertSpan {
  int64_t expert, first, count;
};

// Pairs of a row and an expert, in the order of experts.
struct Sorted {
  std::vector<ExpertSpan> spans;      // of experts with rows
  std::vector<int64_t> experts;  // of each pair
  std::vector<int64_t> rows;
  std::vector<float> weights;

  Sorted(const Routing& routing, int64_t begin, int64_t end, int64_t num_experts) {
    std::vector<int64_t> starts(num_experts + 1);
    for_each(routing, begin, end, num_experts,
             [&](int64_t expert, int64_t, float) { starts[expert + 1]++; });
    for (int64_t expert = 0; expert < num_experts; expert++) {
      if (starts[expert + 1]) spans.push_back({expert, starts[expert], starts[expert + 1]});
      starts[expert + 1] += starts[expert];
    }
    const int64_t count = starts[num_experts];
    experts.resize(count);
    rows.resize(count);
    weights.resize(count);
    for_each(routing, begin, end, num_experts, [&](int64_t expert, int64_t row, float weight) {
      const int64_t at = starts[expert]++;
      experts[at] = expert;
      rows[at] = row;
      weights[at] = weight;
    });
  }
  int64_t count() const { return rows.size(); }

 private:
  template <class Call>
  static void for_each(const Routing& routing, int64_t begin, int64_t end, int64_t num_experts,
                       Call call) {
    for (int64_t row = begin; row < end; row++)
      for (int64_t i = 0; i < routing.chosen; i++) {
        const int64_t expert =
            routing.experts[row * routing.expert_strides[0] + i * routing.expert_strides[1]];
        if (expert < 0 || expert >= num_experts) continue;
        call(expert, row,
             routing.weights[row * routing.weight_strides[0] + i * routing.weight_strides[1]]);
      }
  }
};

// A product's size.
struct Size {
  int64_t inputs, panels;
};

// Each type of weights has a class: it prepares rows, and calls store(i, products) for the rows of
// a span and a panel. A layer's two products share buffers for rows of `most` inputs.

template <class T, class Stored>
class WordProducts {
 public:
  using Element = Stored;
  using Unit = PanelProducts<T>;
  static int64_t row_bytes(int64_t inputs) { return inputs * sizeof(Element) * T::kParts; }

  WordProducts(const ExpertProduct& product, Size size, int64_t rows, int64_t most)
      : panels_(static_cast<const uint32_t*>(product.panels)), size_(size),
        depth_(size.inputs * sizeof(Element) / sizeof(uint32_t)), stride_(depth_ * T::kParts),
        words_(scratch<uint32_t>(rows * row_bytes(most) / sizeof(uint32_t))) {}

  void prepare(int64_t row, int64_t, const Element* from) const {
    take_apart<T>(from, depth_, words_ + row * stride_);
  }
  const uint32_t* at(int64_t expert, int64_t panel) const {
    return panels_ + (expert * size_.panels + panel) * depth_ * kPanel;
  }
  template <class Store>
  void multiply(Unit& unit, const ExpertSpan& span, int64_t panel, const uint32_t* ahead,
                Store store) const {
    const Rows rows{words_ + span.first * stride_, span.count, stride_};
    unit.run(rows, at(span.expert, panel), depth_, ahead, store);
  }

 private:
  const uint32_t* panels_;
  Size size_;
  int64_t depth_, stride_;
  uint32_t* words_;
};

class ByteProducts {
 public:
  using Element = uint16_t;
  using Unit = PanelProducts<Fours>;
  static int64_t row_bytes(int64_t inputs) { return inputs * Fours::kParts; }

  ByteProducts(const ExpertProduct& product, Size size, int64_t rows, int64_t most)
      : product_(product), size_(size), depth_(size.inputs / 4), stride_(depth_ * Fours::kParts),
        words_(scratch<uint32_t>(rows * row_bytes(most) / sizeof(uint32_t))),
        ranges_(scratch<Range>(rows)) {}

  void prepare(int64_t row, int64_t expert, const uint16_t* from) const {
    LinearLayer layer{};
    layer.inputs = size_.inputs;
    uint8_t* const bytes = scratch<uint8_t>(size_.inputs);
    ranges_[row] =
        round_row(from, layer, product_.factors + expert * product_.factor_stride, bytes);
    take_apart<Fours>(bytes, depth_, words_ + row * stride_);
  }
  const uint32_t* at(int64_t expert, int64_t panel) const {
    return static_cast<const uint32_t*>(product_.panels) +
           (expert * size_.panels + panel) * depth_ * kPanel;
  }
  template <class Store>
  void multiply(Unit& unit, const ExpertSpan& span, int64_t panel, const uint32_t* ahead,
                Store store) const {
    const int64_t padded = size_.panels * kPanel;
    const float* scales = product_.scales + 2 * span.expert * padded + panel * kPanel;
    const Rows rows{words_ + span.first * stride_, span.count, stride_};
    unit.run(rows, at(span.expert, panel), depth_, ahead, [&](int64_t i, const Ints* sums) {
      Floats values[kPanelVectors];
      to_floats(sums, ranges_[span.first + i], scales, scales + padded, values);
      store(i, values);
    });
  }

 private:
  const ExpertProduct& product_;
  Size size_;
  int64_t depth_, stride_;
  uint32_t* words_;
  Range* ranges_;
};

template <class NumberKind>
class NibbleProducts {
 public:
  using Element = uint16_t;
  struct Unit {};
  static int64_t row_bytes(int64_t inputs) { return inputs * sizeof(Element); }

  NibbleProducts(const ExpertProduct& product, Size size, int64_t rows, int64_t most)
      : panels_(static_cast<const uint8_t*>(product.panels)), size_(size), rows_(rows),
        groups_(size.inputs / kGroupInputs), stride_(size.inputs / 2),
        words_(scratch<uint32_t>(rows * row_bytes(most) / sizeof(uint32_t))),
        sums_(scratch<float>(2 * rows * most / kGroupInputs)) {}

  void prepare(int64_t row, int64_t, const uint16_t* from) const {
    uint32_t* const words = words_ + row * stride_;
    if (!kRoundsRows) std::memcpy(words, from, stride_ * sizeof *words);
    prepare_groups(from, groups_, words, sums_ + row * groups_, steps() + row * groups_);
  }
  const uint8_t* at(int64_t expert, int64_t panel) const {
    return panels_ + (expert * size_.panels + panel) * groups_ * GroupOf<NumberKind>::kBytes;
  }
  template <class Store>
  void multiply(Unit&, const ExpertSpan& span, int64_t panel, const uint8_t* ahead,
                Store store) const {
    const uint8_t* weights = at(span.expert, panel);
    const int64_t parts = (span.count + kFewRows - 1) / kFewRows;
    for (int64_t part = 0; part < parts; part++) {
      const int64_t first = span.count * part / parts, row = span.first + first;
      const int count = span.count * (part + 1) / parts - first;
      const GroupedRows few{words_ + row * stride_, stride_, sums_ + row * groups_,
                    steps() + row * groups_, groups_};
      multiply_few<NumberKind>(count, few, weights, part == 0 ? ahead : weights,
                   [&](int i, const Floats* values) { store(first + i, values); });
    }
  }

 private:
  float* steps() const { return sums_ + rows_ * groups_; }

  const uint8_t* panels_;
  Size size_;
  int64_t rows_, groups_, stride_;
  uint32_t* words_;
  float* sums_;
};

// Converts elements of the layer's type to and from vectors.
inline void put(uint16_t* to, int64_t count, Floats values) {
  store_first(to, count, BFloat16::narrow(values));
}
inline void put(float* to, int64_t count, Floats values) { store_first(to, count, values); }

template <class Products>
class Mixture {
 public:
  using Element = typename Products::Element;

  Mixture(const ExpertsLayer& layer, const Element* x, int64_t row_stride, Element* y)
      : layer_(layer), x_(x), row_stride_(row_stride), y_(y),
        up_size_{layer.hidden, panels(layer.inner, layer.activation.gated)},
        down_size_{layer.inner, panels(layer.hidden, false)} {}

  void run(const Routing& routing, int threads) const {
    const int64_t pair_bytes = Products::row_bytes(most_inputs()) + layer_.inner * sizeof(Element);
    const int64_t most = std::max<int64_t>(1, kMostBytes / pair_bytes / routing.chosen);
    for (int64_t begin = 0; begin < routing.rows; begin += most)
      run_slice(routing, begin, std::min(begin + most, routing.rows), threads);
  }

 private:
  static int64_t panels(int64_t outputs, bool gated) {
    const int64_t width = gated ? kLanes : kPanel;
    return (outputs + width - 1) / width;
  }

  int64_t most_inputs() const { return std::max(layer_.hidden, layer_.inner); }

  void run_slice(const Routing& routing, int64_t begin, int64_t end, int threads) const {
    const Sorted sorted(routing, begin, end, layer_.experts);
    Element* const inner = scratch<Element>(sorted.count() * layer_.inner);
    const Products up(layer_.up, up_size_, sorted.count(), most_inputs());
    const Products down(layer_.down, down_size_, sorted.count(), most_inputs());
    std::atomic<int64_t> free_up{0}, free_down{0};
#pragma omp parallel num_threads(threads)
    {
      typename Products::Unit unit;
#pragma omp for
      for (int64_t i = 0; i < sorted.count(); i++)
        up.prepare(i, sorted.experts[i], x_ + sorted.rows[i] * row_stride_);
      multiply_up(up, unit, sorted, free_up, inner);
#pragma omp barrier
#pragma omp for
      for (int64_t i = 0; i < sorted.count(); i++)
        down.prepare(i, sorted.experts[i], inner + i * layer_.inner);
      multiply_down(down, unit, sorted, free_down, begin, end);
    }
  }

  // The next free thread takes the next panel of an expert.
  void multiply_up(const Products& up, typename Products::Unit& unit, const Sorted& sorted,
                   std::atomic<int64_t>& free, Element* inner) const {
    const int64_t panels = up_size_.panels, items = sorted.spans.size() * panels;
    for (int64_t item = free++, next; item < items; item = next) {
      next = free++;
      const int64_t after = std::min(next, items - 1), panel = item % panels;
      const ExpertSpan& span = sorted.spans[item / panels];
      const float* bias = layer_.up.bias + (span.expert * panels + panel) * kPanel;
      const Floats left = load<Floats>(bias), right = load<Floats>(bias + kLanes);
      up.multiply(unit, span, panel, up.at(sorted.spans[after / panels].expert, after % panels),
                  [&](int64_t i, const Floats* sums) {
                    store_inner(inner + (span.first + i) * layer_.inner, panel, sums[0] + left,
                                sums[1] + right);
                  });
    }
  }

  void store_inner(Element* row, int64_t panel, Floats left, Floats right) const {
    const ExpertActivation& activation = layer_.activation;
    if (activation.gated)
      return put_inner(row, panel * kLanes, activate_gated(left, right, activation));
    put_inner(row, panel * kPanel, activate(left, activation.kind, activation.alpha));
    put_inner(row, panel * kPanel + kLanes, activate(right, activation.kind, activation.alpha));
  }
  void put_inner(Element* row, int64_t column, Floats values) const {
    if (column < layer_.inner) put(row + column, layer_.inner - column, values);
  }

  // The next free thread takes the next panel of all experts.
  void multiply_down(const Products& down, typename Products::Unit& unit, const Sorted& sorted,
                     std::atomic<int64_t>& free, int64_t begin, int64_t end) const {
    const int64_t panels = down_size_.panels;
    Floats* const total = scratch<Floats>((end - begin) * kPanelVectors);
    for (int64_t panel = free++, next; panel < panels; panel = next) {
      next = free++;
      std::fill_n(total, (end - begin) * kPanelVectors, Floats{});
      for (size_t i = 0; i < sorted.spans.size(); i++) {
        const ExpertSpan& span = sorted.spans[i];
        const bool last = i + 1 == sorted.spans.size();
        const int64_t after = last ? std::min(next, panels - 1) : panel;
        add_expert(down, unit, sorted, span, panel,
                   down.at(sorted.spans[last ? 0 : i + 1].expert, after), begin, total);
      }
      for (int64_t row = begin; row < end; row++)
        for (int j = 0; j < kPanelVectors; j++) {
          const int64_t column = panel * kPanel + j * kLanes;
          if (column < layer_.hidden)
            put(y_ + row * layer_.hidden + column, layer_.hidden - column,
                total[(row - begin) * kPanelVectors + j]);
        }
    }
  }

  // Adds an expert's weighted outputs of a panel to the sums of its rows.
  template <class Ahead>
  void add_expert(const Products& down, typename Products::Unit& unit, const Sorted& sorted,
                  const ExpertSpan& span, int64_t panel, Ahead ahead, int64_t begin,
                  Floats* total) const {
    const float* bias = layer_.down.bias + (span.expert * down_size_.panels + panel) * kPanel;
    down.multiply(unit, span, panel, ahead, [&](int64_t i, const Floats* sums) {
      const int64_t pair = span.first + i;
      Floats* const row_sums = total + (sorted.rows[pair] - begin) * kPanelVectors;
      for (int j = 0; j < kPanelVectors; j++)
        row_sums[j] += sorted.weights[pair] * (sums[j] + load<Floats>(bias + j * kLanes));
    });
  }

  const ExpertsLayer& layer_;
  const Element* x_;
  int64_t row_stride_;
  Element* y_;
  Size up_size_, down_size_;
};

template <class Products>
void mix(const void* x, int64_t row_stride, const Routing& routing, const ExpertsLayer& layer,
         void* y, int threads) {
  using Element = typename Products::Element;
  Mixture<Products>(layer, static_cast<const Element*>(x), row_stride, static_cast<Element*>(y))
      .run(routing, threads);
}

thread_local const ForcedExperts* forced = nullptr;  // of the next calls
thread_local int64_t forced_left = 0;

// A call's routing, or the one forced on it. A call that cannot be forced keeps its own, and does
// not count.
class CallRouting {
 public:
  explicit CallRouting(const Routing& call) : routing_(call) {
    if (forced_left == 0) return;
    if (call.chosen != forced->chosen || forced->first + forced->rows > call.rows) return;
    experts_ = gathered(call.experts, call.expert_strides);
    weights_ = gathered(call.weights, call.weight_strides);
    exchange(experts_, forced->experts, forced->own_experts);
    exchange(weights_, forced->weights, forced->own_weights);
    routing_ = {experts_.data(), {call.chosen, 1}, weights_.data(), {call.chosen, 1},
                call.rows, call.chosen};
    forced++;
    forced_left--;
  }
  const Routing& routing() const { return routing_; }

 private:
  template <class T>
  std::vector<T> gathered(const T* from, const int64_t* strides) const {
    std::vector<T> values;
    for (int64_t row = 0; row < routing_.rows; row++)
      for (int64_t i = 0; i < routing_.chosen; i++)
        values.push_back(from[row * strides[0] + i * strides[1]]);
    return values;
  }
  template <class T>
  static void exchange(std::vector<T>& values, const T* instead, T* computed) {
    const int64_t count = forced->rows * forced->chosen;
    T* const first = values.data() + forced->first * forced->chosen;
    std::copy_n(first, count, computed);
    std::copy_n(instead, count, first);
  }

  Routing routing_;
  std::vector<int64_t> experts_;
  std::vector<float> weights_;
};

// One product of experts.
ExpertProduct expert_product(const View& panels, const View& bias, const View* factors,
                             const View* scales) {
  ExpertProduct product{panels.data, bias.as<float>(), nullptr, 0, nullptr};
  if (factors && scales) {
    product.factors = factors->as<float>();
    product.factor_stride = factors->sizes[0] > 1 ? factors->strides[0] : 0;
    product.scales = scales->as<float>();
  }
  return product;
}

// Returns the ExpertWeights of a packed dtype; in 4 bits, of a group's bytes.
int expert_weights(const View& panels) {
  if (panels.is_float32()) return kFloat32;
  if (panels.dtype == aoti_torch_dtype_bfloat16()) return kBFloat16;
  if (panels.dtype == aoti_torch_dtype_int8()) return kInt8;
  return panels.sizes[3] == GroupOf<E2m1>::kBytes ? kE2m1 : kInt4;
}

// The number of inputs of packed weights.
int64_t expert_inputs(const View& panels) {
  constexpr int64_t kOfWord[] = {1, 2, 4};
  const int weights = expert_weights(panels);
  return panels.sizes[2] * (weights >= kInt4 ? kGroupInputs : kOfWord[weights]);
}

// The sum of each row's weighted experts; an expert is down(activation(up(x))). x and the result are
// float32 with weights in float32, else bfloat16. Sizes of rows must be a multiple of 4, or of a
// group with weights in 4 bits.
void packed_experts(const Result& result, const View& x, const View& expert_ids,
                    const View& weights, const View& up, const View& up_bias, const View& down,
                    const View& down_bias, int64_t activation, int64_t gated, double alpha,
                    double limit, double offset, const View* up_factors, const View* up_scales,
                    const View* down_factors, const View* down_scales) {
  const Stopwatch stopwatch(spent.linear);
  require(x.has_whole_rows(), "rows must be contiguous");
  require(x.dtype == (up.is_float32() ? up.dtype : aoti_torch_dtype_bfloat16()) &&
              weights.is_float32(),
          "rows must have the experts' type, and weights of experts be float32");
  const CallRouting routing({expert_ids.as<int64_t>(),
                             {expert_ids.strides[0], expert_ids.strides[1]},
                             weights.as<float>(),
                             {weights.strides[0], weights.strides[1]},
                             expert_ids.sizes[0],
                             expert_ids.sizes[1]});
  const ExpertsLayer layer{up.sizes[0],
                           x.sizes[1],
                           expert_inputs(down),
                           expert_product(up, up_bias, up_factors, up_scales),
                           expert_product(down, down_bias, down_factors, down_scales),
                           {static_cast<int>(activation), gated != 0, static_cast<float>(alpha),
                            static_cast<float>(limit), static_cast<float>(offset)}};
  void* const out = result.make({x.sizes[0], x.sizes[1]}, x.dtype);
  const auto run = [&](auto mix) {
    mix(x.data, x.strides[0], routing.routing(), layer, out, num_threads());
  };
  switch (expert_weights(up)) {
    case kFloat32: return run(mix<WordProducts<Singles, float>>);
    case kBFloat16: return run(mix<WordProducts<Pairs, uint16_t>>);
    case kInt8: return run(mix<ByteProducts>);
    case kInt4: return run(mix<NibbleProducts<Int4>>);
    case kE2m1: return run(mix<NibbleProducts<E2m1>>);
  }
}
OCTAVO_OPERATOR(packed_experts)

}  // namespace

// Forces routings on this thread's next `count` calls, which the arrays must outlive. Returns the
// number of calls that the previous forcing has left.
extern "C" int64_t octavo_force_experts(const ForcedExperts* calls, int64_t count) {
  const int64_t left = forced_left;
  forced = calls;
  forced_left = count;
  return left;
}
