// Numbers: their bits in vectors, and conversions.
#pragma once

#include "memory.cuh"

namespace {

// Reinterprets the bits. A union is the only method that every NVRTC and g++ support.
template <class To, class From>
__device__ __forceinline__ To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "one has as many bits as the other");
  const union {
    From from;
    To to;
  } bits = {from};
  return bits.to;
}

// An unsigned type that holds an element's bits.
template <unsigned kSize>
struct BitsOf {
  using Type = unsigned;
};
template <>
struct BitsOf<8> {
  using Type = unsigned long long;
};

// The bits of element `i` of a vector, zero-extended.
template <unsigned kSize, unsigned kBytes>
__device__ __forceinline__ typename BitsOf<kSize>::Type element(const Vector<kBytes>& v, unsigned i) {
  if constexpr (kSize == 8) {
    return v.word[2 * i] | static_cast<unsigned long long>(v.word[2 * i + 1]) << 32;
  } else if constexpr (kSize == 4) {
    return v.word[i];
  } else {
    const unsigned bit = 8 * kSize * i;
    return v.word[bit / 32] >> bit % 32 & ((1u << 8 * kSize) - 1);
  }
}

// Sets element `i` of a vector to zero-extended `bits`. The element must be 0 before.
template <unsigned kSize, unsigned kBytes>
__device__ __forceinline__ void set_element(Vector<kBytes>& v, unsigned i, typename BitsOf<kSize>::Type bits) {
  if constexpr (kSize == 8) {
    v.word[2 * i] = static_cast<unsigned>(bits);
    v.word[2 * i + 1] = static_cast<unsigned>(bits >> 32);
  } else if constexpr (kSize == 4) {
    v.word[i] = bits;
  } else {
    const unsigned bit = 8 * kSize * i;
    v.word[bit / 32] |= bits << bit % 32;
  }
}

// Conversions are exact or round to nearest, ties to even, except f64_to_odd_f32. On the host, float16 is converted as
// in core/src/reduce/convert.rs. The GPU's conversion instructions differ from that only for NaNs that GPU arithmetic
// never produces. It produces only 0x7fffffff in float32, which both convert to 0x7fff.

constexpr unsigned kSign = 1u << 31;
constexpr unsigned kInfinity = 0xffu << 23;

__device__ __forceinline__ float f16_to_f32(unsigned half) {
#ifdef __CUDACC_RTC__
  float single;
  asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(single) : "r"(half));
  return single;
#else
  const unsigned smallest = (127u - 14) << 23, magnitude = (half & 0x7fff) << 13;
  const unsigned rebiased = magnitude + (112u << 23), special = rebiased + (112u << 23);
  const unsigned subnormal = bits_as<unsigned>(bits_as<float>(magnitude + smallest) - bits_as<float>(smallest));
  const unsigned finite = magnitude < 0x400u << 13 ? subnormal : rebiased;
  return bits_as<float>((magnitude >= 0x7c00u << 13 ? special : finite) | (half & 0x8000) << 16);
#endif
}

__device__ __forceinline__ unsigned f32_to_f16(float single) {
#ifdef __CUDACC_RTC__
  unsigned half;
  asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h;}" : "=r"(half) : "f"(single));
  return half;
#else
  const unsigned bits = bits_as<unsigned>(single), sign = bits & kSign, magnitude = bits ^ sign;
  const unsigned normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const unsigned subnormal = bits_as<unsigned>(bits_as<float>(magnitude) + 0.5f) - bits_as<unsigned>(0.5f);
  const unsigned finite = magnitude < (127u - 14) << 23 ? subnormal : normal;
  const unsigned special = magnitude > kInfinity ? 0x7e00 | (magnitude >> 13 & 0x3ff) : 0x7c00;
  return (magnitude >= (127u + 16) << 23 ? special : finite) | sign >> 16;
#endif
}

__device__ __forceinline__ float bf16_to_f32(unsigned half) { return bits_as<float>(half << 16); }

// The GPU's conversion instruction gives another NaN, and some GPUs lack it.
__device__ __forceinline__ unsigned f32_to_bf16(float single) {
  const unsigned bits = bits_as<unsigned>(single);
  const unsigned rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (bits & ~kSign) > kInfinity ? 0x7fc0 : rounded;
}

// Rounds to odd: an inexact result is the neighbour whose last bit is 1. Rounding the result to a type with at least
// two fewer bits equals rounding the float64 directly.
__device__ __forceinline__ float f64_to_odd_f32(double value) {
  const float nearest = static_cast<float>(value);
  const double widened = nearest;
  const bool rounded_up = (widened < 0 ? -widened : widened) > (value < 0 ? -value : value);
  const unsigned bits = bits_as<unsigned>(nearest);
  return widened == value ? nearest : bits_as<float>((bits - rounded_up) | 1);
}

template <class T>
constexpr bool kIsSigned = T(-1) < T(0);
template <class T>
constexpr T kHighest = kIsSigned<T> ? static_cast<T>(((T(1) << (8 * sizeof(T) - 2)) - 1) * 2 + 1) : static_cast<T>(-1);
template <class T>
constexpr T kLowest = static_cast<T>(~kHighest<T>);

template <class T>
__device__ __forceinline__ bool is_negative(T value) {
  if constexpr (kIsSigned<T>) {
    return value < 0;
  } else {
    return false;
  }
}

// 2^exponent, for an exponent that has a normal number.
__device__ __forceinline__ double power_of_two(unsigned exponent) {
  return bits_as<double>(static_cast<unsigned long long>(exponent + 1023) << 52);
}

// The nearest float64; GPUs have no instruction for integers of 128 bits.
template <class T>
__device__ __forceinline__ double to_f64(T value) {
  return static_cast<double>(value);
}
__device__ __forceinline__ double to_f64(unsigned __int128 value) {
  unsigned shift = 0;
  unsigned long long upper = static_cast<unsigned long long>(value >> 64);
  UNROLL for (unsigned step = 32; step > 0; step /= 2) {
    if (upper >> step == 0) continue;
    upper >>= step;
    shift += step;
  }
  shift += static_cast<unsigned>(upper);
  // The lowest bit says whether a bit was lost, so that the conversion rounds the whole number.
  const unsigned long long kept = static_cast<unsigned long long>(value >> shift);
  const bool lost = static_cast<unsigned __int128>(kept) << shift != value;
  return static_cast<double>(kept | lost) * power_of_two(shift);
}
__device__ __forceinline__ double to_f64(__int128 value) {
  const unsigned __int128 magnitude = static_cast<unsigned __int128>(value);
  return value < 0 ? -to_f64(0 - magnitude) : to_f64(magnitude);
}

// The integer part of a number within the type.
template <class T>
__device__ __forceinline__ T truncated(double value) {
  if constexpr (sizeof(T) < 16) {
    return static_cast<T>(value);
  } else {
    const unsigned long long bits = bits_as<unsigned long long>(value) & ~(1ull << 63);
    const unsigned exponent = static_cast<unsigned>(bits >> 52);
    const unsigned __int128 mantissa = (bits & ((1ull << 52) - 1)) | 1ull << 52;
    const unsigned __int128 magnitude = exponent < 1023   ? 0
                                        : exponent < 1075 ? mantissa >> (1075 - exponent)
                                                          : mantissa << (exponent - 1075);
    return static_cast<T>(value < 0 ? 0 - magnitude : magnitude);
  }
}

// An integer multiplied in float64, rounded toward zero; beyond its type, the limit of that; 0 for NaN. A function,
// since kernels with many copies of it would be several times as long, and compile as much longer.
template <class T>
__device__ OUT_OF_LINE T scaled_integer(T value, double factor) {
  const double product = to_f64(value) * factor, end = power_of_two(8 * sizeof(T) - kIsSigned<T>);
  if (product != product) return 0;
  if (product >= end) return kHighest<T>;
  if (product <= (kIsSigned<T> ? -end : 0)) return kLowest<T>;
  return truncated<T>(product);
}

}  // namespace
