// The kernels of the core as functions of the host: what a launch of the fake runs.
#pragma once

#include <string>

namespace fake {

// What a kernel is given, as memory.cuh has it (host_kernels.cc compares the sizes). Addresses are device addresses.
struct BlockRange {
  unsigned long long first;
  unsigned piece, count;
};
struct KernelArgs {
  unsigned long long lists, stop;
  unsigned items, sources, targets;
  unsigned nitems, nsources, ntargets, divisor;
  unsigned blocks;
  unsigned long long table[448];
};

// The most elements of an item.
constexpr unsigned kMaxItemElements = 32768;

struct Index {
  unsigned x, y, z;
};

struct HostKernel {
  const char* name;
  // The size of an element, and of what is made of it.
  unsigned size, made;
  // The most threads of a block.
  unsigned threads;
  // All threads of all blocks, one after the other.
  void (*run)(const KernelArgs& work, Index grid, Index block);
};

// Null when there is none.
const HostKernel* find_host_kernel(const std::string& name);

}  // namespace fake
