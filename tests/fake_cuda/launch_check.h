// Looks at everything that a kernel will touch before it runs, as the kernel itself cannot.
#pragma once

#include <vector>

#include "host_kernel.h"
#include "memory.h"

namespace fake {

// Dies when the kernel would touch what is no device memory, or no memory of a device that the context may touch, or an
// element at an address that is no multiple of its size; and when the work makes no sense. Returns what the kernel
// touches, to be held while it runs.
std::vector<Held> check_launch(const HostKernel& kernel, const KernelArgs& work, Context& context);

}  // namespace fake
