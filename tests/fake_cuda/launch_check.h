// Looks at everything that a kernel will touch before it runs, as the twin itself cannot.
#pragma once

#include <vector>

#include "memory.h"
#include "twin.h"

namespace fake {

// Dies when the kernel would touch what is no device memory, or no memory of a device that the context may touch, or an
// element at an address that is no multiple of its size; and when the work makes no sense. Returns what the kernel
// touches, to be held while it runs.
std::vector<Held> check_launch(const Twin& twin, const Work& work, Context& context);

}  // namespace fake
