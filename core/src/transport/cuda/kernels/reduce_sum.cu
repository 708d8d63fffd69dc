// The kernels that add elements up and leave the sums as they are, for calls that go on between hosts. A launch has one
// target, and no divisor.
#include "accumulate.cuh"

namespace {

// Adds up an item, 16 bytes of sums at a time where the sources can be loaded so, else one by one.
template <class S>
__device__ __forceinline__ void sum_item(const ItemAddresses& place, Address target, unsigned count) {
  constexpr unsigned kSum = sizeof(typename S::Acc), kElements = 16 / kSum, kBytes = kElements * S::kSize;
  Address places = 0;
  KEEP_LOOP for (unsigned s = 0; s < place.nsources; ++s) places |= place.source(s);
  const unsigned whole = places % kBytes == 0 && target % 16 == 0 ? count / kElements * kElements : 0;
  KEEP_LOOP for (unsigned i = threadIdx.x * kElements; i < whole; i += blockDim.x * kElements) {
    store<16>(target + i * kSum, total_of<S, kBytes>(place, i * S::kSize).wide());
  }
  KEEP_LOOP for (unsigned i = whole + threadIdx.x; i < count; i += blockDim.x) {
    store<kSum>(target + i * kSum, total_of<S, S::kSize>(place, i * S::kSize).wide());
  }
}

// What a thread does.
template <class S>
__device__ __forceinline__ void sum(const KernelArgs& work) {
  const Address lists = lists_of(work);
  KEEP_LOOP for (unsigned i = blockIdx.x; i < work.nitems; i += gridDim.x) {
    if (is_stopped(work.stop)) return;
    const BlockRange item = at<const BlockRange>(lists + work.items)[i];
    const Address target = load_address(lists + work.targets + sizeof(Address) * item.piece);
    sum_item<S>(place_of<S>(work, lists, item), target + item.first * sizeof(typename S::Acc), item.count);
  }
}

}  // namespace

#define DL_COMM_SUM(type, S) DL_COMM_KERNEL(sum_##type, sum, S)
DL_COMM_TYPES(DL_COMM_SUM)
