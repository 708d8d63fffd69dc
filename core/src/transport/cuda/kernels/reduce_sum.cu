// Kernels that write undivided sums, for the reduction between hosts. A launch has one target and ignores `divisor`.
#include "accumulate.cuh"

namespace {

// Sums an item: 16 bytes of sums per store if the sources are aligned for it, else single elements.
template <class S>
__device__ __forceinline__ void sum_item(const ItemAddresses& addresses, Address target, unsigned count,
                                         const typename S::Divider& divider) {
  constexpr unsigned kSum = sizeof(typename S::Acc), kElements = 16 / kSum, kBytes = kElements * S::kSize;
  Address alignment = 0;
  KEEP_LOOP for (unsigned s = 0; s < addresses.nsources; ++s) alignment |= addresses.source(s);
  const unsigned whole = alignment % kBytes == 0 && target % 16 == 0 ? count / kElements * kElements : 0;
  KEEP_LOOP for (unsigned i = threadIdx.x * kElements; i < whole; i += blockDim.x * kElements) {
    store<16>(target + i * kSum, combine_sources<S, kBytes>(addresses, i * S::kSize, divider).wide());
  }
  KEEP_LOOP for (unsigned i = whole + threadIdx.x; i < count; i += blockDim.x) {
    store<kSum>(target + i * kSum, combine_sources<S, S::kSize>(addresses, i * S::kSize, divider).wide());
  }
}

// The body of a thread.
template <class S>
__device__ __forceinline__ void sum(const KernelArgs& args) {
  const typename S::Divider divider(args);
  const Address lists = lists_of(args);
  KEEP_LOOP for (unsigned i = blockIdx.x; i < args.nitems; i += gridDim.x) {
    if (is_stopped(args.stop)) return;
    const BlockRange item = at<const BlockRange>(lists + args.items)[i];
    const Address target = load_address(lists + args.targets + sizeof(Address) * item.piece);
    sum_item<S>(addresses_of<S>(args, lists, item), target + item.first * sizeof(typename S::Acc), item.count, divider);
  }
}

}  // namespace

#define DL_COMM_SUM(type, S) DL_COMM_KERNEL(sum_##type, sum, S)
DL_COMM_TYPES(DL_COMM_SUM)
