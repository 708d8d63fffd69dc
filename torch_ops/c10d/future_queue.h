// The order in which the Futures of a group are completed.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace dl_comm::c10d_backend {

class CallState;

// Completing a Future runs its callbacks, which may start collectives (PowerSGD does). All ranks must start collectives
// of equal type and size in the same order. So the Futures of a group are completed one after the other, in the order
// in which their calls were started: the callbacks of one end before those of the next begin.
//
// A callback may wait for the Future of a collective that it has started itself, so these Futures are not in the queue.
// One that waits for a Future of this queue is given way after a second.
//
// Thread rule: any thread.
class FutureQueue : public std::enable_shared_from_this<FutureQueue> {
 public:
  // Whether this thread runs callbacks of a Future, so that the calls which it starts are not queued.
  static bool in_callback();

  // Adds a call that has a Future. `number`: its position among the started calls of the group.
  void add(uint64_t number, std::shared_ptr<CallState> state);

  // A call of this queue has ended: completes what can be completed, on the pool.
  void advance();

  // A call that a callback has started begins and ends.
  void begin_nested();
  void end_nested();

  // Completes the Future of a call that is not queued, on this thread.
  static void complete(CallState& state);

 private:
  // Completes the Futures whose turn has come, on this thread.
  void run();
  // Completes the first Future whose call has ended if no callback makes progress.
  void give_way();
  void give_way_later();
  // The call whose turn it is, taken out of the queue, or null. `any`: also one behind calls that have not ended.
  std::shared_ptr<CallState> next(bool any);

  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<CallState>> queue_;
  // The number of completed Futures, by which `give_way` sees progress.
  std::size_t num_completed_ = 0;
  std::size_t num_nested_ = 0;
  bool running_ = false;
  bool will_give_way_ = false;
};

}  // namespace dl_comm::c10d_backend
