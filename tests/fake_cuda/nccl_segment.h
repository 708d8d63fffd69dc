// Shared memory of a communicator: who is there, and a buffer for each rank.
//
// It goes in steps. In a step every rank fills its own buffer, posts it, waits for the others, reads theirs, and says
// so; nobody fills a buffer again before all have read it.
//
// Thread rule: a rank's own entry is written by one thread at a time. The file is unlinked by the last rank to arrive,
// or when the process that made it exits.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace fake {

constexpr int kMaxRanks = 64;
constexpr std::size_t kChunk = 256 << 10;

// What a rank is about to do: the same on all of them.
struct Task {
  std::uint64_t number = 0;
  std::uint64_t count = 0;
  int kind = 0, dtype = 0, op = 0, root = 0;
};

// Where a GPU is, which its slices have in common.
struct GpuId {
  char bus_id[16];
};

class Segment {
 public:
  // True when a wait is to be given up.
  using GiveUp = std::function<bool()>;

  // A new one; returns its name. Empty when there is no room.
  static std::string create();
  // False when there is no such segment.
  bool open(const std::string& name);
  // Leaves.
  ~Segment();

  // Takes the place of a rank: false when it is taken, or others have another number of ranks.
  bool arrive(int rank, int nranks, const GpuId& gpu);
  // False when given up.
  bool wait_for_all(const GiveUp& give_up);
  // Another rank on the same GPU, be it in another slice; -1 when there is none.
  int shares_gpu_with() const;
  // False when given up, or when another rank has left before all were ready.
  bool wait_for_ready(const GiveUp& give_up);

  // This rank's buffer for the next step; null when given up.
  char* fill(const GiveUp& give_up);
  // Posts it. Returns when all have; false when given up. Dies when the task of another rank is not the same.
  bool post(const Task& task, const GiveUp& give_up);
  const char* buffer(int rank) const;
  // This rank has read what it needs of the step.
  void done();

 private:
  struct Place {
    std::atomic<bool> taken;
    std::atomic<bool> left;
    GpuId gpu;
    Task task;
    std::atomic<std::uint64_t> posted, read;
  };
  struct Header {
    std::atomic<int> nranks, arrived, ready;
    Place places[kMaxRanks];
  };
  // The buffers start here.
  static constexpr std::size_t kHeaderBytes = 16384;
  static constexpr std::size_t kBytes = kHeaderBytes + kMaxRanks * kChunk;
  static_assert(sizeof(Header) <= kHeaderBytes);

  static void check_same(const Task& own, const Task& other, int own_rank, int other_rank);

  std::string name_;
  Header* header_ = nullptr;
  int rank_ = 0, nranks_ = 0;
  std::uint64_t step_ = 0;
};

}  // namespace fake
