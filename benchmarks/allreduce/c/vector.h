/* Sixteen floats (or eight doubles) at a time in GCC's vector types, which the compiler maps to the available
 * registers. Addresses are aligned to cache lines; counts are whole vectors. */
#ifndef VECTOR_H
#define VECTOR_H

#include "element.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

typedef float float16v __attribute__((vector_size(64)));
typedef double double8v __attribute__((vector_size(64)));
typedef uint32_t uint16v __attribute__((vector_size(64)));
typedef uint16_t half16v __attribute__((vector_size(32)));

#define VECTOR static inline __attribute__((always_inline))

VECTOR float16v load_f32(const void* at) { return *(const float16v*)at; }
VECTOR void store_f32(void* at, float16v value) { *(float16v*)at = value; }
VECTOR double8v load_f64(const void* at) { return *(const double8v*)at; }
VECTOR void store_f64(void* at, double8v value) { *(double8v*)at = value; }

VECTOR float16v load_bf16(const void* at) {
  return (float16v)(__builtin_convertvector(*(const half16v*)at, uint16v) << 16);
}

/* As bf16_of_float. */
VECTOR void store_bf16(void* at, float16v value) {
  uint16v wide = (uint16v)value, number = (uint16v)(value == value);
  uint16v rounded = (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
  uint16v nan = wide >> 16 | 0x40;
  *(half16v*)at = __builtin_convertvector((rounded & number) | (nan & ~number), half16v);
}

VECTOR float16v load_f16(const void* at) {
#if defined(__AVX512F__)
  return (float16v)_mm512_cvtph_ps(_mm256_load_si256(at));
#elif defined(__F16C__)
  union {
    __m256 half[2];
    float16v whole;
  } value;
  value.half[0] = _mm256_cvtph_ps(_mm_load_si128(at));
  value.half[1] = _mm256_cvtph_ps(_mm_load_si128((const __m128i*)at + 1));
  return value.whole;
#else
  float16v value;
  for (int i = 0; i < 16; ++i) value[i] = float_of_f16(((const uint16_t*)at)[i]);
  return value;
#endif
}

VECTOR void store_f16(void* at, float16v value) {
#if defined(__AVX512F__)
  _mm256_store_si256(at, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  union {
    float16v whole;
    __m256 half[2];
  } parts = {value};
  for (int i = 0; i < 2; ++i)
    _mm_store_si128((__m128i*)at + i, _mm256_cvtps_ph(parts.half[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  for (int i = 0; i < 16; ++i) ((uint16_t*)at)[i] = f16_of_float(value[i]);
#endif
}

#endif
