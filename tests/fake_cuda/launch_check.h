// Checks all memory accesses of a kernel before it runs.
#pragma once

#include <vector>

#include "host_kernel.h"
#include "memory.h"

namespace fake {

// Dies if the parameters are invalid, or if an access of the kernel is illegal: no device memory, no access from the
// context, or misaligned. Returns the regions that the kernel accesses; hold them while it runs.
std::vector<KeepAlive> check_launch(const HostKernel& kernel, const KernelArgs& work, Context& context);

}  // namespace fake
