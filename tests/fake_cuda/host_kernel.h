// The core's kernels as host functions, which a launch runs.
#pragma once

#include <string>
#include <vector>

namespace fake {

// Kernel parameters as in memory.cuh (host_kernels.cc compares the sizes). Addresses are device addresses.
struct BlockRange {
  unsigned long long first;
  unsigned piece, count;
};
struct KernelArgs {
  unsigned long long lists, stop;
  unsigned items, sources, targets;
  unsigned nitems, nsources, ntargets, divisor;
  unsigned fills;
  double pre, post;
  unsigned long long table[448];
};

// Maximum number of elements of an item with sources.
constexpr unsigned kMaxItemElements = 32768;
// Bytes of all copies of the stop flag.
constexpr std::size_t kStopBytes = 512 * 128;

struct Index {
  unsigned x, y, z;
};

struct HostKernel {
  const char* name;
  // Bytes of an element in the sources, and in the targets.
  unsigned size, target_size;
  // Maximum number of threads per block.
  unsigned threads;
  // Runs all threads of all blocks one after the other.
  void (*run)(const KernelArgs& work, Index grid, Index block);
};

// Null if there is no such kernel.
const HostKernel* find_host_kernel(const std::string& name);

std::vector<std::string> host_kernel_names();

}  // namespace fake
