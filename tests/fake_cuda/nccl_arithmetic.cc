// See nccl_arithmetic.h.
#include "nccl_arithmetic.h"

#include <cmath>
#include <cstring>
#include <type_traits>

#include "abort.h"

namespace fake {
namespace {

// Conversions of a 16-bit float with `kMantissa` mantissa bits and 15 - kMantissa exponent bits.
template <int kMantissa>
struct Half {
  static constexpr int kBias = (1 << (14 - kMantissa)) - 1;
  static constexpr int kMaxExponent = 2 * kBias + 1;

  static float widen(std::uint16_t bits) {
    const int exponent = bits >> kMantissa & kMaxExponent;
    const int mantissa = bits & ((1 << kMantissa) - 1);
    float value = 0;
    if (exponent == kMaxExponent) {
      value = mantissa != 0 ? NAN : INFINITY;
    } else if (exponent == 0) {
      value = std::ldexp(static_cast<float>(mantissa), 1 - kBias - kMantissa);
    } else {
      value = std::ldexp(static_cast<float>(mantissa + (1 << kMantissa)), exponent - kBias - kMantissa);
    }
    return (bits & 0x8000) != 0 ? -value : value;
  }

  // Rounds to nearest, ties to even.
  static std::uint16_t narrow(float value) {
    const unsigned sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) return static_cast<std::uint16_t>(sign | kMaxExponent << kMantissa | 1 << (kMantissa - 1));
    int exponent = 0;
    std::frexp(value, &exponent);  // value is in [2^(exponent-1), 2^exponent); infinity is handled below
    if (value == 0) return static_cast<std::uint16_t>(sign);
    // One unit in the last place of the result, at least that of the smallest normal number.
    const int unit = (exponent - 1 < 1 - kBias ? 1 - kBias : exponent - 1) - kMantissa;
    const double scaled = std::isinf(value) ? value : std::nearbyint(std::ldexp(std::fabs(double{value}), -unit));
    if (!std::isfinite(scaled)) return static_cast<std::uint16_t>(sign | kMaxExponent << kMantissa);
    // Rounding up to the next power of two carries into the exponent, which is correct.
    const int steps = unit + kMantissa + kBias - 1;
    const long bits = static_cast<long>(scaled) + (static_cast<long>(steps) << kMantissa);
    const long infinity = static_cast<long>(kMaxExponent) << kMantissa;
    return static_cast<std::uint16_t>(sign | static_cast<unsigned>(bits < infinity ? bits : infinity));
  }
};

// Element types: bit type, accumulator type, and conversions.
template <class T>
struct Plain {
  using Bits = T;
  using Sum = T;
  static Sum widen(Bits bits) { return bits; }
  static Bits narrow(Sum sum) { return sum; }
};
// Integers are added as unsigned ones, whose overflow is defined.
template <class T, class Unsigned>
struct Whole {
  using Bits = T;
  using Sum = Unsigned;
  static Sum widen(Bits bits) { return static_cast<Unsigned>(bits); }
  static Bits narrow(Sum sum) { return static_cast<T>(sum); }
};
template <int kMantissa>
struct Small {
  using Bits = std::uint16_t;
  using Sum = float;
  static Sum widen(Bits bits) { return Half<kMantissa>::widen(bits); }
  static Bits narrow(Sum sum) { return Half<kMantissa>::narrow(sum); }
};

// The value of a sum's type as an element has it: unsigned sums of signed integers have no order.
template <class Type, class Sum>
bool less(Sum a, Sum b) {
  if constexpr (std::is_floating_point_v<Sum>) {
    return a < b;
  } else {
    return Type::narrow(a) < Type::narrow(b);
  }
}

template <class Type, class Sum>
Sum combine(ncclRedOp_t op, Sum a, Sum b) {
  switch (op) {
    case ncclProd:
      return static_cast<Sum>(a * b);
    case ncclMax:
    case ncclMin:
      if constexpr (std::is_floating_point_v<Sum>) {
        if (std::isnan(a)) return b;
        if (std::isnan(b)) return a;
      }
      return less<Type>(a, b) == (op == ncclMin) ? a : b;
    default:
      return static_cast<Sum>(a + b);
  }
}

template <class Type>
void reduce_as(const Reduction& reduction, const std::vector<const char*>& sources, char* target, std::size_t count) {
  using Bits = typename Type::Bits;
  using Sum = typename Type::Sum;
  Bits scalar_bits;
  std::memcpy(&scalar_bits, &reduction.scalar, sizeof scalar_bits);
  const Sum scalar = Type::widen(scalar_bits);
  for (std::size_t i = 0; i < count; ++i) {
    Sum sum{};
    for (std::size_t s = 0; s < sources.size(); ++s) {
      Bits bits;
      std::memcpy(&bits, sources[s] + i * sizeof bits, sizeof bits);
      Sum value = Type::widen(bits);
      if (reduction.scaled) value = static_cast<Sum>(value * scalar);
      sum = s == 0 ? value : combine<Type>(reduction.op, sum, value);
    }
    Bits result = Type::narrow(sum);
    if (reduction.divisor != 1) result = static_cast<Bits>(result / static_cast<Bits>(reduction.divisor));
    std::memcpy(target + i * sizeof result, &result, sizeof result);
  }
}

template <class Bits>
Reduction scaled_by(Bits scalar) {
  Reduction reduction;
  reduction.scaled = true;
  std::memcpy(&reduction.scalar, &scalar, sizeof scalar);
  return reduction;
}

}  // namespace

std::size_t size_of(ncclDataType_t dtype) {
  switch (dtype) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
  }
  return 0;
}

Reduction average_of(ncclDataType_t dtype, int nranks) {
  const float share = 1.0f / static_cast<float>(nranks);
  switch (dtype) {
    case ncclFloat16:
      return scaled_by(Half<10>::narrow(share));
    case ncclBfloat16:
      return scaled_by(Half<7>::narrow(share));
    case ncclFloat32:
      return scaled_by(share);
    case ncclFloat64:
      return scaled_by(1.0 / nranks);
    default: {
      Reduction reduction;
      reduction.divisor = nranks;
      return reduction;
    }
  }
}

void reduce(ncclDataType_t dtype, const Reduction& reduction, const std::vector<const char*>& sources, char* target,
            std::size_t count) {
  switch (dtype) {
    case ncclInt8:
      return reduce_as<Whole<std::int8_t, std::uint8_t>>(reduction, sources, target, count);
    case ncclUint8:
      return reduce_as<Whole<std::uint8_t, std::uint8_t>>(reduction, sources, target, count);
    case ncclInt32:
      return reduce_as<Whole<std::int32_t, std::uint32_t>>(reduction, sources, target, count);
    case ncclInt64:
      return reduce_as<Whole<std::int64_t, std::uint64_t>>(reduction, sources, target, count);
    case ncclUint32:
      return reduce_as<Whole<std::uint32_t, std::uint32_t>>(reduction, sources, target, count);
    case ncclUint64:
      return reduce_as<Whole<std::uint64_t, std::uint64_t>>(reduction, sources, target, count);
    case ncclFloat16:
      return reduce_as<Small<10>>(reduction, sources, target, count);
    case ncclBfloat16:
      return reduce_as<Small<7>>(reduction, sources, target, count);
    case ncclFloat32:
      return reduce_as<Plain<float>>(reduction, sources, target, count);
    case ncclFloat64:
      return reduce_as<Plain<double>>(reduction, sources, target, count);
  }
  die("the fake NCCL has no type %d", static_cast<int>(dtype));
}

}  // namespace fake
