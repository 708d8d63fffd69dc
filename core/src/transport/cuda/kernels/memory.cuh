// Parameters, loads and stores of all kernels.
//
// The result has the same bits as core/src/reduce, except for the sign and payload of a NaN (a bfloat16 NaN is 0x7fc0
// in both). NVRTC compiles the kernels at run time, for the GPU of the process. Tests compile them with g++, without
// __CUDACC_RTC__, as host kernels that run one thread after the other. A shim then defines __global__, __device__,
// __forceinline__, threadIdx, blockIdx, blockDim, gridDim and at<T>() first.
//
// Thread rule: items are distributed over blocks, and the vectors of an item over the threads of its block. A thread
// reads an element from every source before it writes the element to any target, so a target may be one of the sources.
// The items of a launch are disjoint. A block has at most kMaxThreads threads.
//
// The caller owns all memory. Items and address tables do not change while a kernel runs. The address of an element is
// a multiple of its size. A set stop flag ends a launch early: each block checks it before each item. A launch that
// starts after the flag is set writes nothing, or, if it `fills`, only ones to its targets: NaN in each floating type.
#pragma once

using Address = unsigned long long;

// Elements `first` to `first + count` of tensor range `piece`; at most 32768.
struct BlockRange {
  Address first;
  unsigned piece;
  unsigned count;
};

// Parameters of a launch. It writes what its operator makes of the sources to every target: of means, their sum divided
// by `divisor` (1 to 2^31 - 1).
// Without sources it only fills, and its items may be as long as `count` allows.
struct KernelArgs {
  Address lists;  // device address of the lists; 0: they are in `table`
  Address stop;   // of the copies of a flag that the host may set while the kernel runs, or 0
  // Byte offsets in the lists of BlockRange[nitems], Address[pieces][nsources] and Address[pieces][ntargets]. The
  // addresses are those of element 0 of each tensor range.
  unsigned items, sources, targets;
  unsigned nitems, nsources, ntargets, divisor;
  unsigned fills;      // whether a stopped launch fills the rest of its targets with ones
  double pre, post;    // the factors of the inputs and of the result, of scaled operators
  Address table[448];  // kernel parameters have at most 4 KiB
};

namespace {

// With three blocks per multiprocessor a thread has 80 registers. That is enough except for f16 and bf16 with float64
// sums.
constexpr unsigned kMaxThreads = 256, kBlocks = 3;

// The number of copies of the stop flag, and the bytes from one to the next; as in kernels.rs.
constexpr unsigned kStopCopies = 512, kStopStride = 128;

// The copy of the stop flag that this block reads. Reads of the same line of host memory wait for each other.
__device__ __forceinline__ Address stop_copy(Address stop) { return stop + blockIdx.x % kStopCopies * kStopStride; }

// A unit of 1, 2, 4, 8 or 16 bytes in 32-bit words. The upper part of an incomplete word is 0.
template <unsigned kBytes>
struct Vector {
  unsigned word[(kBytes + 3) / 4];
};

#ifdef __CUDACC_RTC__

#define UNROLL _Pragma("unroll")
#define KEEP_LOOP _Pragma("unroll 1")  // to compile fast, and with few registers
#define OUT_OF_LINE __noinline__

template <class T>
__device__ __forceinline__ T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// A kernel parameter in constant memory, whose address can be taken. Avoids a copy in every thread.
#define PARAMETER(type) const __grid_constant__ type

__device__ __forceinline__ Address address_of(const Address* memory) { return reinterpret_cast<Address>(memory); }

// Loads an entry of the lists through a generic address: the lists are in global memory or in the parameters.
__device__ __forceinline__ Address load_address(Address address) {
  Address value;
  asm("ld.u64 %0, [%1];" : "=l"(value) : "l"(address));
  return value;
}

// Whether the host has set the flag at `stop` (0: no flag). All threads of a block call this together and get the same
// result. One of them reads the flag, bypassing all caches.
__device__ __forceinline__ bool is_stopped(Address stop) {
  if (stop == 0) return false;
  unsigned word = 0;
  if (threadIdx.x == 0) asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(word) : "l"(stop_copy(stop)) : "memory");
  return __syncthreads_or(static_cast<int>(word)) != 0;
}

// Loads and stores are volatile to keep their order, so consecutive loads are in flight together. Nothing is read
// twice, so loads use the streaming cache policy (cs: evict first).
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
#define OUT_OF_LINE __attribute__((noinline))
#define __launch_bounds__(...)
#define PARAMETER(type) const type&

__device__ __forceinline__ Address address_of(const Address* memory) {
  return reinterpret_cast<Address>(memory) + (1ull << 60);
}

__device__ __forceinline__ Address load_address(Address address) { return *at<const Address>(address); }

__device__ __forceinline__ bool is_stopped(Address stop) {
  return stop != 0 && *at<const volatile unsigned>(stop_copy(stop)) != 0;
}

// Like a GPU, traps at an address that is not a multiple of the access size.
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

// Fills `kBytes` with ones.
template <unsigned kBytes>
__device__ __forceinline__ void store_ones(Address address) {
  Vector<kBytes> ones;
  UNROLL for (auto& word : ones.word) word = ~0u;
  store<kBytes>(address, ones);
}

// The address of a launch's lists.
__device__ __forceinline__ Address lists_of(const KernelArgs& args) {
  return args.lists != 0 ? args.lists : address_of(args.table);
}

}  // namespace
