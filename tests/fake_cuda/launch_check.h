// Checks all memory accesses of a kernel before it runs.
#pragma once

#include <vector>

#include "host_kernel.h"
#include "memory.h"

namespace fake {

// Dies if the parameters are invalid, or if the kernel would access memory that is no device memory, that the context
// may not access, or that is misaligned. Returns the regions that the kernel accesses; hold them while it runs.
std::vector<KeepAlive> check_launch(const HostKernel& kernel, const KernelArgs& work, Context& context);

}  // namespace fake
