// Threads for work that may block: callbacks of Futures, and the release of tensors, which may need the GIL.
#pragma once

#include <functional>

namespace dl_comm::c10d_backend {

// Runs `task` soon, on a thread of its own if all others are busy: a callback may wait for a collective whose own
// callback comes later (PowerSGD does). Idle threads end after some seconds.
//
// Thread rule: any thread. `task` must not throw.
void run_on_pool(std::function<void()> task);

}  // namespace dl_comm::c10d_backend
