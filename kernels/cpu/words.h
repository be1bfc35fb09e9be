// Products of words of several elements, by the CPU's best instructions.
//
// A word of weights has one float32, two bfloat16 or four bytes of an output. Where no instruction
// multiplies all of a word's elements at once, registers split the word: memory holds the same
// weights on every CPU.
#pragma once

#include "vector.h"

typedef int16_t Shorts __attribute__((vector_size(kLanes * 4)));

// Adds the products of the two 16-bit integers of each word.
inline Ints add_products(Ints sum, Words a, Words b) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__aarch64__)
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
  return sum + (Ints)vpaddq_s32(low, vmull_high_s16(x, y));
#else
  const Ints low = ((Ints)(a << 16) >> 16) * ((Ints)(b << 16) >> 16);
  return sum + low + ((Ints)a >> 16) * ((Ints)b >> 16);
#endif
}

// One float32.
struct Singles {
  using Sum = Floats;
  static constexpr int kParts = 1;
  static constexpr bool kOnMatrixUnit = false;

  template <class T>
  static T row_part(T words, int) {
    return words;
  }
  static Words weight_part(Words words, int) { return words; }
  static Sum multiply_add(Sum sum, Words row, Words weights) {
    return Float32::multiply_add(sum, row, weights);
  }
};

// Two bfloat16.
struct Pairs {
  using Sum = Floats;
  static constexpr bool kOnMatrixUnit = true;
  static constexpr int kParts = BFloat16::kPack == 2 ? 1 : 2;

  // Part `i` of rows and of weights: all, or one of the two as float32.
  template <class T>
  static T row_part(T words, int i) {
    if constexpr (kParts == 1) return words;
    return i == 0 ? words << 16 : words & 0xffff0000;
  }
  static Words weight_part(Words words, int i) { return row_part(words, i); }
  static Sum multiply_add(Sum sum, Words row, Words weights) {
    return BFloat16::multiply_add(sum, row, weights);
  }
};

// Four bytes, unsigned in rows and signed in weights.
struct Fours {
  using Sum = Ints;
  static constexpr bool kOnMatrixUnit = true;
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__)) || \
    defined(__ARM_FEATURE_MATMUL_INT8) || defined(__ARM_FEATURE_DOTPROD)
  static constexpr int kParts = 1;
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
  static constexpr int kOffset = 128;  // subtracted from rows, which are signed in this instruction
#else
  static constexpr int kOffset = 0;
#endif
  template <class T>
  static T row_part(T words, int) {
    return kOffset ? words ^ 0x80808080 : words;
  }
  static Words weight_part(Words words, int) { return words; }
  static Sum multiply_add(Sum sum, Words row, Words weights) {
#if defined(__AVX512VNNI__)
    return (Sum)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)row, (__m512i)weights);
#elif defined(__AVXVNNI__)
    return (Sum)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)row, (__m256i)weights);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (Sum)vusdotq_s32((int32x4_t)sum, (uint8x16_t)row, (int8x16_t)weights);
#else
    return (Sum)vdotq_s32((int32x4_t)sum, (int8x16_t)row, (int8x16_t)weights);
#endif
  }
#else
  // As 16-bit integers, the even bytes and then the odd ones: products of bytes in pairs
  // (vpmaddubsw) saturate.
  static constexpr int kParts = 2;
  static constexpr int kOffset = 0;
  template <class T>
  static T row_part(T words, int i) {
    return (i == 0 ? words : words >> 8) & 0x00ff00ff;
  }
  static Words weight_part(Words words, int i) {
    return (Words)((i == 0 ? (Shorts)words << 8 : (Shorts)words) >> 8);
  }
  static Sum multiply_add(Sum sum, Words row, Words weights) {
    return add_products(sum, row, weights);
  }
#endif
};
