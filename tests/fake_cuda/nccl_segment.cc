// See nccl_segment.h.
#include "nccl_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <mutex>
#include <set>

#include "abort.h"

namespace fake {
namespace {

constexpr const char* kPrefix = "fake_nccl.";

// Names of the segments that this process created. Some may be unlinked already.
struct Made {
  std::mutex mutex;
  std::set<std::pair<pid_t, std::string>> names;
};

Made& made() { return never_destroyed<Made>(); }

__attribute__((destructor)) void unlink_all() {
  const std::lock_guard lock(made().mutex);
  for (const auto& [pid, name] : made().names) {
    if (pid == getpid()) shm_unlink(name.c_str());
  }
}

}  // namespace

std::string Segment::create() {
  static std::atomic<int> count{0};
  remove_stale(kPrefix);
  const std::string name = std::string("/") + kPrefix + std::to_string(getpid()) + "." + std::to_string(++count);
  const int fd = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) return "";
  const bool sized = ftruncate(fd, kBytes) == 0;
  close(fd);
  if (!sized) {
    shm_unlink(name.c_str());
    return "";
  }
  const std::lock_guard lock(made().mutex);
  made().names.emplace(getpid(), name);
  return name;
}

bool Segment::open(const std::string& name) {
  const int fd = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) return false;
  void* start = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (start == MAP_FAILED) return false;
  name_ = name;
  header_ = static_cast<Header*>(start);
  return true;
}

Segment::~Segment() {
  if (header_ == nullptr) return;
  if (nranks_ > 0) header_->entries[rank_].left = true;
  munmap(header_, kBytes);
}

bool Segment::arrive(int rank, int nranks, const GpuId& gpu) {
  int agreed = 0;
  if (!header_->nranks.compare_exchange_strong(agreed, nranks) && agreed != nranks) return false;
  RankEntry& entry = header_->entries[rank];
  if (entry.taken.exchange(true)) return false;
  rank_ = rank;
  nranks_ = nranks;
  entry.gpu = gpu;
  if (++header_->arrived == nranks) shm_unlink(name_.c_str());
  return true;
}

bool Segment::wait_for_all(const ShouldAbort& should_abort) {
  for (int round = 0; header_->arrived < nranks_; backoff(round)) {
    if (should_abort()) return false;
  }
  return true;
}

int Segment::shares_gpu_with() const {
  for (int other = 0; other < nranks_; ++other) {
    if (other == rank_) continue;
    if (std::strcmp(header_->entries[other].gpu.bus_id, header_->entries[rank_].gpu.bus_id) == 0) return other;
  }
  return -1;
}

bool Segment::wait_for_ready(const ShouldAbort& should_abort) {
  ++header_->ready;
  for (int round = 0; header_->ready < nranks_; backoff(round)) {
    if (should_abort()) return false;
    for (int rank = 0; rank < nranks_; ++rank) {
      if (header_->entries[rank].left && header_->ready < nranks_) return false;
    }
  }
  return true;
}

char* Segment::fill(const ShouldAbort& should_abort) {
  for (int rank = 0, round = 0; rank < nranks_; ++rank) {
    for (; header_->entries[rank].read < round_; backoff(round)) {
      if (should_abort()) return nullptr;
    }
  }
  ++round_;
  return const_cast<char*>(buffer(rank_));
}

bool Segment::post(const Task& task, const ShouldAbort& should_abort) {
  header_->entries[rank_].task = task;
  header_->entries[rank_].posted = round_;
  for (int rank = 0, round = 0; rank < nranks_; ++rank) {
    for (; header_->entries[rank].posted < round_; backoff(round)) {
      if (should_abort()) return false;
    }
    check_same(task, header_->entries[rank].task, rank_, rank);
  }
  return true;
}

void Segment::check_same(const Task& own, const Task& other, int own_rank, int other_rank) {
  if (std::memcmp(&own, &other, sizeof own) == 0) return;
  die("NCCL operation %llu: rank %d has kind %d, count %llu, dtype %d, op %d, root %d, but rank %d has operation %llu, "
      "kind %d, count %llu, dtype %d, op %d, root %d",
      static_cast<unsigned long long>(own.number), own_rank, own.kind, static_cast<unsigned long long>(own.count),
      own.dtype, own.op, own.root, other_rank, static_cast<unsigned long long>(other.number), other.kind,
      static_cast<unsigned long long>(other.count), other.dtype, other.op, other.root);
}

const char* Segment::buffer(int rank) const {
  return reinterpret_cast<const char*>(header_) + kHeaderBytes + static_cast<std::size_t>(rank) * kChunk;
}

char* Segment::pair_buffer(int from, int to) const {
  const std::size_t index = static_cast<std::size_t>(from) * kMaxRanks + static_cast<std::size_t>(to);
  return reinterpret_cast<char*>(header_) + kPairStart + index * kMessageChunk;
}

char* Segment::fill_message(int peer) {
  const PairEntry& pair = header_->pairs[rank_][peer];
  return pair.posted == pair.read ? pair_buffer(rank_, peer) : nullptr;
}

void Segment::post_message(int peer, const MessageHeader& header) {
  PairEntry& pair = header_->pairs[rank_][peer];
  pair.header = header;
  ++pair.posted;
}

const char* Segment::next_message(int peer, const MessageHeader& header) {
  const PairEntry& pair = header_->pairs[peer][rank_];
  if (pair.posted == pair.read) return nullptr;
  if (pair.header.bytes != header.bytes || pair.header.dtype != header.dtype) {
    die("NCCL message from rank %d to rank %d: %llu bytes of dtype %d are sent, %llu of dtype %d expected", peer, rank_,
        static_cast<unsigned long long>(pair.header.bytes), pair.header.dtype,
        static_cast<unsigned long long>(header.bytes), header.dtype);
  }
  return pair_buffer(peer, rank_);
}

void Segment::message_read(int peer) { ++header_->pairs[peer][rank_].read; }

void Segment::done() { header_->entries[rank_].read = round_; }

}  // namespace fake
