// CUDA graphs: what streams under capture are given, in the order of the calls, which is one that the graph allows.
//
// A launch runs the operations on its stream, one after the other. Thread rule: any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_api.h"

namespace fake {

class Stream;

class Graph {
 public:
  // Makes an operation for each launch.
  using Maker = std::function<std::function<void()>()>;

  explicit Graph(const Stream* origin) : origin_(origin) {}

  void add(const Stream* stream, Maker maker);
  // The point that the stream has reached, for an event.
  std::uint64_t record(const Stream* stream);
  // `stream` waits for that point of `other`, and takes part from now on.
  void join(std::shared_ptr<Stream> stream, const Stream* other, std::uint64_t point);
  // The streams of the capture but the first; false unless that has waited for all of them. No calls follow.
  bool end(std::vector<std::shared_ptr<Stream>>* others);
  // New operations for a launch.
  std::vector<std::function<void()>> make() const;

 private:
  mutable std::mutex mutex_;
  const Stream* const origin_;
  std::vector<Maker> makers_;
  std::vector<std::shared_ptr<Stream>> others_;
  // The work that each stream has been given, and how much of it another stream has waited for.
  std::map<const Stream*, std::uint64_t> given_, joined_;
};

}  // namespace fake
