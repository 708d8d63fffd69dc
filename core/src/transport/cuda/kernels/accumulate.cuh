// Accumulators: what an operator makes of the sources of a tensor range.
#pragma once

#include "types.cuh"

namespace {

// What the operator of S makes of the vectors that all sources have at one offset.
template <class S, unsigned kBytes>
struct Accumulator {
  static constexpr unsigned kElements = kBytes / S::kSize;
  typename S::Acc totals[kElements];

  __device__ __forceinline__ void begin(const Vector<kBytes>& first, const typename S::Divider& divider) {
    UNROLL for (unsigned e = 0; e < kElements; ++e) totals[e] = divider.lift(S::widen(element<S::kSize>(first, e)));
  }
  __device__ __forceinline__ void add(const Vector<kBytes>& next, const typename S::Divider& divider) {
    UNROLL for (unsigned e = 0; e < kElements; ++e) {
      totals[e] = S::combine(totals[e], divider.lift(S::widen(element<S::kSize>(next, e))));
    }
  }
  // The elements, after the division of a mean.
  __device__ __forceinline__ Vector<kBytes> result(const typename S::Divider& divider) {
    divider.divide(totals);
    Vector<kBytes> result = {};
    UNROLL for (unsigned e = 0; e < kElements; ++e) set_element<S::kSize>(result, e, S::narrow(totals[e]));
    return result;
  }
  // The accumulators as they are.
  __device__ __forceinline__ Vector<kElements * sizeof(typename S::Acc)> wide() const {
    constexpr unsigned kSize = sizeof(typename S::Acc);
    Vector<kElements * kSize> result = {};
    UNROLL for (unsigned e = 0; e < kElements; ++e) {
      if constexpr (kSize == 16) {
        UNROLL for (unsigned w = 0; w < 4; ++w) result.word[4 * e + w] = static_cast<unsigned>(totals[e] >> 32 * w);
      } else {
        set_element<kSize>(result, e, bits_as<typename BitsOf<kSize>::Type>(totals[e]));
      }
    }
    return result;
  }
};
// Of bits, a word at a time.
template <class Operator, unsigned kBytes>
struct Accumulator<Bitwise<Operator>, kBytes> {
  Vector<kBytes> total;

  __device__ __forceinline__ void begin(const Vector<kBytes>& first, const Undivided&) { total = first; }
  __device__ __forceinline__ void add(const Vector<kBytes>& next, const Undivided&) {
    UNROLL for (unsigned w = 0; w < sizeof next.word / 4; ++w) {
      total.word[w] = Operator::combine(total.word[w], next.word[w]);
    }
  }
  __device__ __forceinline__ Vector<kBytes> result(const Undivided&) const { return total; }
};
template <unsigned kBytes>
struct Accumulator<Bytes, kBytes> {
  Vector<kBytes> copy;

  __device__ __forceinline__ void begin(const Vector<kBytes>& only, const Undivided&) { copy = only; }
  __device__ __forceinline__ Vector<kBytes> result(const Undivided&) const { return copy; }
};

// The addresses of an item's elements in all sources and targets.
struct ItemAddresses {
  Address sources, targets;  // of the item's rows in the address tables
  Address offset;            // of the item's first element in its tensor range, in bytes
  unsigned nsources, ntargets;

  __device__ __forceinline__ Address source(unsigned s) const {
    return load_address(sources + sizeof(Address) * s) + offset;
  }
  __device__ __forceinline__ Address target(unsigned t) const {
    return load_address(targets + sizeof(Address) * t) + offset;
  }
};

// Number of sources that a thread loads together if their total number is known only at run time.
constexpr unsigned kGroup = 4;

template <unsigned kBytes>
__device__ __forceinline__ void store_everywhere(const ItemAddresses& addresses, unsigned offset,
                                                 const Vector<kBytes>& v) {
  KEEP_LOOP for (unsigned t = 0; t < addresses.ntargets; ++t) store<kBytes>(addresses.target(t) + offset, v);
}

// Fills an item of all targets with ones.
template <class S>
__device__ __forceinline__ void fill_item(const ItemAddresses& addresses, unsigned count) {
  KEEP_LOOP for (unsigned t = 0; t < addresses.ntargets; ++t) {
    const Address target = addresses.target(t);
    KEEP_LOOP for (unsigned i = threadIdx.x; i < count; i += blockDim.x)
        store_ones<S::kSize>(target + Address{S::kSize} * i);
  }
}

// Combines the vectors of all sources, `offset` bytes into the item.
template <class S, unsigned kBytes>
__device__ __forceinline__ Accumulator<S, kBytes> combine_sources(const ItemAddresses& addresses, unsigned offset,
                                                                  const typename S::Divider& divider) {
  Accumulator<S, kBytes> total;
  total.begin(load<kBytes>(addresses.source(0) + offset), divider);
  if constexpr (!kCopies<S>) {
    KEEP_LOOP for (unsigned first = 1; first < addresses.nsources; first += kGroup) {
      Vector<kBytes> loaded[kGroup];
      UNROLL for (unsigned s = 0; s < kGroup; ++s) {
        if (first + s < addresses.nsources) loaded[s] = load<kBytes>(addresses.source(first + s) + offset);
      }
      UNROLL for (unsigned s = 0; s < kGroup; ++s) {
        if (first + s < addresses.nsources) total.add(loaded[s], divider);
      }
    }
  }
  return total;
}

// The addresses of `item`.
template <class S>
__device__ __forceinline__ ItemAddresses addresses_of(const KernelArgs& args, Address lists, const BlockRange& item) {
  return {lists + args.sources + sizeof(Address) * item.piece * args.nsources,
          lists + args.targets + sizeof(Address) * item.piece * args.ntargets, item.first * S::kSize, args.nsources,
          args.ntargets};
}

}  // namespace

// Defines kernel `name`, which runs `body` for the element type S.
#define DL_COMM_KERNEL(name, body, S) \
  extern "C" __global__ void __launch_bounds__(kMaxThreads, kBlocks) name(PARAMETER(KernelArgs) args) { body<S>(args); }
