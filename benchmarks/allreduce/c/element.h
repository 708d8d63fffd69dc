/* The element types, and their conversion from and to float, one element at a time. */
#ifndef ELEMENT_H
#define ELEMENT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef enum element { F32, F64, F16, BF16, ELEMENTS } element_t;

static const char* const element_names[ELEMENTS] = {"f32", "f64", "f16", "bf16"};
static const size_t element_sizes[ELEMENTS] = {4, 8, 2, 2};

/* Returns ELEMENTS for an unknown type. */
static inline element_t element_named(const char* name) {
  element_t type = F32;
  while (type < ELEMENTS && strcmp(name, element_names[type])) ++type;
  return type;
}

static inline float float_of_bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

/* Rounds to nearest, ties to even; a NaN stays a NaN. */
static inline uint16_t bf16_of_float(float value) {
  uint32_t wide;
  memcpy(&wide, &value, sizeof wide);
  uint32_t rounded = (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
  return (uint16_t)(value == value ? rounded : (wide >> 16 | 0x40));
}

static inline float float_of_f16(uint16_t bits) {
  _Float16 half;
  memcpy(&half, &bits, sizeof half);
  return (float)half;
}

static inline uint16_t f16_of_float(float value) {
  _Float16 half = (_Float16)value;
  uint16_t bits;
  memcpy(&bits, &half, sizeof bits);
  return bits;
}

#endif
