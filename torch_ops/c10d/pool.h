// Threads for work that may block: callbacks of Futures, and the release of tensors, which may need the GIL.
#pragma once

#include <functional>

namespace dl_comm::c10d_backend {

// Runs `task` soon, on a thread of its own if all others are busy: a callback may wait for a collective whose own
// callback comes later (PowerSGD does). Idle threads end after some seconds.
//
// Thread rule: any thread. `task` must not throw.
void run_on_pool(std::function<void()> task);

// Before the interpreter ends: waits a second for the running tasks. Later tasks are not run, and what they hold is not
// freed, since a thread that asks for the GIL then would be ended in the middle of C++ code.
void close_pool();

}  // namespace dl_comm::c10d_backend
