// Instructions that the CPU at hand may lack, for the kernels' tests.
//
// The compiler's own header declares the types. Macros then replace the instructions that the
// kernels use; the definitions follow Intel's Intrinsics Guide. The flags that the kernels look at,
// such as __AVX512BF16__, are set on the command line.
#pragma once

#pragma push_macro("__AVX512F__")
#pragma push_macro("__AVX512BW__")
#pragma push_macro("__AVX512VNNI__")
#pragma push_macro("__AVX512BF16__")
#pragma push_macro("__AVXVNNI__")
#pragma push_macro("__AMX_TILE__")
#pragma push_macro("__AMX_BF16__")
#pragma push_macro("__AMX_INT8__")
#undef __AVX512F__
#undef __AVX512BW__
#undef __AVX512VNNI__
#undef __AVX512BF16__
#undef __AVXVNNI__
#undef __AMX_TILE__
#undef __AMX_BF16__
#undef __AMX_INT8__
#include_next <immintrin.h>
#pragma pop_macro("__AVX512F__")
#pragma pop_macro("__AVX512BW__")
#pragma pop_macro("__AVX512VNNI__")
#pragma pop_macro("__AVX512BF16__")
#pragma pop_macro("__AVXVNNI__")
#pragma pop_macro("__AMX_TILE__")
#pragma pop_macro("__AMX_BF16__")
#pragma pop_macro("__AMX_INT8__")

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated {

template <class To, class From>
To as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class Element, class Vector>
struct Lanes {
  static constexpr int kCount = sizeof(Vector) / sizeof(Element);
  Element at[kCount];
};

inline float from_bfloat16(uint16_t bits) { return as<float>(uint32_t{bits} << 16); }

inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = as<uint32_t>(x);
  if (x != x) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

template <class Vector>
Vector dpbusd(Vector sum, Vector a, Vector b) {
  auto sums = as<Lanes<int32_t, Vector>>(sum);
  const auto bytes = as<Lanes<uint8_t, Vector>>(a);
  const auto others = as<Lanes<int8_t, Vector>>(b);
  for (int i = 0; i < bytes.kCount; i++) sums.at[i / 4] += bytes.at[i] * others.at[i];
  return as<Vector>(sums);
}

template <class Vector>
Vector dpwssd(Vector sum, Vector a, Vector b) {
  auto sums = as<Lanes<int32_t, Vector>>(sum);
  const auto words = as<Lanes<int16_t, Vector>>(a), others = as<Lanes<int16_t, Vector>>(b);
  for (int i = 0; i < words.kCount; i++) sums.at[i / 2] += words.at[i] * others.at[i];
  return as<Vector>(sums);
}

inline __m512i maddubs_epi16(__m512i a, __m512i b) {
  const auto bytes = as<Lanes<uint8_t, __m512i>>(a);
  const auto others = as<Lanes<int8_t, __m512i>>(b);
  Lanes<int16_t, __m512i> sums;
  for (int i = 0; i < sums.kCount; i++) {
    const int sum = bytes.at[2 * i] * others.at[2 * i] + bytes.at[2 * i + 1] * others.at[2 * i + 1];
    sums.at[i] = sum > 32767 ? 32767 : sum < -32768 ? -32768 : sum;
  }
  return as<__m512i>(sums);
}

inline __m512 cvtph_ps(__m256i halves) {
  const auto parts = as<Lanes<__m128i, __m256i>>(halves);
  return as<__m512>(Lanes<__m256, __m512>{_mm256_cvtph_ps(parts.at[0]),
                                          _mm256_cvtph_ps(parts.at[1])});
}

inline __m256i cvtps_ph(__m512 x) {
  const auto parts = as<Lanes<__m256, __m512>>(x);
  return as<__m256i>(Lanes<__m128i, __m256i>{_mm256_cvtps_ph(parts.at[0], _MM_FROUND_TO_NEAREST_INT),
                                             _mm256_cvtps_ph(parts.at[1], _MM_FROUND_TO_NEAREST_INT)});
}

inline __m512i madd_epi16(__m512i a, __m512i b) { return dpwssd(__m512i{}, a, b); }

inline __m512 dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  auto sums = as<Lanes<float, __m512>>(sum);
  const auto pairs = as<Lanes<uint16_t, __m512>>(a), others = as<Lanes<uint16_t, __m512>>(b);
  for (int i = 0; i < pairs.kCount; i += 2)  // the odd one first
    for (int j : {i + 1, i})
      sums.at[i / 2] += from_bfloat16(pairs.at[j]) * from_bfloat16(others.at[j]);
  return as<__m512>(sums);
}

inline __m256bh cvtneps_pbh(__m512 x) {
  const auto floats = as<Lanes<float, __m512>>(x);
  Lanes<uint16_t, __m256bh> halves;
  for (int i = 0; i < halves.kCount; i++) halves.at[i] = to_bfloat16(floats.at[i]);
  return as<__m256bh>(halves);
}

inline __m512i permutexvar_epi16(__m512i indices, __m512i table) {
  auto found = as<Lanes<uint16_t, __m512i>>(indices);
  const auto values = as<Lanes<uint16_t, __m512i>>(table);
  for (auto& index : found.at) index = values.at[index % values.kCount];
  return as<__m512i>(found);
}

inline __m512i shuffle_epi8(__m512i table, __m512i indices) {  // 16 bytes each
  auto found = as<Lanes<uint8_t, __m512i>>(indices);
  const auto bytes = as<Lanes<uint8_t, __m512i>>(table);
  for (int i = 0; i < found.kCount; i++)
    found.at[i] = found.at[i] & 0x80 ? 0 : bytes.at[i / 16 * 16 + found.at[i] % 16];
  return as<__m512i>(found);
}

inline __m512i broadcast_i32x4(__m128i part) {
  return as<__m512i>(Lanes<__m128i, __m512i>{part, part, part, part});
}

inline __m512i srli_epi16(__m512i x, unsigned count) {
  auto words = as<Lanes<uint16_t, __m512i>>(x);
  for (auto& word : words.at) word >>= count;
  return as<__m512i>(words);
}

inline __m512i load_si512(const void* from) {
  __m512i x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline float reduce_max_ps(__m512 x) {
  const auto floats = as<Lanes<float, __m512>>(x);
  float greatest = floats.at[0];
  for (float value : floats.at) greatest = value > greatest ? value : greatest;
  return greatest;
}

inline float reduce_add_ps(__m512 x) {  // in halves
  auto floats = as<Lanes<float, __m512>>(x);
  for (int half = floats.kCount / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) floats.at[i] += floats.at[i + half];
  return floats.at[0];
}

inline __m512 roundscale_ps(__m512 x) {  // to integers
  auto floats = as<Lanes<float, __m512>>(x);
  for (auto& value : floats.at) value = std::nearbyint(value);
  return as<__m512>(floats);
}

inline __m512 set1_ps(float value) {
  Lanes<float, __m512> floats;
  for (auto& each : floats.at) each = value;
  return as<__m512>(floats);
}

inline __mmask16 not_less(__m512 x, __m512 y) {
  const auto left = as<Lanes<float, __m512>>(x), right = as<Lanes<float, __m512>>(y);
  __mmask16 mask = 0;
  for (int i = 0; i < left.kCount; i++) mask |= !(left.at[i] < right.at[i]) << i;
  return mask;
}

inline __m512 maskz_scalef_ps(__mmask16 mask, __m512 x, __m512 exponents) {
  auto floats = as<Lanes<float, __m512>>(x);
  const auto powers = as<Lanes<float, __m512>>(exponents);
  for (int i = 0; i < floats.kCount; i++)
    floats.at[i] = mask >> i & 1 ? floats.at[i] * std::exp2(std::floor(powers.at[i])) : 0;
  return as<__m512>(floats);
}

inline __m512i slli_epi32(__m512i x, unsigned count) {
  auto words = as<Lanes<uint32_t, __m512i>>(x);
  for (auto& word : words.at) word <<= count;
  return as<__m512i>(words);
}

inline __m512i cvtepu16_epi32(__m256i x) {
  const auto halves = as<Lanes<uint16_t, __m256i>>(x);
  Lanes<uint32_t, __m512i> words;
  for (int i = 0; i < words.kCount; i++) words.at[i] = halves.at[i];
  return as<__m512i>(words);
}

// A thread's matrix unit: eight tiles of at most 16 rows of 64 bytes.
struct Tile {
  uint8_t rows;
  uint16_t row_bytes;
  uint8_t at[16][64];
};
inline thread_local Tile tiles[8];

inline void loadconfig(const void* from) {
  const auto* bytes = static_cast<const uint8_t*>(from);
  for (int i = 0; i < 8; i++) {
    std::memset(&tiles[i], 0, sizeof tiles[i]);
    std::memcpy(&tiles[i].row_bytes, bytes + 16 + 2 * i, 2);
    tiles[i].rows = bytes[48 + i];
  }
}
inline void release() { std::memset(tiles, 0, sizeof tiles); }
inline void zero(int tile) { std::memset(tiles[tile].at, 0, sizeof tiles[tile].at); }
inline void loadd(int tile, const void* from, int64_t stride) {
  zero(tile);
  for (int i = 0; i < tiles[tile].rows; i++)
    std::memcpy(tiles[tile].at[i], static_cast<const uint8_t*>(from) + i * stride,
                tiles[tile].row_bytes);
}
inline void stored(int tile, void* to, int64_t stride) {
  for (int i = 0; i < tiles[tile].rows; i++)
    std::memcpy(static_cast<uint8_t*>(to) + i * stride, tiles[tile].at[i],
                tiles[tile].row_bytes);
}

// Adds the products of a's rows with b's columns to c; `dot(row, column)` multiplies words.
template <class Sum, class Dot>
void multiply_tiles(int c, int a, int b, Dot dot) {
  for (int row = 0; row < tiles[c].rows; row++)
    for (int column = 0; column < tiles[c].row_bytes / 4; column++) {
      uint32_t left[16], right[16];
      const int depth = tiles[a].row_bytes / 4;
      std::memcpy(left, tiles[a].at[row], 4 * depth);
      for (int k = 0; k < depth; k++) std::memcpy(right + k, tiles[b].at[k] + 4 * column, 4);
      Sum sum;
      std::memcpy(&sum, tiles[c].at[row] + 4 * column, 4);
      sum += dot(left, right, depth);
      std::memcpy(tiles[c].at[row] + 4 * column, &sum, 4);
    }
}

inline void tile_dpbf16ps(int c, int a, int b) {
  multiply_tiles<float>(c, a, b, [](const uint32_t* left, const uint32_t* right, int depth) {
    float even = 0, odd = 0;  // apart, as the unit has them
    for (int k = 0; k < depth; k++) {
      even += from_bfloat16(left[k]) * from_bfloat16(right[k]);
      odd += from_bfloat16(left[k] >> 16) * from_bfloat16(right[k] >> 16);
    }
    return even + odd;
  });
}

inline void tile_dpbusd(int c, int a, int b) {
  multiply_tiles<int32_t>(c, a, b, [](const uint32_t* left, const uint32_t* right, int depth) {
    int32_t sum = 0;
    for (int k = 0; k < depth; k++)
      for (int i = 0; i < 32; i += 8)
        sum += static_cast<uint8_t>(left[k] >> i) * static_cast<int8_t>(right[k] >> i);
    return sum;
  });
}

}  // namespace emulated

#define _mm512_dpbusd_epi32 emulated::dpbusd<__m512i>
#define _mm256_dpbusd_avx_epi32 emulated::dpbusd<__m256i>
#define _mm512_dpwssd_epi32 emulated::dpwssd<__m512i>
#define _mm256_dpwssd_avx_epi32 emulated::dpwssd<__m256i>
#define _mm512_madd_epi16 emulated::madd_epi16
#define _mm512_maddubs_epi16 emulated::maddubs_epi16
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#define _mm512_cvtneps_pbh emulated::cvtneps_pbh
#define _mm512_permutexvar_epi16 emulated::permutexvar_epi16
#define _mm512_shuffle_epi8 emulated::shuffle_epi8
#define _mm512_broadcast_i32x4 emulated::broadcast_i32x4
#define _mm512_load_si512 emulated::load_si512
#define _mm512_reduce_max_ps emulated::reduce_max_ps
#define _mm512_reduce_add_ps emulated::reduce_add_ps
#define _mm512_set1_ps emulated::set1_ps
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_slli_epi32 emulated::slli_epi32
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps(x, rounding) emulated::roundscale_ps(x)
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask(x, y, how) emulated::not_less(x, y)
#define _mm512_maskz_scalef_ps emulated::maskz_scalef_ps
#undef _mm512_srli_epi16
#define _mm512_srli_epi16 emulated::srli_epi16
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(x, rounding) emulated::cvtps_ph(x)
#define _mm512_cvtph_ps emulated::cvtph_ps
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#define _tile_loadconfig emulated::loadconfig
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::loadd
#define _tile_stored emulated::stored
#define _tile_dpbf16ps emulated::tile_dpbf16ps
#define _tile_dpbusd emulated::tile_dpbusd
