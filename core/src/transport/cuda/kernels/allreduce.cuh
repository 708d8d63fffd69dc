// The body of the kernels that write what an operator makes of tensors to all targets. They move 16 bytes at once if
// the addresses of an item are equal modulo 16.
#pragma once

#include "accumulate.cuh"

namespace {

// Writes the result of one vector, `offset` bytes into the item.
template <class S, unsigned kBytes>
__device__ __forceinline__ void reduce_vector(const ItemAddresses& addresses, unsigned offset,
                                              const typename S::Divider& divider) {
  store_everywhere(addresses, offset, combine_sources<S, kBytes>(addresses, offset, divider).result(divider));
}

// Writes the results of vectors with kSources sources, kVectors per iteration, `stride` bytes apart. Starts `offset`
// bytes into the item and stops when fewer than kVectors remain before `end`. Returns the offset of the rest.
template <class S, unsigned kBytes, unsigned kSources, unsigned kVectors>
__device__ __forceinline__ unsigned reduce_batches(const ItemAddresses& addresses, unsigned offset, unsigned stride,
                                                   unsigned end, const typename S::Divider& divider) {
  Address sources[kSources];
  UNROLL for (unsigned s = 0; s < kSources; ++s) sources[s] = addresses.source(s);
  KEEP_LOOP for (; offset + (kVectors - 1) * stride < end; offset += kVectors * stride) {
    Vector<kBytes> loaded[kSources][kVectors];
    UNROLL for (unsigned s = 0; s < kSources; ++s) {
      UNROLL for (unsigned v = 0; v < kVectors; ++v) loaded[s][v] = load<kBytes>(sources[s] + (offset + v * stride));
    }
    UNROLL for (unsigned v = 0; v < kVectors; ++v) {
      Accumulator<S, kBytes> total;
      total.begin(loaded[0][v], divider);
      if constexpr (kSources > 1) {
        UNROLL for (unsigned s = 1; s < kSources; ++s) total.add(loaded[s][v], divider);
      }
      loaded[0][v] = total.result(divider);
    }
    KEEP_LOOP for (unsigned t = 0; t < addresses.ntargets; ++t) {
      const Address target = addresses.target(t) + offset;
      UNROLL for (unsigned v = 0; v < kVectors; ++v) store<kBytes>(target + v * stride, loaded[0][v]);
    }
  }
  return offset;
}

// Writes the results of an item's vectors between the bytes `begin` and `end`. Each thread has about four loads in
// flight to hide the latency of memory.
template <class S, unsigned kBytes>
__device__ __forceinline__ void reduce_vector_range(const ItemAddresses& addresses, unsigned begin, unsigned end,
                                                    const typename S::Divider& divider) {
  const unsigned stride = blockDim.x * kBytes;
  unsigned offset = begin + threadIdx.x * kBytes;
  if constexpr (kCopies<S>) {
    offset = reduce_batches<S, kBytes, 1, 4>(addresses, offset, stride, end, divider);
  } else if constexpr (kBytes == 16) {
    // The most frequent numbers of sources. More cases would cost compile time and registers.
    if (addresses.nsources == 2) {
      offset = reduce_batches<S, kBytes, 2, 2>(addresses, offset, stride, end, divider);
    } else if (addresses.nsources == 4) {
      offset = reduce_batches<S, kBytes, 4, 1>(addresses, offset, stride, end, divider);
    }
  }
  KEEP_LOOP for (; offset < end; offset += stride) reduce_vector<S, kBytes>(addresses, offset, divider);
}

// The vector size for an item: 16 or 4 bytes if all addresses are equal modulo that size, else 0 (single elements).
template <class S>
__device__ __forceinline__ unsigned vector_size(const ItemAddresses& addresses) {
  const Address first = addresses.source(0);
  Address differences = 0;
  KEEP_LOOP for (unsigned s = 1; s < addresses.nsources; ++s) differences |= first ^ addresses.source(s);
  KEEP_LOOP for (unsigned t = 0; t < addresses.ntargets; ++t) differences |= first ^ addresses.target(t);
  if (differences % 16 == 0) return 16;
  return S::kSize < 4 && differences % 4 == 0 ? 4 : 0;
}

// Writes the results of an item: vectors where possible, single elements before and after them.
template <class S>
__device__ __forceinline__ void reduce_item(const ItemAddresses& addresses, unsigned count,
                                            const typename S::Divider& divider) {
  const unsigned size = vector_size<S>(addresses), total = count * S::kSize;
  unsigned begin = total, end = total;  // of the vectors
  if (size != 0) {
    const unsigned to_multiple = (0 - static_cast<unsigned>(addresses.source(0))) & (size - 1);
    begin = to_multiple < total ? to_multiple : total;
    end = begin + ((total - begin) & ~(size - 1));
  }
  KEEP_LOOP for (unsigned i = threadIdx.x * S::kSize; i < total - (end - begin); i += blockDim.x * S::kSize) {
    reduce_vector<S, S::kSize>(addresses, i < begin ? i : i + (end - begin), divider);
  }
  if (size == 16) {
    reduce_vector_range<S, 16>(addresses, begin, end, divider);
  } else if constexpr (S::kSize < 4) {
    if (size == 4) reduce_vector_range<S, 4>(addresses, begin, end, divider);
  }
}

// The body of a thread.
template <class S>
__device__ __forceinline__ void reduce(const KernelArgs& args) {
  const typename S::Divider divider(args);
  const Address lists = lists_of(args);
  KEEP_LOOP for (unsigned i = blockIdx.x; i < args.nitems; i += gridDim.x) {
    const bool stopped = is_stopped(args.stop);
    if (stopped ? args.fills == 0 : args.nsources == 0) return;
    const BlockRange item = at<const BlockRange>(lists + args.items)[i];
    const ItemAddresses addresses = addresses_of<S>(args, lists, item);
    if (stopped) {
      fill_item<S>(addresses, item.count);
    } else {
      reduce_item<S>(addresses, item.count, divider);
    }
  }
}

}  // namespace
