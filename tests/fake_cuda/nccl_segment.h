// Shared memory of a communicator: an entry and a buffer for each rank.
//
// It works in rounds. In a round each rank fills its buffer, posts it, waits for the others, reads their buffers, and
// marks them as read. A rank fills its buffer again only after all ranks have read it.
// Each pair of ranks also has a buffer for the parts of messages, one after the other.
//
// Thread rule: one thread at a time writes a rank's entry. The last rank to arrive unlinks the file, or else its
// creator at exit.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace fake {

constexpr int kMaxRanks = 64;
constexpr std::size_t kChunk = 256 << 10;
// Of a part of a message.
constexpr std::size_t kMessageChunk = 32 << 10;

// A message, as both ranks describe it.
struct MessageHeader {
  std::uint64_t bytes = 0;
  int dtype = 0;
};

// An operation; must be equal on all ranks.
struct Task {
  std::uint64_t number = 0;
  std::uint64_t count = 0;
  int kind = 0, dtype = 0, op = 0, root = 0;
};

// Identifies a GPU; its MIG slices share the value.
struct GpuId {
  char bus_id[16];
};

class Segment {
 public:
  // Returns true to end a wait early.
  using ShouldAbort = std::function<bool()>;

  // Creates a segment and returns its name; empty if there is no room.
  static std::string create();
  // False if there is no such segment.
  bool open(const std::string& name);
  // Marks this rank as gone.
  ~Segment();

  // Registers a rank; false if it is already registered, or if another rank gave another size.
  bool arrive(int rank, int nranks, const GpuId& gpu);
  // False if ended early.
  bool wait_for_all(const ShouldAbort& should_abort);
  // Another rank on the same GPU, in any slice; -1 if none.
  int shares_gpu_with() const;
  // False if ended early, or if another rank left before all were ready.
  bool wait_for_ready(const ShouldAbort& should_abort);

  // This rank's buffer for the next round; null if ended early.
  char* fill(const ShouldAbort& should_abort);
  // Posts the buffer and returns when all ranks have posted; false if ended early. Dies if another rank's task differs.
  bool post(const Task& task, const ShouldAbort& should_abort);
  const char* buffer(int rank) const;
  // Marks the buffers of this round as read by this rank.
  void done();

  // The buffer for the next part of a message to `peer`; null while the peer has not read the last one.
  char* fill_message(int peer);
  // Gives the part to the peer.
  void post_message(int peer, const MessageHeader& header);
  // The next part of a message from `peer`; null if there is none yet. Dies if the peer describes it otherwise.
  const char* next_message(int peer, const MessageHeader& header);
  // Marks that part as read.
  void message_read(int peer);

 private:
  struct RankEntry {
    std::atomic<bool> taken;
    std::atomic<bool> left;
    GpuId gpu;
    Task task;
    std::atomic<std::uint64_t> posted, read;
  };
  // The parts of messages from one rank to another.
  struct PairEntry {
    std::atomic<std::uint64_t> posted, read;
    MessageHeader header;
  };
  struct Header {
    std::atomic<int> nranks, arrived, ready;
    RankEntry entries[kMaxRanks];
    PairEntry pairs[kMaxRanks][kMaxRanks];
  };
  // Offset of the buffers.
  static constexpr std::size_t kHeaderBytes = 256 << 10;
  // Offset of the buffers of pairs. Pages that nobody uses take no memory.
  static constexpr std::size_t kPairStart = kHeaderBytes + kMaxRanks * kChunk;
  static constexpr std::size_t kBytes = kPairStart + std::size_t{kMaxRanks} * kMaxRanks * kMessageChunk;
  static_assert(sizeof(Header) <= kHeaderBytes);

  char* pair_buffer(int from, int to) const;
  static void check_same(const Task& own, const Task& other, int own_rank, int other_rank);

  std::string name_;
  Header* header_ = nullptr;
  int rank_ = 0, nranks_ = 0;
  std::uint64_t round_ = 0;
};

}  // namespace fake
