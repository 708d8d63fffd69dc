// Sums over the sources of a piece.
#pragma once

#include "types.cuh"

namespace {

// What the vectors of all sources at one place add up to.
template <class S, unsigned kBytes>
struct Accumulator {
  static constexpr unsigned kElements = kBytes / S::kSize;
  typename S::Acc sums[kElements];

  __device__ __forceinline__ void begin() { UNROLL for (auto& sum : sums) sum = S::kIdentity; }
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
  // The sums as they are.
  __device__ __forceinline__ Vector<kElements * sizeof(typename S::Acc)> wide() const {
    constexpr unsigned kSize = sizeof(typename S::Acc);
    Vector<kElements * kSize> result = {};
    UNROLL for (unsigned e = 0; e < kElements; ++e) {
      if constexpr (kSize == 16) {
        UNROLL for (unsigned w = 0; w < 4; ++w) result.word[4 * e + w] = static_cast<unsigned>(sums[e] >> 32 * w);
      } else {
        set_element<kSize>(result, e, bits_as<typename BitsOf<kSize>::Type>(sums[e]));
      }
    }
    return result;
  }
};
template <unsigned kBytes>
struct Accumulator<Bytes, kBytes> {
  Vector<kBytes> copy;

  __device__ __forceinline__ void begin(const Vector<kBytes>& only) { copy = only; }
  __device__ __forceinline__ Vector<kBytes> mean(const Bytes::Divider&) const { return copy; }
};

// Where an item's elements are.
struct ItemAddresses {
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
__device__ __forceinline__ void store_everywhere(const ItemAddresses& place, unsigned offset, const Vector<kBytes>& v) {
  KEEP_LOOP for (unsigned t = 0; t < place.ntargets; ++t) store<kBytes>(place.target(t) + offset, v);
}

// Adds up a vector of any number of sources, `offset` bytes into the item.
template <class S, unsigned kBytes>
__device__ __forceinline__ Accumulator<S, kBytes> total_of(const ItemAddresses& place, unsigned offset) {
  Accumulator<S, kBytes> total;
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
  return total;
}

// Where an item is.
template <class S>
__device__ __forceinline__ ItemAddresses place_of(const KernelArgs& work, Address lists, const BlockRange& item) {
  return {lists + work.sources + sizeof(Address) * item.piece * work.nsources,
          lists + work.targets + sizeof(Address) * item.piece * work.ntargets, item.first * S::kSize, work.nsources,
          work.ntargets};
}

}  // namespace

// A kernel: what the threads do of a launch, by a type of elements.
#define DL_COMM_KERNEL(name, work_of, S)                                                                \
  extern "C" __global__ void __launch_bounds__(kMaxThreads, kBlocks) name(PARAMETER(KernelArgs) work) { \
    work_of<S>(work);                                                                                   \
  }
