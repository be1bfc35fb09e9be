// Calls the kernels as Python does, for CPUs that only an emulator has here: writes keys and
// values, attends, rotates, draws, and compares with plain loops. Exits with 1 if they differ.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "operators.h"

extern "C" {
void octavo_set_step(const Step* within);
const char* octavo_call(const char* name, const int64_t* words, const View* views, View* made);
}

namespace {

constexpr int kTokens = 77, kKvHeads = 2, kGroup = 3, kBlock = 16, kChunk = 70, kThreads = 2;
constexpr int kHeads = kKvHeads * kGroup, kBlocks = (kTokens + kBlock - 1) / kBlock;

int failures = 0;

void expect(const char* what, double found, double expected, double tolerance) {
  if (std::abs(found - expected) <= tolerance * (1 + std::abs(expected))) return;
  if (failures++ < 10) std::printf("%s: %g, not %g\n", what, found, expected);
}

// Numbers as a type stores them, and as it reads them.
template <class T>
struct Numbers {
  std::vector<typename T::Stored> stored;
  std::vector<float> values;

  Numbers(int64_t count, std::mt19937& random) {
    std::normal_distribution<float> draw;
    values.resize((count + kLanes - 1) / kLanes * kLanes);
    stored.resize(values.size());
    for (float& value : values) value = draw(random);
    for (size_t i = 0; i < values.size(); i += kLanes) {
      T::store_floats(&stored[i], load<Floats>(&values[i]));
      store(&values[i], T::load_floats(&stored[i]));
    }
  }
};

// A tensor's rows.
template <class T>
View rows(const std::vector<T>& values, int64_t count, int32_t dtype = 0) {
  const int64_t width = values.size() / count;
  return {const_cast<T*>(values.data()), dtype, 2, {count, width}, {width, 1}};
}

// A contiguous tensor of tokens' heads.
template <class T>
View heads(const std::vector<T>& values, int heads, int dim, int32_t dtype) {
  return {const_cast<T*>(values.data()), dtype, 3, {kTokens, heads, dim}, {heads * dim, dim, 1}};
}

// Calls an operator of tensors, and of the numbers among `words`; returns its result, which lives
// until the next call.
View call(const char* name, const std::vector<View>& views, std::vector<int64_t> words = {}) {
  if (words.empty())
    while (words.size() < views.size()) words.push_back(words.size());
  View made{};
  const char* const problem = octavo_call(name, words.data(), views.data(), &made);
  expect(problem ? problem : name, problem != nullptr, 0, 0);
  return made;
}

int64_t bits(double number) {
  int64_t word;
  std::memcpy(&word, &number, sizeof word);
  return word;
}

// Rotates each head of `x`, [tokens][heads][dim], by its token's angles.
std::vector<float> rotated(std::vector<float> x, int heads, int dim, const std::vector<float>& cos,
                           const std::vector<float>& sin) {
  for (int row = 0; row < kTokens * heads; row++)
    for (int i = 0; i < dim / 2; i++) {
      float &low = x[row * dim + i], &high = x[row * dim + dim / 2 + i];
      const int angle = row / heads * dim + i;
      const float l = low, h = high;
      low = l * cos[angle] - h * sin[angle];
      high = h * cos[angle] + l * sin[angle];
    }
  return x;
}

// Returns the number that is stored as fp8 for `x`, by looking at all but the subnormal ones.
float nearest(float x, float scale, Fp8 type) {
  const Fp8Format& format = format_of(type);
  const int steps = 1 << format.mantissa_bits;
  float best = 0;
  double least = std::abs(double(x) / scale);
  for (int code = steps; code < 127; code++) {
    const float value = std::ldexp(float(steps + code % steps),
                                   code / steps - format.bias - format.mantissa_bits);
    const double away = std::abs(double(value) - std::abs(x / scale));
    if (value > format.greatest || away > least || (away == least && code % 2)) continue;
    best = value, least = away;
  }
  return std::copysign(best, x) * scale;
}

// Rounds each head of `x`, [tokens][heads][dim], to codes and back.
void round_to_codes(std::vector<float>& x, int dim, bool keys) {
  for (size_t at = 0; at + dim <= x.size(); at += dim) {
    Coded coded;
    std::vector<float> head(&x[at], &x[at + dim]), made(dim);
    head.resize(dim + kLanes);
    encode(head.data(), dim, keys, coded);
    for (int i = 0; i < dim; i++) made[i] = from_bfloat16(coded.scale) * coded.codes[i];
    if (keys) spread(made.data(), dim);
    for (int i = 0; i < dim; i++) {
      expect("a code", made[i], x[at + i], 0.05);
      x[at + i] = made[i];
    }
  }
}

// One sequence whose last token's query, and all others', attend to all that is before them in their
// chunk. If `latent`, the first elements of keys are values. In an fp8 cache, keys are not rotated, so
// that each is rounded once.
template <class T>
void check_attention(int dtype, int dim, int value_dim, bool latent, double tolerance,
                     Fp8 fp8 = kNotFp8, bool in_codes = false) {
  std::mt19937 random(dim);
  const Numbers<T> q(kTokens * kHeads * dim, random), k(kTokens * kKvHeads * dim, random),
      v(kTokens * kKvHeads * value_dim, random);
  std::vector<float> cos(kTokens * dim), sin(kTokens * dim);
  const double turn = fp8 || in_codes ? 0 : .1;
  for (int i = 0; i < kTokens * dim; i++) cos[i] = std::cos(turn * i), sin[i] = std::sin(turn * i);
  const auto width = [=](int dim) { return in_codes ? dim + kScaleBytes : dim; };
  const int64_t of_keys = int64_t(kKvHeads) * kBlock * width(dim),
                of_block = of_keys + (latent ? 0 : int64_t(kKvHeads) * kBlock * width(value_dim));
  std::vector<typename T::Stored> memory(kBlocks * of_block), queries(kTokens * kHeads * dim),
      out(kTokens * kHeads * value_dim + kLanes);
  std::vector<int64_t> slots(kTokens);
  std::vector<int32_t> table(kBlocks);
  for (int block = 0; block < kBlocks; block++) table[block] = (block * 3 + 1) % kBlocks;
  for (int i = 0; i < kTokens; i++) slots[i] = table[i / kBlock] * kBlock + i % kBlock;
  const float key_scale = fp8 ? .37f : 1, value_scale = !fp8 ? 1 : latent ? key_scale : .011f;
  char* const values =
      reinterpret_cast<char*>(memory.data()) + of_keys * (fp8 || in_codes ? 1 : sizeof memory[0]);
  const Cache cache{memory.data(), latent ? nullptr : values,
                    of_block,      of_block,
                    kBlocks,       kKvHeads,
                    dim,           latent ? 0 : value_dim,
                    kBlock,        dtype,
                    fp8,           key_scale,
                    value_scale,   in_codes};
  const int32_t starts[] = {0, kTokens}, lengths[] = {kTokens}, group = 0, written = 0;
  const Batch batch{starts, lengths, table.data(), kBlocks, kBlocks, 1, slots.data(), kTokens};
  const Step own{&cache, &group, &written, nullptr, &batch};
  octavo_set_step(&own);
  const int32_t float32 = aoti_torch_dtype_float32();
  const int32_t number = dtype == 0   ? float32
                         : dtype == 1 ? aoti_torch_dtype_float16()
                                      : aoti_torch_dtype_bfloat16();
  const View angles[] = {rows(cos, kTokens, float32), rows(sin, kTokens, float32)};
  const View turned =
      call("rotate_and_write",
           {heads(q.stored, kHeads, dim, number), heads(k.stored, kKvHeads, dim, number),
            heads(v.stored, kKvHeads, value_dim, number), angles[0], angles[1]},
           {0, 1, 2, 3, 4, 0});
  using Stored = typename T::Stored;
  std::copy_n(turned.as<Stored>(), kTokens * kHeads * dim, queries.begin());
  const float scale = 1 / std::sqrt(float(dim));
  std::vector<float> sinks(kHeads);
  for (float& sink : sinks) sink = std::normal_distribution<float>()(random);
  const View attended =
      call("attend", {heads(queries, kHeads, dim, number), rows(sinks, 1, float32)},
           {0, value_dim, 0, bits(scale), 0, bits(0), kChunk, 1, -1});
  std::copy_n(attended.as<Stored>(), kTokens * kHeads * value_dim, out.begin());
  const auto query = rotated(q.values, kHeads, dim, cos, sin);
  auto key = rotated(k.values, kKvHeads, dim, cos, sin), value = v.values;
  if (fp8) {
    for (float& x : key) x = nearest(x, key_scale, fp8);
    for (float& x : value) x = nearest(x, value_scale, fp8);
  }
  if (in_codes) {
    round_to_codes(key, dim, true);
    round_to_codes(value, value_dim, false);
  }
  for (int token = 0; token < kTokens; token++)
    for (int head = 0; head < kHeads; head++) {
      std::vector<double> weights(token + 1), expected(value_dim + kLanes);
      double total = std::exp(double(sinks[head]));
      for (int at = token - token % kChunk; at <= token; at++) {
        double dot = 0;
        for (int i = 0; i < dim; i++)
          dot += double(query[(token * kHeads + head) * dim + i]) *
                 key[(at * kKvHeads + head / kGroup) * dim + i];
        total += weights[at] = std::exp(dot * scale);
      }
      for (int at = 0; at <= token; at++)
        for (int i = 0; i < value_dim; i++) {
          const int place = at * kKvHeads + head / kGroup;
          expected[i] += weights[at] / total *
                         (latent ? key[place * dim + i] : value[place * value_dim + i]);
        }
      for (int i = 0; i < value_dim; i += kLanes) {
        const Floats found = T::load_floats(&out[(token * kHeads + head) * value_dim + i]);
        for (int lane = 0; lane < kLanes && i + lane < value_dim; lane++)
          expect("attention", found[lane], expected[i + lane], tolerance);
      }
    }
}

void check_tokens() {
  constexpr int kRows = 3, kColumns = 1003;
  std::mt19937 random(1);
  const Numbers<Float32> logits(kRows * kColumns, random);
  const std::vector<double> ones(kRows, 1), greedy(kRows), least(kRows), uniforms{.1, .5, .9};
  const std::vector<int64_t> few(kRows, 1), any{5, 6, 7};
  std::vector<int64_t> places(kRows), drawn(kRows), top(kRows);
  std::vector<float> logprobs(kRows), top_logprobs(kRows);
  const std::vector<float> given(logits.stored.begin(), logits.stored.begin() + kRows * kColumns);
  const View own_rows = rows(given, kRows, aoti_torch_dtype_float32());
  call("argmax", {own_rows, rows(places, 1)});
  for (const auto& temperatures : {greedy, ones}) {  // of top-k 1, the same
    call("draw_tokens", {own_rows, rows(temperatures, 1), rows(few, 1), rows(ones, 1),
                         rows(least, 1), rows(uniforms, 1), rows(drawn, 1)});
    for (int row = 0; row < kRows; row++) expect("a draw", drawn[row], places[row], 0);
  }
  call("score_tokens",
       {own_rows, rows(any, 1), rows(logprobs, 1), rows(top, kRows), rows(top_logprobs, kRows)});
  for (int row = 0; row < kRows; row++) {
    const float* own = &logits.values[row * kColumns];
    double total = 0;
    for (int i = 0; i < kColumns; i++) total += std::exp(double(own[i]));
    expect("the greatest", top[row], std::max_element(own, own + kColumns) - own, 0);
    expect("its place", places[row], top[row], 0);
    expect("a score", logprobs[row], own[any[row]] - std::log(total), 1e-5);
  }
  std::vector<float> masked = given;
  const int64_t last = kRows - 1, words = (kColumns + 31) / 32;
  const std::vector<int64_t> chosen{last};
  std::vector<uint32_t> mask(words);
  for (uint32_t& word : mask) word = random();
  call("mask_logits",
       {rows(masked, kRows, aoti_torch_dtype_float32()), {const_cast<int64_t*>(chosen.data()), 0, 1,
        {1}, {1}}, rows(mask, 1)});
  for (int i = 0; i < kRows * kColumns; i++) {
    const int token = i % kColumns;
    const bool allowed = i / kColumns < last || mask[token / 32] >> token % 32 & 1;
    expect("a masked logit", masked[i] == (allowed ? logits.stored[i] : -INFINITY), 1, 0);
  }
}

}  // namespace

int main() {
  struct Widths {
    int key, value;
    bool latent;
  };
  for (const auto [key, value, latent] :
       {Widths{32, 32, false}, {64, 64, false}, {80, 24, false}, {8, 136, false}, {72, 40, true}}) {
    check_attention<Float32>(0, key, value, latent, 2e-5);
    check_attention<Float16>(1, key, value, latent, 3e-3);
    check_attention<BFloat16>(2, key, value, latent, 2e-2);
  }
  for (const bool latent : {false, true}) {
    check_attention<Float32>(0, 64, 48, latent, 2e-5, kE4M3);
    check_attention<Float16>(1, 72, 64, latent, 3e-3, kE5M2);
    check_attention<BFloat16>(2, 64, 64, latent, 2e-2, kE4M3);
    check_attention<BFloat16>(2, 64, 64, latent, 2e-2, kE5M2);
  }
  check_attention<Float32>(0, 64, 48, false, 1e-3, kNotFp8, true);
  check_attention<Float16>(1, 72, 40, false, 3e-3, kNotFp8, true);
  check_attention<BFloat16>(2, 64, 64, false, 2e-2, kNotFp8, true);
  check_tokens();
  std::printf("%d lanes, %d failures\n", kLanes, failures);
  return failures != 0;
}
