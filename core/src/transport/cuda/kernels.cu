// The kernels that average tensors on a GPU, and one that copies bytes. The bits are those of core/src/reduce, but for
// the sign and payload of a NaN (a bfloat16 NaN is 0x7fc0 here as there).
//
// NVRTC compiles this file when a program runs, for the GPU that is there, without a header in reach. g++ compiles it
// for tests, without __CUDACC_RTC__, as a twin that runs one thread after the other. Before it comes a shim there, of
// __global__, __device__, __forceinline__, threadIdx, blockIdx, blockDim, gridDim and at<T>().
//
// Thread rule: blocks take items in turn, and a block's threads take an item's vectors in turn. A thread reads an
// element from every source before it writes it to any target, so a target may be one of the sources. No two items of a
// launch may have elements in common. A block has kMaxThreads threads at most.
//
// All memory belongs to the caller, and the items and tables of addresses do not change while a kernel runs. An
// element's address is a multiple of its size. Where the addresses of an item differ by multiples of 16 bytes, these
// are moved at once.

using Address = unsigned long long;

// Elements `first` to `first + count` of a piece; 32768 at most.
struct Item {
  Address first;
  unsigned piece;
  unsigned count;
};

// What a launch does: the mean of the sources, that is their sum over `divisor` (1 to 2^31 - 1), to every target.
struct Work {
  Address items;             // of Item[nitems]
  Address sources, targets;  // of Address[pieces][nsources] and Address[pieces][ntargets]: of element 0 of each piece
  unsigned nitems, nsources, ntargets, divisor;
};

namespace {

constexpr unsigned kMaxThreads = 512;

// What is moved at once: 1, 2, 4, 8 or 16 bytes, in 32-bit words. The upper part of a word that is not full is 0.
template <unsigned kBytes>
struct Vector {
  unsigned word[(kBytes + 3) / 4];
};

#ifdef __CUDACC_RTC__

#define UNROLL _Pragma("unroll")
#define KEEP_LOOP _Pragma("unroll 1")  // to compile fast, and with few registers

template <class T>
__device__ __forceinline__ T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

__device__ __forceinline__ Address load_address(Address address) {
  Address value;
  asm("ld.global.nc.u64 %0, [%1];" : "=l"(value) : "l"(address));
  return value;
}

// Loads and stores are volatile, so that they keep their order: what is loaded together is under way together. Nothing
// is read twice, so what is loaded (cs: streaming) leaves the caches first.
template <unsigned kBytes>
__device__ __forceinline__ Vector<kBytes> load(Address address) {
  Vector<kBytes> v;
  if constexpr (kBytes == 16) {
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(address));
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.global.cs.v2.u32 {%0, %1}, [%2];" : "=r"(v.word[0]), "=r"(v.word[1]) : "l"(address));
  } else if constexpr (kBytes == 4) {
    asm volatile("ld.global.cs.u32 %0, [%1];" : "=r"(v.word[0]) : "l"(address));
  } else if constexpr (kBytes == 2) {
    asm volatile("ld.global.cs.u16 %0, [%1];" : "=r"(v.word[0]) : "l"(address));
  } else {
    asm volatile("ld.global.cs.u8 %0, [%1];" : "=r"(v.word[0]) : "l"(address));
  }
  return v;
}

template <unsigned kBytes>
__device__ __forceinline__ void store(Address address, Vector<kBytes> v) {
  if constexpr (kBytes == 16) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.word[0]), "r"(v.word[1]),
                 "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(v.word[0]), "r"(v.word[1]) : "memory");
  } else if constexpr (kBytes == 4) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(v.word[0]) : "memory");
  } else if constexpr (kBytes == 2) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(address), "r"(v.word[0]) : "memory");
  } else {
    asm volatile("st.global.u8 [%0], %1;" ::"l"(address), "r"(v.word[0]) : "memory");
  }
}

#else

#define UNROLL
#define KEEP_LOOP
#define __launch_bounds__(...)

__device__ __forceinline__ Address load_address(Address address) { return *at<const Address>(address); }

// A GPU stops at an address that is no multiple of the size of what is loaded or stored.
template <unsigned kBytes>
__device__ __forceinline__ void stop_unless_aligned(Address address) {
  if (address % kBytes != 0) __builtin_trap();
}

template <unsigned kBytes>
__device__ __forceinline__ Vector<kBytes> load(Address address) {
  stop_unless_aligned<kBytes>(address);
  Vector<kBytes> v = {};
  __builtin_memcpy(&v, at<const char>(address), kBytes);
  return v;
}

template <unsigned kBytes>
__device__ __forceinline__ void store(Address address, Vector<kBytes> v) {
  stop_unless_aligned<kBytes>(address);
  __builtin_memcpy(at<char>(address), &v, kBytes);
}

#endif

// The same bits as another type. (A union: it is the one way that every NVRTC and g++ have.)
template <class To, class From>
__device__ __forceinline__ To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "one has as many bits as the other");
  const union {
    From from;
    To to;
  } bits = {from};
  return bits.to;
}

// An element's bits, in as many words as it takes.
template <unsigned kSize>
struct BitsOf {
  using Type = unsigned;
};
template <>
struct BitsOf<8> {
  using Type = unsigned long long;
};

// The bits of element `i` of a vector. The upper ones are 0.
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

// Sets element `i` of a vector, which is 0 so far; the upper bits are 0.
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

// Conversions, all exact or to the nearest, ties to even, but for the last. The twin converts float16 as convert.rs of
// core/src/reduce does, which says why. A GPU's own conversions differ from that in NaN that its arithmetic does not
// give: it has one NaN, 0x7fffffff in float32, and both make 0x7fff of that.

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

// (A GPU's own conversion gives another NaN, and not all GPUs have one.)
__device__ __forceinline__ unsigned f32_to_bf16(float single) {
  const unsigned bits = bits_as<unsigned>(single);
  const unsigned rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (bits & ~kSign) > kInfinity ? 0x7fc0 : rounded;
}

// Rounded to odd: an inexact result is that of the two neighbours whose last bit is one. Rounding that to a type with
// two bits less or fewer gives what rounding the float64 to it at once gives.
__device__ __forceinline__ float f64_to_odd_f32(double value) {
  const float nearest = static_cast<float>(value);
  const double back = nearest;
  const bool away = (back < 0 ? -back : back) > (value < 0 ? -value : value);
  const unsigned bits = bits_as<unsigned>(nearest);
  return back == value ? nearest : bits_as<float>((bits - away) | 1);
}

// Division of sums by the same number over and over.

// Floating point: a product with the reciprocal where that is exact, and has the same bits.
template <class Acc>
struct FloatDivider {
  Acc divisor, reciprocal;
  bool exact;

  __device__ __forceinline__ explicit FloatDivider(unsigned by)
      : divisor(static_cast<Acc>(by)), reciprocal(1 / divisor), exact((by & (by - 1)) == 0) {}

  template <unsigned kCount>
  __device__ __forceinline__ void divide(Acc (&sums)[kCount]) const {
    if (exact) {
      UNROLL for (Acc& sum : sums) sum *= reciprocal;
    } else {
      UNROLL for (Acc& sum : sums) sum /= divisor;
    }
  }
};

// Non-negative integers below 2^31, by a multiplication and a shift. With 2^(shift - 1) < by <= 2^shift, the factor is
// above 2^(31 + shift) / by, by 1 at most. So `n * factor` is above 2^(31 + shift) * n / by, by n at most. To reach the
// next integer times 2^(31 + shift) it would take 2^(31 + shift) / by, which is 2^31 or more. (Granlund and Montgomery,
// "Division by invariant integers using multiplication", 1994.)
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

// The same below 2^63.
struct Divider63 {
  unsigned long long factor;
  unsigned by, shift;

  __device__ __forceinline__ explicit Divider63(unsigned by) : by(by), shift(0) {
    while (1u << shift < by) ++shift;
    // 2^(63 + shift) / by, in two steps of 32 bits.
    const unsigned long long power = 1ull << (31 + shift);
    factor = (power / by << 32) + ((power % by << 32) / by) + 1;
  }
  __device__ __forceinline__ unsigned long long quotient(unsigned long long n) const {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(2 * n) * factor >> 64) >> shift;
  }
  // The lower 64 bits of the quotient of a number below 2^96, in steps of 32 bits.
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

// Integers, toward zero.
template <class Acc, class Magnitude, class Divider>
struct IntegerDivider {
  Divider divider;

  __device__ __forceinline__ explicit IntegerDivider(unsigned by) : divider(by) {}

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

// The types: the size of an element, what sums are kept in, what a sum of nothing is (so that adding it changes
// nothing, the sign of zero included), and the conversions.

template <class Float>
struct FloatSum {
  using Acc = Float;
  using Divider = FloatDivider<Float>;
  static constexpr Acc kNothing = -0.0f;
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

// What the dividers need: a sum of 8-bit integers is below 2^31 for 2^23 sources, that of 32-bit ones below 2^63 for
// any number of them, and that of 64-bit ones below 2^96.
template <class Element, class Sum, class Magnitude, class By>
struct Integer {
  using Acc = Sum;
  using Divider = IntegerDivider<Sum, Magnitude, By>;
  static constexpr unsigned kSize = sizeof(Element);
  static constexpr Acc kNothing = 0;
  using Bits = typename BitsOf<kSize>::Type;
  __device__ __forceinline__ static Acc widen(Bits bits) { return static_cast<Element>(bits); }
  __device__ __forceinline__ static Bits narrow(Acc sum) {
    return static_cast<Bits>(sum) & (~Bits(0) >> 8 * (sizeof(Bits) - kSize));
  }
};
using I8 = Integer<signed char, int, unsigned, Divider31>;
using U8 = Integer<unsigned char, int, unsigned, Divider31>;
using I32 = Integer<int, long long, unsigned long long, Divider63>;
using I64 = Integer<long long, __int128, unsigned __int128, Divider63>;

// Bytes, which are copied from one source as they are.
struct Bytes {
  struct Divider {
    __device__ __forceinline__ explicit Divider(unsigned) {}
  };
  static constexpr unsigned kSize = 1;
};
template <class S>
constexpr bool kCopies = false;
template <>
constexpr bool kCopies<Bytes> = true;

// What the vectors of all sources at one place add up to.
template <class S, unsigned kBytes>
struct Total {
  static constexpr unsigned kElements = kBytes / S::kSize;
  typename S::Acc sums[kElements];

  __device__ __forceinline__ void begin() { UNROLL for (auto& sum : sums) sum = S::kNothing; }
  __device__ __forceinline__ void begin(const Vector<kBytes>& first) {
    UNROLL for (unsigned e = 0; e < kElements; ++e) sums[e] = S::widen(element<S::kSize>(first, e));
  }
  __device__ __forceinline__ void add(const Vector<kBytes>& next) {
    UNROLL for (unsigned e = 0; e < kElements; ++e) sums[e] += S::widen(element<S::kSize>(next, e));
  }
  __device__ __forceinline__ Vector<kBytes> mean(const typename S::Divider& divider) {
    divider.divide(sums);
    Vector<kBytes> result = {};
    UNROLL for (unsigned e = 0; e < kElements; ++e) set_element<S::kSize>(result, e, S::narrow(sums[e]));
    return result;
  }
};
template <unsigned kBytes>
struct Total<Bytes, kBytes> {
  Vector<kBytes> copy;

  __device__ __forceinline__ void begin(const Vector<kBytes>& only) { copy = only; }
  __device__ __forceinline__ Vector<kBytes> mean(const Bytes::Divider&) const { return copy; }
};

// Where an item's elements are.
struct Place {
  Address sources, targets;  // the rows of its piece in the tables
  Address offset;            // of its first element, in bytes
  unsigned nsources, ntargets;

  __device__ __forceinline__ Address source(unsigned s) const {
    return load_address(sources + sizeof(Address) * s) + offset;
  }
  __device__ __forceinline__ Address target(unsigned t) const {
    return load_address(targets + sizeof(Address) * t) + offset;
  }
};

// Sources that are loaded together, where their number is known only when a kernel runs.
constexpr unsigned kGroup = 4;

template <unsigned kBytes>
__device__ __forceinline__ void store_everywhere(const Place& place, unsigned offset, const Vector<kBytes>& v) {
  KEEP_LOOP for (unsigned t = 0; t < place.ntargets; ++t) store<kBytes>(place.target(t) + offset, v);
}

// Averages a vector of any number of sources, `offset` bytes into the item.
template <class S, unsigned kBytes>
__device__ __forceinline__ void average_vector(const Place& place, unsigned offset,
                                               const typename S::Divider& divider) {
  Total<S, kBytes> total;
  if constexpr (kCopies<S>) {
    total.begin(load<kBytes>(place.source(0) + offset));
  } else {
    total.begin();
    KEEP_LOOP for (unsigned group = 0; group < place.nsources; group += kGroup) {
      Vector<kBytes> loaded[kGroup];
      UNROLL for (unsigned s = 0; s < kGroup; ++s) {
        if (group + s < place.nsources) loaded[s] = load<kBytes>(place.source(group + s) + offset);
      }
      UNROLL for (unsigned s = 0; s < kGroup; ++s) {
        if (group + s < place.nsources) total.add(loaded[s]);
      }
    }
  }
  store_everywhere(place, offset, total.mean(divider));
}

// Averages vectors of kSources sources, kVectors at a time, the first one `offset` bytes into the item, `stride` bytes
// apart, as long as so many are left before `end`. Returns the offset of what is left.
template <class S, unsigned kBytes, unsigned kSources, unsigned kVectors>
__device__ __forceinline__ unsigned average_vectors(const Place& place, unsigned offset, unsigned stride, unsigned end,
                                                    const typename S::Divider& divider) {
  Address sources[kSources];
  UNROLL for (unsigned s = 0; s < kSources; ++s) sources[s] = place.source(s);
  KEEP_LOOP for (; offset + (kVectors - 1) * stride < end; offset += kVectors * stride) {
    Vector<kBytes> loaded[kSources][kVectors];
    UNROLL for (unsigned s = 0; s < kSources; ++s) {
      UNROLL for (unsigned v = 0; v < kVectors; ++v) loaded[s][v] = load<kBytes>(sources[s] + (offset + v * stride));
    }
    UNROLL for (unsigned v = 0; v < kVectors; ++v) {
      Total<S, kBytes> total;
      total.begin(loaded[0][v]);
      if constexpr (kSources > 1) {
        UNROLL for (unsigned s = 1; s < kSources; ++s) total.add(loaded[s][v]);
      }
      loaded[0][v] = total.mean(divider);
    }
    KEEP_LOOP for (unsigned t = 0; t < place.ntargets; ++t) {
      const Address target = place.target(t) + offset;
      UNROLL for (unsigned v = 0; v < kVectors; ++v) store<kBytes>(target + v * stride, loaded[0][v]);
    }
  }
  return offset;
}

// Averages the vectors of an item, which are those from byte `begin` to byte `end`.
//
// Memory is slow to answer, and delivers the more the more it is asked for: a thread has about four vectors under way.
template <class S, unsigned kBytes>
__device__ __forceinline__ void average_run(const Place& place, unsigned begin, unsigned end,
                                            const typename S::Divider& divider) {
  const unsigned stride = blockDim.x * kBytes;
  unsigned offset = begin + threadIdx.x * kBytes;
  if constexpr (kCopies<S>) {
    offset = average_vectors<S, kBytes, 1, 4>(place, offset, stride, end, divider);
  } else if constexpr (kBytes == 16) {
    // The most frequent numbers of sources; more code would take longer to compile, and more registers.
    if (place.nsources == 2) {
      offset = average_vectors<S, kBytes, 2, 2>(place, offset, stride, end, divider);
    } else if (place.nsources == 4) {
      offset = average_vectors<S, kBytes, 4, 1>(place, offset, stride, end, divider);
    }
  }
  KEEP_LOOP for (; offset < end; offset += stride) average_vector<S, kBytes>(place, offset, divider);
}

// The size of the vectors that an item has at the same distance from its begin in all sources and targets: 16 or 4
// bytes, or 0 if there are none larger than an element.
template <class S>
__device__ __forceinline__ unsigned vector_size(const Place& place) {
  const Address first = place.source(0);
  Address differences = 0;
  KEEP_LOOP for (unsigned s = 1; s < place.nsources; ++s) differences |= first ^ place.source(s);
  KEEP_LOOP for (unsigned t = 0; t < place.ntargets; ++t) differences |= first ^ place.target(t);
  if (differences % 16 == 0) return 16;
  return S::kSize < 4 && differences % 4 == 0 ? 4 : 0;
}

// Averages an item: in vectors as far as can be, the elements before and after them one by one.
template <class S>
__device__ __forceinline__ void average_item(const Place& place, unsigned count, const typename S::Divider& divider) {
  const unsigned size = vector_size<S>(place), total = count * S::kSize;
  unsigned begin = total, end = total;  // of the vectors
  if (size != 0) {
    const unsigned to_multiple = (0 - static_cast<unsigned>(place.source(0))) & (size - 1);
    begin = to_multiple < total ? to_multiple : total;
    end = begin + ((total - begin) & ~(size - 1));
  }
  KEEP_LOOP for (unsigned i = threadIdx.x * S::kSize; i < total - (end - begin); i += blockDim.x * S::kSize) {
    average_vector<S, S::kSize>(place, i < begin ? i : i + (end - begin), divider);
  }
  if (size == 16) {
    average_run<S, 16>(place, begin, end, divider);
  } else if constexpr (S::kSize < 4) {
    if (size == 4) average_run<S, 4>(place, begin, end, divider);
  }
}

// What a thread does.
template <class S>
__device__ __forceinline__ void average(const Work& work) {
  const typename S::Divider divider(work.divisor);
  KEEP_LOOP for (unsigned i = blockIdx.x; i < work.nitems; i += gridDim.x) {
    const Item item = at<const Item>(work.items)[i];
    const Place place = {work.sources + sizeof(Address) * item.piece * work.nsources,
                         work.targets + sizeof(Address) * item.piece * work.ntargets, item.first * S::kSize,
                         work.nsources, work.ntargets};
    average_item<S>(place, item.count, divider);
  }
}

}  // namespace

#define DL_COMM_KERNEL(name, S) \
  extern "C" __global__ void __launch_bounds__(kMaxThreads, 2) name(Work work) { average<S>(work); }

DL_COMM_KERNEL(average_f32, F32)
DL_COMM_KERNEL(average_f64, F64)
DL_COMM_KERNEL(average_f16, F16)
DL_COMM_KERNEL(average_bf16, BF16)
DL_COMM_KERNEL(average_i8, I8)
DL_COMM_KERNEL(average_u8, U8)
DL_COMM_KERNEL(average_i32, I32)
DL_COMM_KERNEL(average_i64, I64)
DL_COMM_KERNEL(average_f32_precise, F32Precise)
DL_COMM_KERNEL(average_f16_precise, F16Precise)
DL_COMM_KERNEL(average_bf16_precise, BF16Precise)
DL_COMM_KERNEL(copy_bytes, Bytes)

// Calls X with the name of every kernel.
// clang-format off
#define DL_COMM_KERNELS(X) \
  X(average_f32) X(average_f64) X(average_f16) X(average_bf16) X(average_i8) X(average_u8) X(average_i32) \
  X(average_i64) X(average_f32_precise) X(average_f16_precise) X(average_bf16_precise) X(copy_bytes)
// clang-format on
