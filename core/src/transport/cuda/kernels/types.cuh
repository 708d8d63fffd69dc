// Element types: accumulators, conversions and division.
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

// What a kernel does with the elements before its operator and with the result after it. Most operators do nothing
// before, and those of sums divide by one divisor after it, many times.
struct Unscaled {
  template <class Acc>
  __device__ __forceinline__ static Acc lift(Acc element) {
    return element;
  }
};

// Floating point: multiplies by the reciprocal of a power of two, which gives the same bits as the division.
template <class Acc>
struct FloatDivider : Unscaled {
  Acc divisor, reciprocal;
  bool exact;

  __device__ __forceinline__ explicit FloatDivider(const KernelArgs& args)
      : divisor(static_cast<Acc>(args.divisor)),
        reciprocal(1 / divisor),
        exact((args.divisor & (args.divisor - 1)) == 0) {}

  template <unsigned kCount>
  __device__ __forceinline__ void divide(Acc (&sums)[kCount]) const {
    if (exact) {
      UNROLL for (Acc& sum : sums) sum *= reciprocal;
    } else {
      UNROLL for (Acc& sum : sums) sum /= divisor;
    }
  }
};

// Non-negative integers below 2^31, by a multiplication and a shift. With 2^(shift - 1) < by <= 2^shift, the factor
// exceeds 2^(31 + shift) / by by at most 1. So `n * factor` exceeds 2^(31 + shift) * n / by by at most n. Only an
// excess of 2^(31 + shift) / by, which is at least 2^31, could change the quotient. (Granlund and Montgomery, "Division
// by invariant integers using multiplication", 1994.)
struct Divider31 {
  unsigned factor, shift;

  __device__ __forceinline__ explicit Divider31(unsigned by) : shift(0) {
    while (1u << shift < by) ++shift;
    factor = static_cast<unsigned>((1ull << (31 + shift)) / by) + 1;
  }
  __device__ __forceinline__ unsigned quotient(unsigned n) const {
    return static_cast<unsigned>(static_cast<unsigned long long>(2 * n) * factor >> 32) >> shift;
  }
};

// The same for integers below 2^63.
struct Divider63 {
  unsigned long long factor;
  unsigned by, shift;

  __device__ __forceinline__ explicit Divider63(unsigned by) : by(by), shift(0) {
    while (1u << shift < by) ++shift;
    // 2^(63 + shift) / by, in two 32-bit steps.
    const unsigned long long power = 1ull << (31 + shift);
    factor = (power / by << 32) + ((power % by << 32) / by) + 1;
  }
  __device__ __forceinline__ unsigned long long quotient(unsigned long long n) const {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(2 * n) * factor >> 64) >> shift;
  }
  // The lower 64 bits of the quotient of a number below 2^96, in 32-bit steps.
  __device__ __forceinline__ unsigned long long quotient(unsigned __int128 n) const {
    if (n >> 63 == 0) return quotient(static_cast<unsigned long long>(n));
    unsigned long long result = 0, rest = 0;
    UNROLL for (int digit = 64; digit >= 0; digit -= 32) {
      rest = rest << 32 | static_cast<unsigned>(n >> digit);
      const unsigned long long next = quotient(rest);
      rest -= next * by;
      result = result << 32 | next;
    }
    return result;
  }
};

// Integer division, truncated toward zero.
template <class Acc, class Magnitude, class Divider>
struct IntegerDivider : Unscaled {
  Divider divider;

  __device__ __forceinline__ explicit IntegerDivider(const KernelArgs& args) : divider(args.divisor) {}

  template <unsigned kCount>
  __device__ __forceinline__ void divide(Acc (&sums)[kCount]) const {
    UNROLL for (Acc& sum : sums) {
      const bool negative = sum < 0;
      const Magnitude magnitude = static_cast<Magnitude>(sum);
      const Acc quotient = static_cast<Acc>(divider.quotient(negative ? 0 - magnitude : magnitude));
      sum = negative ? -quotient : quotient;
    }
  }
};

// Element types: size, accumulator type, conversions, and the operator: sums, which are divided.

template <class Float>
struct FloatSum {
  using Acc = Float;
  using Divider = FloatDivider<Float>;
  __device__ __forceinline__ static Acc combine(Acc left, Acc right) { return left + right; }
};
struct F32 : FloatSum<float> {
  static constexpr unsigned kSize = 4;
  __device__ __forceinline__ static Acc widen(unsigned bits) { return bits_as<float>(bits); }
  __device__ __forceinline__ static unsigned narrow(Acc sum) { return bits_as<unsigned>(sum); }
};
struct F64 : FloatSum<double> {
  static constexpr unsigned kSize = 8;
  __device__ __forceinline__ static Acc widen(unsigned long long bits) { return bits_as<double>(bits); }
  __device__ __forceinline__ static unsigned long long narrow(Acc sum) { return bits_as<unsigned long long>(sum); }
};
struct F16 : FloatSum<float> {
  static constexpr unsigned kSize = 2;
  __device__ __forceinline__ static Acc widen(unsigned bits) { return f16_to_f32(bits); }
  __device__ __forceinline__ static unsigned narrow(Acc sum) { return f32_to_f16(sum); }
};
struct BF16 : FloatSum<float> {
  static constexpr unsigned kSize = 2;
  __device__ __forceinline__ static Acc widen(unsigned bits) { return bf16_to_f32(bits); }
  __device__ __forceinline__ static unsigned narrow(Acc sum) { return f32_to_bf16(sum); }
};
struct F32Precise : FloatSum<double> {
  static constexpr unsigned kSize = 4;
  __device__ __forceinline__ static Acc widen(unsigned bits) { return bits_as<float>(bits); }
  __device__ __forceinline__ static unsigned narrow(Acc sum) { return bits_as<unsigned>(static_cast<float>(sum)); }
};
struct F16Precise : FloatSum<double> {
  static constexpr unsigned kSize = 2;
  __device__ __forceinline__ static Acc widen(unsigned bits) { return f16_to_f32(bits); }
  __device__ __forceinline__ static unsigned narrow(Acc sum) { return f32_to_f16(f64_to_odd_f32(sum)); }
};
struct BF16Precise : FloatSum<double> {
  static constexpr unsigned kSize = 2;
  __device__ __forceinline__ static Acc widen(unsigned bits) { return bf16_to_f32(bits); }
  __device__ __forceinline__ static unsigned narrow(Acc sum) { return f32_to_bf16(f64_to_odd_f32(sum)); }
};

// Bounds for the dividers: a sum of 8-bit integers is below 2^31 for up to 2^23 sources, one of 16-bit integers for up
// to 2^15. A sum of 32-bit integers is below 2^63, and one of 64-bit integers below 2^96, for any number of sources.
template <class Element, class Sum, class Magnitude, class By>
struct Integer {
  using Acc = Sum;
  using Divider = IntegerDivider<Sum, Magnitude, By>;
  static constexpr unsigned kSize = sizeof(Element);
  using Bits = typename BitsOf<kSize>::Type;
  __device__ __forceinline__ static Acc widen(Bits bits) { return static_cast<Element>(bits); }
  __device__ __forceinline__ static Bits narrow(Acc sum) {
    return static_cast<Bits>(sum) & (~Bits(0) >> 8 * (sizeof(Bits) - kSize));
  }
  __device__ __forceinline__ static Acc combine(Acc left, Acc right) { return left + right; }
};
using I8 = Integer<signed char, int, unsigned, Divider31>;
using U8 = Integer<unsigned char, int, unsigned, Divider31>;
using I32 = Integer<int, long long, unsigned long long, Divider63>;
using I64 = Integer<long long, __int128, unsigned __int128, Divider63>;
using I16 = Integer<short, int, unsigned, Divider31>;
using U16 = Integer<unsigned short, int, unsigned, Divider31>;
using U32 = Integer<unsigned, long long, unsigned long long, Divider63>;
using U64 = Integer<unsigned long long, __int128, unsigned __int128, Divider63>;

// Of the other operators.
struct Undivided : Unscaled {
  __device__ __forceinline__ explicit Undivided(const KernelArgs&) {}

  template <class Acc, unsigned kCount>
  __device__ __forceinline__ void divide(Acc (&)[kCount]) const {}
};

// Integers modulo a power of two, where signs make no difference.
template <unsigned kBytes>
struct Residue {
  using Acc = typename BitsOf<kBytes>::Type;
  static constexpr unsigned kSize = kBytes;
  __device__ __forceinline__ static Acc widen(Acc bits) { return bits; }
  __device__ __forceinline__ static Acc narrow(Acc acc) { return acc & (~Acc(0) >> 8 * (sizeof(Acc) - kSize)); }
};
template <class S>
struct Product : S {
  using Divider = Undivided;
  using Acc = typename S::Acc;
  __device__ __forceinline__ static Acc combine(Acc left, Acc right) { return left * right; }
};

// Types that are only compared, by their bits, with the rules of core/src/reduce/ordered.rs: all bits of the result are
// those of the host, also of a NaN.
template <unsigned kBytes>
struct Compared {
  using Acc = typename BitsOf<kBytes>::Type;
  using Divider = Undivided;
  static constexpr unsigned kSize = kBytes;
  __device__ __forceinline__ static Acc widen(Acc bits) { return bits; }
  __device__ __forceinline__ static Acc narrow(Acc bits) { return bits; }
};
template <class Element>
struct OrderedInteger : Compared<sizeof(Element)> {
  using Acc = typename Compared<sizeof(Element)>::Acc;
  __device__ __forceinline__ static Acc lesser(Acc left, Acc right) {
    return static_cast<Element>(right) < static_cast<Element>(left) ? right : left;
  }
  __device__ __forceinline__ static Acc greater(Acc left, Acc right) {
    return static_cast<Element>(left) < static_cast<Element>(right) ? right : left;
  }
};
// Of operands that are equal or not comparable, the result has the bits of both, or of either.
template <class Float>
struct OrderedFloat : Compared<sizeof(Float)> {
  using Acc = typename Compared<sizeof(Float)>::Acc;
  __device__ __forceinline__ static Acc lesser(Acc left, Acc right) {
    const Float l = bits_as<Float>(left), r = bits_as<Float>(right);
    return l < r ? left : l > r ? right : left | right;
  }
  __device__ __forceinline__ static Acc greater(Acc left, Acc right) {
    const Float l = bits_as<Float>(left), r = bits_as<Float>(right);
    return l > r ? left : l < r ? right : (left & right) | ((left | right) & (~Acc(0) >> 1));
  }
};
// A 16-bit float whose infinity has these bits.
template <unsigned kInfinite>
struct OrderedHalf : Compared<2> {
  // An integer in the order of the numbers: bits are sign and magnitude.
  __device__ __forceinline__ static int key(Acc bits) {
    const int number = static_cast<short>(bits);
    return number ^ ((number >> 15) & 0x7fff);
  }
  __device__ __forceinline__ static bool is_nan(Acc bits) { return (bits & 0x7fff) > kInfinite; }
  __device__ __forceinline__ static Acc lesser(Acc left, Acc right) {
    return is_nan(left) || is_nan(right) ? left | right : key(left) < key(right) ? left : right;
  }
  __device__ __forceinline__ static Acc greater(Acc left, Acc right) {
    return is_nan(left) || is_nan(right) ? left | right : key(left) > key(right) ? left : right;
  }
};
template <class S>
struct Min : S {
  using Acc = typename S::Acc;
  __device__ __forceinline__ static Acc combine(Acc left, Acc right) { return S::lesser(left, right); }
};
template <class S>
struct Max : S {
  using Acc = typename S::Acc;
  __device__ __forceinline__ static Acc combine(Acc left, Acc right) { return S::greater(left, right); }
};

// Of floating type S with a factor of its elements, and one of the result, in the type of the accumulator.
template <class S>
struct Scaled : S {
  struct Divider {
    typename S::Acc pre, post;
    typename S::Divider divider;

    __device__ __forceinline__ explicit Divider(const KernelArgs& args)
        : pre(static_cast<typename S::Acc>(args.pre)), post(static_cast<typename S::Acc>(args.post)), divider(args) {}

    __device__ __forceinline__ typename S::Acc lift(typename S::Acc element) const { return element * pre; }

    template <unsigned kCount>
    __device__ __forceinline__ void divide(typename S::Acc (&totals)[kCount]) const {
      UNROLL for (auto& total : totals) total *= post;
      divider.divide(totals);
    }
  };
};
// Minima and maxima of accumulators.
template <class S>
struct MinOfAccs : S {
  using Divider = Undivided;
  using Acc = typename S::Acc;
  using Bits = typename BitsOf<sizeof(Acc)>::Type;
  __device__ __forceinline__ static Acc combine(Acc left, Acc right) {
    return bits_as<Acc>(OrderedFloat<Acc>::lesser(bits_as<Bits>(left), bits_as<Bits>(right)));
  }
};
template <class S>
struct MaxOfAccs : S {
  using Divider = Undivided;
  using Acc = typename S::Acc;
  using Bits = typename BitsOf<sizeof(Acc)>::Type;
  __device__ __forceinline__ static Acc combine(Acc left, Acc right) {
    return bits_as<Acc>(OrderedFloat<Acc>::greater(bits_as<Bits>(left), bits_as<Bits>(right)));
  }
};

// Bytes whose bits are combined.
template <class Operator>
struct Bitwise {
  using Divider = Undivided;
  static constexpr unsigned kSize = 1;
};
struct And {
  __device__ __forceinline__ static unsigned combine(unsigned left, unsigned right) { return left & right; }
};
struct Or {
  __device__ __forceinline__ static unsigned combine(unsigned left, unsigned right) { return left | right; }
};
struct Xor {
  __device__ __forceinline__ static unsigned combine(unsigned left, unsigned right) { return left ^ right; }
};

// Bytes, copied from one source.
struct Bytes {
  using Divider = Undivided;
  static constexpr unsigned kSize = 1;
};
template <class S>
constexpr bool kCopies = false;
template <>
constexpr bool kCopies<Bytes> = true;

}  // namespace

// Each calls X with the names and types of some kernels: of the frequent means, of the other means of integers, of
// minima and maxima, of products, of operators on bits, and of operators with factors.
#define DL_COMM_TYPES(X)     \
  X(f32, F32)                \
  X(f64, F64)                \
  X(f16, F16)                \
  X(bf16, BF16)              \
  X(i8, I8)                  \
  X(u8, U8)                  \
  X(i32, I32)                \
  X(i64, I64)                \
  X(f32_precise, F32Precise) \
  X(f16_precise, F16Precise) \
  X(bf16_precise, BF16Precise)
#define DL_COMM_OTHER_INTEGERS(X) \
  X(i16, I16)                     \
  X(u16, U16)                     \
  X(u32, U32)                     \
  X(u64, U64)
#define DL_COMM_ORDERED_TYPES(X)         \
  X(f32, OrderedFloat<float>)            \
  X(f64, OrderedFloat<double>)           \
  X(f16, OrderedHalf<0x7c00>)            \
  X(bf16, OrderedHalf<0x7f80>)           \
  X(i8, OrderedInteger<signed char>)     \
  X(u8, OrderedInteger<unsigned char>)   \
  X(i16, OrderedInteger<short>)          \
  X(u16, OrderedInteger<unsigned short>) \
  X(i32, OrderedInteger<int>)            \
  X(u32, OrderedInteger<unsigned>)       \
  X(i64, OrderedInteger<long long>)      \
  X(u64, OrderedInteger<unsigned long long>)
#define DL_COMM_PRODUCT_TYPES(X) \
  X(f32, F32)                    \
  X(f64, F64)                    \
  X(f16, F16)                    \
  X(bf16, BF16)                  \
  X(f32_precise, F32Precise)     \
  X(f16_precise, F16Precise)     \
  X(bf16_precise, BF16Precise)   \
  X(bits8, Residue<1>)           \
  X(bits16, Residue<2>)          \
  X(bits32, Residue<4>)          \
  X(bits64, Residue<8>)
#define DL_COMM_BIT_OPERATORS(X) \
  X(bit_and, And)                \
  X(bit_or, Or)                  \
  X(bit_xor, Xor)
#define DL_COMM_FLOAT_TYPES(X) \
  X(f32, F32)                  \
  X(f64, F64)                  \
  X(f16, F16)                  \
  X(bf16, BF16)                \
  X(f32_precise, F32Precise)   \
  X(f16_precise, F16Precise)   \
  X(bf16_precise, BF16Precise)
