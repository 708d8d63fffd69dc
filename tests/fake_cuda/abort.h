// What both libraries of the fake share: the end of a process that has done what a real GPU would punish, settings from
// the environment, and handles.
//
// Thread rule: everything may be called from any thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace fake {

// Prints "fake_cuda: ..." as one line and aborts. For what is no error code of CUDA's but a bug of the caller.
[[noreturn]] void die(const char* format, ...) __attribute__((format(printf, 1, 2)));

// A number from the environment, `otherwise` when it is not set. Dies when it is no number, or negative.
long setting(const char* name, long otherwise);

// Sleeps between 0 and FAKE_CUDA_DELAY_US microseconds, at random: brings wrong orders to light.
void dawdle();

// Sleeps for a moment, longer the higher `round`, which it counts up: for loops that wait for other processes.
void nap(int& round);

// Removes the files of /dev/shm that start with `prefix` (which ends with '.'), then the id of a process that has
// ended.
void remove_stale(const char* prefix);

// Objects that callers know by a handle: an address that nobody can follow, and that never comes again.
template <class Object, class Handle>
class Handles {
 public:
  Handle add(std::shared_ptr<Object> object) {
    const std::lock_guard lock(mutex_);
    last_ += 16;
    objects_[last_] = std::move(object);
    return reinterpret_cast<Handle>(last_);
  }
  // Null when there is none.
  std::shared_ptr<Object> find(Handle handle) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(reinterpret_cast<std::uintptr_t>(handle));
    return found == objects_.end() ? nullptr : found->second;
  }
  // The object, which goes when nobody else holds it; null when there is none.
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
State& immortal() {
  static auto* state = new State;
  return *state;
}

}  // namespace fake
