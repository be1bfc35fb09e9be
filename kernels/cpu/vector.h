// Vectors of the machine's width, and the three types that K and V are stored in.
//
// It uses the vector extensions of GCC and Clang, so that one source serves AVX-512, AVX2 and NEON.
// Intrinsics fill their gaps (conversions, the bf16 dot product).
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

template <class Vector>
inline Vector load(const void* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class Vector>
inline void store(void* to, Vector v) {
  std::memcpy(to, &v, sizeof v);
}

inline Floats broadcast(float x) { return x - Floats{}; }
inline Ints broadcast(int32_t x) { return x - Ints{}; }
inline Words broadcast(uint32_t x) { return x - Words{}; }

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
inline Floats min(Floats a, Floats b) { return a < b ? a : b; }

// Loads at most `count` elements; the rest of the vector is zeros.
template <class Vector, class Element>
inline Vector load_first(const Element* from, int64_t count) {
  if (count >= kLanes) return load<Vector>(from);
  Vector v{};
  std::memcpy(&v, from, count * sizeof(Element));
  return v;
}

// Stores at most `count` elements.
template <class Vector, class Element>
inline void store_first(Element* to, int64_t count, Vector v) {
  if (count >= kLanes) return store(to, v);
  std::memcpy(to, &v, count * sizeof(Element));
}

// Rounds to the nearest integers, ties to even. Magnitudes must be below 2^22.
inline Ints round_to_ints(Floats x) {
  const Floats magic = broadcast(12582912.f);  // 1.5 * 2^23
  return (Ints)(x + magic) - (Ints)magic;
}

inline float reduce_max(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float result = v[0];
  for (int i = 1; i < kLanes; i++) result = v[i] > result ? v[i] : result;
  return result;
#endif
}

inline float reduce_add(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float result = 0;
  for (int i = 0; i < kLanes; i++) result += v[i];
  return result;
#endif
}

// 2^x to 2 ulp; exactly 0 below the normal range, so for -inf too.
__attribute__((always_inline)) inline Floats exp2(Floats x) {
#if defined(__AVX512F__)
  const __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
  const Floats f = x - (Floats)whole;
#else
  const Floats magic = broadcast(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  Floats clamped = max(x, broadcast(-126.f));
  Floats shifted = clamped + magic;
  Floats f = clamped - (shifted - magic);  // in [-0.5, 0.5]
#endif
  // Taylor coefficients of 2^f, ln(2)^k / k!; the error is below 1.3e-8.
  Floats p = broadcast(1.5252734e-5f);
  p = p * f + 1.5403530e-4f;
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.f;
#if defined(__AVX512F__)
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126), _CMP_NLT_UQ);
  return (Floats)_mm512_maskz_scalef_ps(normal, (__m512)p, whole);
#else
  Ints exponent = ((Ints)shifted - (Ints)magic) << 23;
  Floats result = (Floats)((Ints)p + exponent);
  return x < -126.f ? Floats{} : result;
#endif
}

// Each storage type defines how to load and store a vector of its elements as floats, and as
// `Words` of kPack elements for dot products.

struct Float32 {
  using Stored = float;
  using Sum = Floats;
  static constexpr int kPack = 1;
  static Floats load_floats(const Stored* from) { return load<Floats>(from); }
  static void store_floats(Stored* to, Floats v) { store(to, v); }
  static Words load_words(const Stored* from) { return load<Words>(from); }
  static Floats multiply_add(Floats sum, Words a, Words b) {
    return (Floats)a * (Floats)b + sum;
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Sum = Floats;
  static constexpr int kPack = 1;
  static Floats load_floats(const Stored* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#else
    Floats v;
    for (int i = 0; i < kLanes; i++) {
      Scalar half;
      std::memcpy(&half, from + i, sizeof half);
      v[i] = half;
    }
    return v;
#endif
  }
  static void store_floats(Stored* to, Floats v) {
#if defined(__AVX512F__)
    store(to, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__) && defined(__F16C__)
    store(to, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < kLanes; i++) {
      Scalar half = v[i];
      std::memcpy(to + i, &half, sizeof half);
    }
#endif
  }
  static Words load_words(const Stored* from) { return (Words)load_floats(from); }
  static Floats multiply_add(Floats sum, Words a, Words b) {
    return Float32::multiply_add(sum, a, b);
  }

 private:
#if defined(__ARM_FP16_FORMAT_IEEE)
  using Scalar = __fp16;
#elif !(defined(__AVX2__) && defined(__F16C__))
  using Scalar = _Float16;
#endif
};

struct BFloat16 {
  using Stored = uint16_t;
  using Sum = Floats;
  static Floats widen(Halves v) {
#if defined(__AVX512F__)  // GCC 12 converts halves of the vector
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)v), 16);
#else
    return (Floats)(__builtin_convertvector(v, Words) << 16);
#endif
  }
  static Halves narrow(Floats v) {
#if defined(__AVX512BF16__)
    return (Halves)_mm512_cvtneps_pbh((__m512)v);
#else
    Words bits = (Words)v;
    Words rounded = bits + 0x7fff + ((bits >> 16) & 1);  // to nearest, ties to even
    Words result = v == v ? rounded : bits | 0x400000;   // a NaN stays one
    return __builtin_convertvector(result >> 16, Halves);
#endif
  }
  static Floats load_floats(const Stored* from) { return widen(load<Halves>(from)); }
  static void store_floats(Stored* to, Floats v) { store(to, narrow(v)); }
#if defined(__AVX512BF16__)
  // Two elements per word: one instruction multiplies and adds 32 of them.
  static constexpr int kPack = 2;
  static Words load_words(const Stored* from) { return load<Words>(from); }
  static Floats multiply_add(Floats sum, Words a, Words b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  static constexpr int kPack = 2;
  static Words load_words(const Stored* from) { return load<Words>(from); }
  static Floats multiply_add(Floats sum, Words a, Words b) {
    return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
  }
#else
  static constexpr int kPack = 1;
  static Words load_words(const Stored* from) { return (Words)load_floats(from); }
  static Floats multiply_add(Floats sum, Words a, Words b) {
    return Float32::multiply_add(sum, a, b);
  }
#endif
};

// Returns the elements `kPlace` of two vectors, those of b from kLanes on.
template <size_t... kPlace>
Floats choose(Floats a, Floats b, std::index_sequence<kPlace...>) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, int(kPlace)...);
#endif
#endif
  float both[2 * kLanes];
  store(both, a);
  store(both + kLanes, b);
  return Floats{both[kPlace]...};
}

// Calls `work` with the type of this number in caches.py.
template <class Work>
void with_dtype(int dtype, Work work) {
  switch (dtype) {
    case 0: return work(Float32());
    case 1: return work(Float16());
    case 2: return work(BFloat16());
  }
}
