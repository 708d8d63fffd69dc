// What all kernels are made of: what they are given, and how they load and store.
//
// The bits that they make are those of core/src/reduce, but for the sign and payload of a NaN (a bfloat16 NaN is 0x7fc0
// here as there). NVRTC compiles them when a program runs, for the GPU that is there. g++ compiles them for tests,
// without __CUDACC_RTC__, as host_kernels that run one thread after the other. Before them comes a shim there, of
// __global__,
// __device__, __forceinline__, threadIdx, blockIdx, blockDim, gridDim and at<T>().
//
// Thread rule: blocks take items in turn, and a block's threads take an item's vectors in turn. A thread reads an
// element from every source before it writes it to any target, so a target may be one of the sources. No two items of a
// launch may have elements in common. A block has kMaxThreads threads at most.
//
// All memory belongs to the caller, and the items and tables of addresses do not change while a kernel runs. An
// element's address is a multiple of its size. A launch ends early when its stop word is not 0: a block looks at it
// before each item, and nothing is written by a launch that starts after it was set.
#pragma once

using Address = unsigned long long;

// Elements `first` to `first + count` of a piece; 32768 at most.
struct BlockRange {
  Address first;
  unsigned piece;
  unsigned count;
};

// What a launch does: the mean of the sources, that is their sum over `divisor` (1 to 2^31 - 1), to every target.
struct KernelArgs {
  Address lists;  // of the lists, in device memory; 0: they are in `table`
  Address stop;   // of a word that the host may set while the kernel runs, or 0
  // Where they begin in the lists, in bytes: BlockRange[nitems], then Address[pieces][nsources] and
  // Address[pieces][ntargets], of element 0 of each piece.
  unsigned items, sources, targets;
  unsigned nitems, nsources, ntargets, divisor;
  unsigned blocks;     // for who starts it
  Address table[448];  // a kernel's parameters have 4 KiB at most
};

namespace {

// Three such blocks on a multiprocessor leave each thread 80 registers, which is enough for all but f16 and bf16 that
// are added up in float64.
constexpr unsigned kMaxThreads = 256, kBlocks = 3;

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

// A parameter that the kernel reads where it lies, by its address too, instead of a copy for each thread.
#define PARAMETER(type) const __grid_constant__ type

__device__ __forceinline__ Address address_of(const Address* memory) { return reinterpret_cast<Address>(memory); }

// Of the lists, which are in global memory or among the parameters: a generic address.
__device__ __forceinline__ Address load_address(Address address) {
  Address value;
  asm("ld.u64 %0, [%1];" : "=l"(value) : "l"(address));
  return value;
}

// Whether the host has set the word at `stop` (0: there is none): the same for all threads of a block, which come here
// together. One of them looks, past all caches.
__device__ __forceinline__ bool is_stopped(Address stop) {
  if (stop == 0) return false;
  unsigned word = 0;
  if (threadIdx.x == 0) asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(word) : "l"(stop) : "memory");
  return __syncthreads_or(static_cast<int>(word)) != 0;
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
#define PARAMETER(type) const type&

__device__ __forceinline__ Address address_of(const Address* memory) {
  return reinterpret_cast<Address>(memory) + (1ull << 60);
}

__device__ __forceinline__ Address load_address(Address address) { return *at<const Address>(address); }

__device__ __forceinline__ bool is_stopped(Address stop) {
  return stop != 0 && *at<const volatile unsigned>(stop) != 0;
}

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

// Where a launch has its lists.
__device__ __forceinline__ Address lists_of(const KernelArgs& work) {
  return work.lists != 0 ? work.lists : address_of(work.table);
}

}  // namespace
