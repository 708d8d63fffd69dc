// Counters of this process for tests; see fake_cuda_counters in exports.h.
#pragma once

#include <atomic>

namespace fake {

struct Counters {
  std::atomic<long> allocations{0};
  std::atomic<long> launches{0};
  std::atomic<long> copies{0};
  std::atomic<long> queries{0};
};

Counters& counters();

}  // namespace fake
