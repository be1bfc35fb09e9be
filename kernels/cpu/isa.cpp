// The name of the library's instruction set; instruction_sets.py has the same names.

#include "amx.h"

extern "C" const char* octavo_isa() {
#if OCTAVO_HAS_AMX
  if (octavo_allow_amx()) return "amx";
#endif
#if defined(__AVX512BF16__)
  return "avx512-bf16";
#elif defined(__AVX512VNNI__)
  return "avx512-vnni";
#elif defined(__AVX512F__)
  return "avx512";
#elif defined(__AVXVNNI__)
  return "avx2-vnni";
#elif defined(__AVX2__)
  return "avx2";
#elif defined(__x86_64__)
  return "sse2";
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8)
  return "neon-bf16";
#elif defined(__ARM_FEATURE_DOTPROD)
  return "neon-dotprod";
#elif defined(__aarch64__)
  return "neon";
#else
  return "generic";
#endif
}
