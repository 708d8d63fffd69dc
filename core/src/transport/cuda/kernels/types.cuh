// Element types: accumulators, operators and division.
#pragma once

#include "numbers.cuh"

namespace {

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
  using Factor = Float;
  using Divider = FloatDivider<Float>;
  __device__ __forceinline__ static Acc scale(Acc acc, Factor factor) { return acc * factor; }
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

// Division of all numbers of an accumulator, truncated toward zero, in 32-bit steps.
template <class Acc, class Magnitude>
struct FullDivider : Unscaled {
  Divider63 divider;

  __device__ __forceinline__ explicit FullDivider(const KernelArgs& args) : divider(args.divisor) {}

  template <unsigned kCount>
  __device__ __forceinline__ void divide(Acc (&sums)[kCount]) const {
    UNROLL for (Acc& sum : sums) {
      const bool negative = is_negative(sum);
      Magnitude magnitude = static_cast<Magnitude>(sum), quotient = 0;
      if (negative) magnitude = 0 - magnitude;
      unsigned long long rest = 0;
      UNROLL for (int digit = 8 * sizeof(Magnitude) - 32; digit >= 0; digit -= 32) {
        rest = rest << 32 | static_cast<unsigned>(magnitude >> digit);
        const unsigned long long next = divider.quotient(rest);
        rest -= next * divider.by;
        quotient |= static_cast<Magnitude>(next) << digit;
      }
      sum = static_cast<Acc>(negative ? 0 - quotient : quotient);
    }
  }
};

// Sums of integers with factors, which use all of the accumulators of core/src/reduce/types.rs and wrap around there.
template <class Element, class Sum, class Magnitude>
struct WideInteger : Integer<Element, Sum, Magnitude, Divider63> {
  using Factor = double;
  using Divider = FullDivider<Sum, Magnitude>;
  __device__ __forceinline__ static Sum combine(Sum left, Sum right) {
    return static_cast<Sum>(static_cast<Magnitude>(left) + static_cast<Magnitude>(right));
  }
  __device__ __forceinline__ static Sum scale(Sum acc, Factor factor) { return scaled_integer(acc, factor); }
};
using WideI8 = WideInteger<signed char, int, unsigned>;
using WideU8 = WideInteger<unsigned char, int, unsigned>;
using WideI16 = WideInteger<short, int, unsigned>;
using WideU16 = WideInteger<unsigned short, unsigned, unsigned>;
using WideI32 = WideInteger<int, long long, unsigned long long>;
using WideU32 = WideInteger<unsigned, unsigned long long, unsigned long long>;
using WideI64 = WideInteger<long long, __int128, unsigned __int128>;
using WideU64 = WideInteger<unsigned long long, unsigned __int128, unsigned __int128>;

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
  using Factor = double;
  __device__ __forceinline__ static Acc scale(Acc bits, Factor factor) {
    const Element scaled = scaled_integer(static_cast<Element>(bits), factor);
    return static_cast<Acc>(scaled) & (~Acc(0) >> 8 * (sizeof(Acc) - sizeof(Element)));
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

// Of type S with a factor of its elements, and one of the result.
template <class S>
struct Scaled : S {
  struct Divider {
    typename S::Factor pre, post;
    typename S::Divider divider;

    __device__ __forceinline__ explicit Divider(const KernelArgs& args)
        : pre(static_cast<typename S::Factor>(args.pre)),
          post(static_cast<typename S::Factor>(args.post)),
          divider(args) {}

    __device__ __forceinline__ typename S::Acc lift(typename S::Acc element) const { return S::scale(element, pre); }

    template <unsigned kCount>
    __device__ __forceinline__ void divide(typename S::Acc (&totals)[kCount]) const {
      UNROLL for (auto& total : totals) total = S::scale(total, post);
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
// minima and maxima, of products, of operators on bits, and of operators with factors, of integers and of floats.
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
#define DL_COMM_ORDERED_TYPES(X) \
  X(f32, OrderedFloat<float>)    \
  X(f64, OrderedFloat<double>)   \
  X(f16, OrderedHalf<0x7c00>)    \
  X(bf16, OrderedHalf<0x7f80>)   \
  DL_COMM_ORDERED_INTEGERS(X)
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
#define DL_COMM_WIDE_INTEGERS(X) \
  X(i8, WideI8)                  \
  X(u8, WideU8)                  \
  X(i16, WideI16)                \
  X(u16, WideU16)                \
  X(i32, WideI32)                \
  X(u32, WideU32)                \
  X(i64, WideI64)                \
  X(u64, WideU64)
#define DL_COMM_ORDERED_INTEGERS(X)      \
  X(i8, OrderedInteger<signed char>)     \
  X(u8, OrderedInteger<unsigned char>)   \
  X(i16, OrderedInteger<short>)          \
  X(u16, OrderedInteger<unsigned short>) \
  X(i32, OrderedInteger<int>)            \
  X(u32, OrderedInteger<unsigned>)       \
  X(i64, OrderedInteger<long long>)      \
  X(u64, OrderedInteger<unsigned long long>)
#define DL_COMM_FLOAT_TYPES(X) \
  X(f32, F32)                  \
  X(f64, F64)                  \
  X(f16, F16)                  \
  X(bf16, BF16)                \
  X(f32_precise, F32Precise)   \
  X(f16_precise, F16Precise)   \
  X(bf16_precise, BF16Precise)
