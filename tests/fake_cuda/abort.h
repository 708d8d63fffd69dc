// Helpers of the fake driver and the fake NCCL: aborting on misuse, settings from the environment, delays, handles.
//
// Thread rule: any thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace fake {

// Prints "fake_cuda: ..." as one line and aborts. For bugs of the caller that CUDA reports with no error code.
[[noreturn]] void die(const char* format, ...) __attribute__((format(printf, 1, 2)));

// A number from the environment; `fallback` if unset. Dies if the value is no number or negative.
long setting(const char* name, long fallback);

// Sleeps for a random time of at most FAKE_CUDA_DELAY_US microseconds, to expose missing synchronization.
void random_delay();

// Sleeps 10 us in the first 50 rounds and 200 us later; increments `round`. For loops that wait for other processes.
void backoff(int& round);

// Removes the files in /dev/shm whose names are `prefix` (which ends with '.') and the id of an exited process.
void remove_stale(const char* prefix);

// Objects by opaque handle. A handle is an invalid address and is never reused.
template <class Object, class Handle>
class Handles {
 public:
  Handle add(std::shared_ptr<Object> object) {
    const std::lock_guard lock(mutex_);
    last_ += 16;
    objects_[last_] = std::move(object);
    return reinterpret_cast<Handle>(last_);
  }
  // Null if the handle is unknown.
  std::shared_ptr<Object> find(Handle handle) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(reinterpret_cast<std::uintptr_t>(handle));
    return found == objects_.end() ? nullptr : found->second;
  }
  // Removes the handle and returns its object; null if unknown.
  std::shared_ptr<Object> remove(Handle handle) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(reinterpret_cast<std::uintptr_t>(handle));
    if (found == objects_.end()) return nullptr;
    auto object = std::move(found->second);
    objects_.erase(found);
    return object;
  }

 private:
  std::mutex mutex_;
  std::uintptr_t last_ = std::uintptr_t{0x5fa0} << 48;
  std::map<std::uintptr_t, std::shared_ptr<Object>> objects_;
};

// State that is never destroyed: threads of the fake may still run while the process exits.
template <class State>
State& never_destroyed() {
  static auto* state = new State;
  return *state;
}

}  // namespace fake
