// The kernels that average tensors on a GPU, and one that copies bytes. Where the addresses of an item differ by
// multiples of 16 bytes, these are moved at once.
#include "accumulate.cuh"

namespace {

// Averages such a vector.
template <class S, unsigned kBytes>
__device__ __forceinline__ void average_vector(const ItemAddresses& place, unsigned offset,
                                               const typename S::Divider& divider) {
  store_everywhere(place, offset, total_of<S, kBytes>(place, offset).mean(divider));
}

// Averages vectors of kSources sources, kVectors at a time, the first one `offset` bytes into the item, `stride` bytes
// apart, as long as so many are left before `end`. Returns the offset of what is left.
template <class S, unsigned kBytes, unsigned kSources, unsigned kVectors>
__device__ __forceinline__ unsigned average_vectors(const ItemAddresses& place, unsigned offset, unsigned stride,
                                                    unsigned end, const typename S::Divider& divider) {
  Address sources[kSources];
  UNROLL for (unsigned s = 0; s < kSources; ++s) sources[s] = place.source(s);
  KEEP_LOOP for (; offset + (kVectors - 1) * stride < end; offset += kVectors * stride) {
    Vector<kBytes> loaded[kSources][kVectors];
    UNROLL for (unsigned s = 0; s < kSources; ++s) {
      UNROLL for (unsigned v = 0; v < kVectors; ++v) loaded[s][v] = load<kBytes>(sources[s] + (offset + v * stride));
    }
    UNROLL for (unsigned v = 0; v < kVectors; ++v) {
      Accumulator<S, kBytes> total;
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
__device__ __forceinline__ void average_run(const ItemAddresses& place, unsigned begin, unsigned end,
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
__device__ __forceinline__ unsigned vector_size(const ItemAddresses& place) {
  const Address first = place.source(0);
  Address differences = 0;
  KEEP_LOOP for (unsigned s = 1; s < place.nsources; ++s) differences |= first ^ place.source(s);
  KEEP_LOOP for (unsigned t = 0; t < place.ntargets; ++t) differences |= first ^ place.target(t);
  if (differences % 16 == 0) return 16;
  return S::kSize < 4 && differences % 4 == 0 ? 4 : 0;
}

// Averages an item: in vectors as far as can be, the elements before and after them one by one.
template <class S>
__device__ __forceinline__ void average_item(const ItemAddresses& place, unsigned count,
                                             const typename S::Divider& divider) {
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
__device__ __forceinline__ void average(const KernelArgs& work) {
  const typename S::Divider divider(work.divisor);
  const Address lists = lists_of(work);
  KEEP_LOOP for (unsigned i = blockIdx.x; i < work.nitems; i += gridDim.x) {
    if (is_stopped(work.stop)) return;
    const BlockRange item = at<const BlockRange>(lists + work.items)[i];
    average_item<S>(place_of<S>(work, lists, item), item.count, divider);
  }
}

}  // namespace

#define DL_COMM_MEAN(type, S) DL_COMM_KERNEL(average_##type, average, S)
DL_COMM_TYPES(DL_COMM_MEAN)
DL_COMM_KERNEL(copy_bytes, average, Bytes)
