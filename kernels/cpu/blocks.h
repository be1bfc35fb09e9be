// Weights in GGUF's block formats: dequantizes them and multiplies rows by them.
//
// A block has 32 weights of an output, in codes of 4, 5, 6 or 8 bits. A unit is one block, or eight
// in a "K" format: they share a float16 scale, and each has a small integer factor of it. blocks.py
// rearranges the file's bits for the kernels without changing them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "linear.h"
#include "prepare_rows.h"
#include "streams.h"

constexpr int kBlock = 32;                  // inputs
constexpr int kBlockWords = kBlock / 4;     // four codes each
#if defined(__AVX512F__)
constexpr int kTileBlockRows = 6;           // 4 sums each fit in registers
#else
constexpr int kTileBlockRows = 4;
#endif
typedef int8_t SignedBytes __attribute__((vector_size(kLanes)));

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__)) || \
    defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kSignedCodes = false;  // the instruction takes unsigned codes
#else
constexpr bool kSignedCodes = true;
#endif

// A format. A weight is (code - offset) * scale, or code * scale + zero if it has a minimum.
template <int kBits_, bool kSuper_, bool kHasMin_>
struct Blocks {
  static constexpr int kBits = kBits_;
  static constexpr bool kSuper = kSuper_, kHasMin = kHasMin_;
  static constexpr int kGroup = kBits == 6 ? 16 : kBlock;  // inputs that share a scale
  static constexpr int kGroups = kBlock / kGroup;          // of a block
  static constexpr int kGroupWords = kGroup / 4;
  static constexpr int kUnitBlocks = kSuper ? 8 : 1;
  // 8-bit codes are signed in the file.
  static constexpr bool kSigned = kBits == 8 && kSignedCodes;
  static constexpr float kOffset = kHasMin || kSigned ? 0 : 1 << (kBits - 1);

  // Whether products of a few rows stream panels: on a Zen 4 this takes 6 to 27% less time, but up
  // to 36% more with the other formats.
  static constexpr bool kStreams = kBits == 4 || (kBits == 5 && kSuper);

  // Sizes of a panel's unit, in bytes: the scales and minima in float16, then the blocks. A block
  // has its integer factors, one byte each, then kBits vectors for each of the panel's vectors of
  // outputs.
  static constexpr int kUnitScales = (1 + kHasMin) * kPanel * 2;
  static constexpr int kBlockScales = kSuper ? (kGroups + kHasMin) * kPanel : 0;
  static constexpr int kBlockBytes = kBlockScales + kBits * kPanel * 4;
  static constexpr int kUnitBytes = kUnitScales + kUnitBlocks * kBlockBytes;

  // The codes of inputs 4 t to 4 t + 3 of the outputs of vector j.
  static Words codes(const uint8_t* block, int j, int t) {
    const uint8_t* from = block + kBlockScales + j * kBits * sizeof(Words);
    const auto lanes = [=](int v) { return load<Words>(from + v * sizeof(Words)); };
    if constexpr (kBits == 8) return kSigned ? lanes(t) : lanes(t) ^ 0x80808080;
    // The low bits of words t and t + 4 are in the halves of the same bytes.
    const Words low = (lanes(t % 4) >> (t < 4 ? 0 : 4)) & 0x0f0f0f0f;
    if constexpr (kBits == 5) {  // bit t of a byte belongs to word t
      const Words high = lanes(4);
      return low | ((t < 4 ? high << (4 - t) : high >> (t - 4)) & 0x10101010);
    }
    if constexpr (kBits == 6) {  // bits 2 t and 2 t + 1
      const Words high = lanes(4 + t / 4);
      const int shift = 2 * (t % 4);
      return low | ((shift < 4 ? high << (4 - shift) : high >> (shift - 4)) & 0x30303030);
    }
    return low;
  }

  struct Scaling {
    Floats scale, zero;
  };

  // Returns the factor and the addend of a group's codes for the outputs of vector j.
  static Scaling scaling(const uint8_t* unit, const uint8_t* block, int group, int j) {
    const auto* halves = reinterpret_cast<const uint16_t*>(unit) + j * kLanes;
    const uint8_t* bytes = block + j * kLanes;
    Floats scale = Float16::load_floats(halves);
    if constexpr (kSuper) scale *= whole(bytes + group * kPanel);
    if constexpr (!kHasMin) return {scale, scale * -kOffset};
    const Floats least = Float16::load_floats(halves + kPanel);
    if constexpr (!kSuper) return {scale, least};
    return {scale, -least * whole(bytes + kGroups * kPanel)};
  }

 private:
  static Floats whole(const uint8_t* from) {
    if constexpr (kBits == 6)
      return __builtin_convertvector(__builtin_convertvector(load<SignedBytes>(from), Ints),
                                     Floats);
    else
      return __builtin_convertvector(__builtin_convertvector(load<Bytes>(from), Ints), Floats);
  }
};

// Calls function(K{}) with the format of a number; the numbers are those of blocks.py.
template <class Function>
void with_format(int64_t number, Function function) {
  switch (number) {
    case 0: return function(Blocks<4, false, false>{});  // Q4_0
    case 1: return function(Blocks<4, false, true>{});   // Q4_1
    case 2: return function(Blocks<5, false, false>{});  // Q5_0
    case 3: return function(Blocks<5, false, true>{});   // Q5_1
    case 4: return function(Blocks<8, false, false>{});  // Q8_0
    case 5: return function(Blocks<4, true, true>{});    // Q4_K
    case 6: return function(Blocks<5, true, true>{});    // Q5_K
    case 7: return function(Blocks<6, true, false>{});   // Q6_K
  }
}

// Products of codes with rows that are rounded to bytes.

// Products by instructions that sum the four bytes of a word.
struct WholeSum {
  static constexpr int kParts = 1;
  static constexpr int kMostWords = kBlockWords;

  void add(Words codes, Words row) {
#if defined(__AVX512VNNI__)
    total = (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, (__m512i)row);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    total = (Ints)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)codes, (__m256i)row);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    total = (Ints)vusdotq_s32((int32x4_t)total, (uint8x16_t)codes, (int8x16_t)row);
#elif defined(__ARM_FEATURE_DOTPROD)
    total = (Ints)vdotq_s32((int32x4_t)total, (int8x16_t)codes, (int8x16_t)row);
#endif
  }
  void flush() {}

  Ints total{};
};

// Products in 16 bits, of the even bytes, then of the odd bytes.
struct SplitSum {
  static constexpr int kParts = 2;
  static constexpr int kMostWords = kBlockWords;

  void add(Words codes, Words row, int part) {
    total = add_products(total, row, split(codes, part));
  }
  void flush() {}
  template <class T>
  static T split(T bytes, int part) {
    return (T)((part == 0 ? (Shorts)bytes << 8 : (Shorts)bytes) >> 8);
  }

  Ints total{};
};

#if defined(__AVX2__)
// Sums in 16 bits of products of byte pairs, over at most `kMost` words, so that none saturates.
template <int kMost>
struct PairSum {
  static constexpr int kParts = 1;
  static constexpr int kMostWords = kMost;

  void add(Words codes, Words row) {
#if defined(__AVX512BW__)
    sums += (Shorts)_mm512_maddubs_epi16((__m512i)codes, (__m512i)row);
#elif !defined(__AVX512F__)
    sums += (Shorts)_mm256_maddubs_epi16((__m256i)codes, (__m256i)row);
#endif
  }
  void flush() {
    total = add_products(total, (Words)sums, broadcast(uint32_t{0x00010001}));
    sums = Shorts{};
  }

  Shorts sums{};
  Ints total{};
};
#endif

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__)) || \
    defined(__ARM_FEATURE_MATMUL_INT8) || defined(__ARM_FEATURE_DOTPROD)
template <class K>
using CodeSum = WholeSum;
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
// 2 * 127 * (2^bits - 1) * words must be below 2^15.
template <class K>
using CodeSum = std::conditional_t<K::kBits == 8, SplitSum, PairSum<(128 >> K::kBits)>>;
#else
template <class K>
using CodeSum = SplitSum;
#endif

// Rounds a group of a row to signed bytes; returns the step size. `sum` gets the sum of the rounded
// inputs.
template <int kGroup>
float round_to_bytes(const uint16_t* from, int8_t* bytes, float* sum) {
  Floats magnitudes{}, total{};
  for (int i = 0; i < kGroup; i += kLanes) {
    const Floats x = BFloat16::load_floats(from + i);
    magnitudes = max(magnitudes, max(x, -x));
  }
  const float step = std::max(reduce_max(magnitudes) / 127, 1e-30f);
  for (int i = 0; i < kGroup; i += kLanes) {
    const Ints whole = round_to_ints(BFloat16::load_floats(from + i) * (1 / step));
    store(bytes + i, __builtin_convertvector(whole, SignedBytes));
    total += __builtin_convertvector(whole, Floats);
  }
  *sum = reduce_add(total) * step;
  return step;
}

// Prepares a row of `groups` groups.
template <class K>
void prepare_row(const uint16_t* from, int64_t groups, uint32_t* words, float* sums,
                 float* steps) {
  constexpr int kParts = CodeSum<K>::kParts;
  for (int64_t group = 0; group < groups; group++) {
    int8_t bytes[K::kGroup];
    steps[group] = round_to_bytes<K::kGroup>(from + group * K::kGroup, bytes, sums + group);
    uint32_t* group_words = words + group * K::kGroupWords * kParts;
    if constexpr (kParts == 1) {
      std::memcpy(group_words, bytes, sizeof bytes);
    } else {
      for (int k = 0; k < K::kGroup; k++)
        reinterpret_cast<int16_t*>(group_words)[k / 4 * 4 + k % 2 * 2 + k % 4 / 2] = bytes[k];
    }
  }
}

template <class K, Locality kLocality, int kRows, class Store>
void multiply_units(const GroupedRows& few, const uint8_t* panel, const uint8_t* ahead, Store store) {
  using Sum = CodeSum<K>;
  Floats total[kRows][kPanelVectors] = {};
  int64_t number = 0;  // of the group
  for (int64_t unit = 0; number < few.groups; unit++) {
    const uint8_t* const scales = panel + unit * K::kUnitBytes;
    for (int b = 0; b < K::kUnitBlocks; b++) {
      const uint8_t* const block = scales + K::kUnitScales + b * K::kBlockBytes;
      for (int line = 0; line < K::kBlockBytes; line += 64)
        __builtin_prefetch(ahead + (block - panel) + line, 0, kLocality);
#pragma GCC unroll 2
      for (int group = 0; group < K::kGroups; group++, number++) {
        Sum sums[kRows][kPanelVectors];
#pragma GCC unroll 8
        for (int k = 0; k < K::kGroupWords; k++) {
          Words codes[kPanelVectors];
#pragma GCC unroll 2
          for (int j = 0; j < kPanelVectors; j++)
            codes[j] = K::codes(block, j, group * K::kGroupWords + k);
#pragma GCC unroll 2
          for (int part = 0; part < Sum::kParts; part++) {
#pragma GCC unroll 6
            for (int i = 0; i < kRows; i++) {
              const Words element = broadcast(
                  few.words[i * few.stride + (number * K::kGroupWords + k) * Sum::kParts + part]);
#pragma GCC unroll 2
              for (int j = 0; j < kPanelVectors; j++) {
                if constexpr (Sum::kParts == 2) sums[i][j].add(codes[j], element, part);
                else sums[i][j].add(codes[j], element);
              }
            }
          }
          if ((k + 1) % Sum::kMostWords == 0 || k + 1 == K::kGroupWords) {
#pragma GCC unroll 4
            for (int i = 0; i < kRows; i++)
#pragma GCC unroll 2
              for (int j = 0; j < kPanelVectors; j++) sums[i][j].flush();
          }
        }
#pragma GCC unroll 2
        for (int j = 0; j < kPanelVectors; j++) {
          const auto [scale, zero] = K::scaling(scales, block, group, j);
#pragma GCC unroll 6
          for (int i = 0; i < kRows; i++) {
            const int64_t index = i * few.groups + number;
            const Floats product = __builtin_convertvector(sums[i][j].total, Floats);
            total[i][j] += product * few.steps[index] * scale;
            if constexpr (K::kHasMin || K::kOffset != 0) total[i][j] += zero * few.sums[index];
          }
        }
      }
    }
  }
  for (int i = 0; i < kRows; i++) store(i, total[i]);
}

// Multiplies at most kRows rows by a panel; calls store(row, sums) for each.
template <class K, Locality kLocality, int kRows = kTileBlockRows, class Store>
void multiply_blocks(int rows, const GroupedRows& few, const uint8_t* panel, const uint8_t* ahead,
                     Store store) {
  if (rows == kRows) return multiply_units<K, kLocality, kRows>(few, panel, ahead, store);
  if constexpr (kRows > 1)
    multiply_blocks<K, kLocality, kRows - 1>(rows, few, panel, ahead, store);
}

// Dequantizes a panel; calls store(input, j, values) for each input and vector of outputs.
template <class K, class Store>
void for_each_weight(const uint8_t* panel, int64_t inputs, int first, int end, Store store) {
  for (int64_t block = 0; block < inputs / kBlock; block++) {
    const uint8_t* unit = panel + block / K::kUnitBlocks * K::kUnitBytes;
    const uint8_t* block_at = unit + K::kUnitScales + block % K::kUnitBlocks * K::kBlockBytes;
    for (int j = first; j < end; j++)
      for (int group = 0; group < K::kGroups; group++) {
        const auto [scale, zero] = K::scaling(unit, block_at, group, j);
#pragma GCC unroll 8
        for (int k = 0; k < K::kGroupWords; k++) {
          const int t = group * K::kGroupWords + k;
          const Words codes = K::codes(block_at, j, t);
          Floats values[4];
#pragma GCC unroll 4
          for (int n = 0; n < 4; n++) {
            const Words up = codes << (24 - 8 * n);
            const Ints whole = K::kSigned ? (Ints)up >> 24 : (Ints)(up >> 24);
            values[n] = __builtin_convertvector(whole, Floats) * scale + zero;
          }
          store(block * kBlock + 4 * t, j, values);
        }
      }
  }
}

// Widens a panel to float32; the outputs of each input are adjacent.
template <class K>
void widen_blocks(const uint8_t* panel, int64_t inputs, uint32_t* words) {
  for_each_weight<K>(panel, inputs, 0, kPanelVectors, [=](int64_t input, int j, Floats* values) {
    for (int n = 0; n < 4; n++) store(words + (input + n) * kPanel + j * kLanes, (Words)values[n]);
  });
}
