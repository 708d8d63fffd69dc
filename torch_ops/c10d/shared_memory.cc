#include "shared_memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>
#include <sys/statvfs.h>
#include <torch/csrc/autograd/graph_task.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "call.h"
#include "dl_comm.h"

namespace dl_comm::c10d_backend {
namespace {

// Below this, a call copies faster than a page fault takes.
constexpr std::size_t kSmallestBucket = 64 << 10;
// The fraction of the shared memory's file system that stays free for others, such as data loader workers.
constexpr double kReservedFraction = 0.5;

// What frees shared memory.
struct Block {
  void* memory;
  int process;
};

void free_block(void* context) {
  const auto* const block = static_cast<Block*>(context);
  // A forked child shares the memory with its parent, which still uses it.
  if (block->process == ::getpid()) dl_comm_free(block->memory);
  delete block;
}

bool has_space(std::size_t bytes) {
  const char* folder = std::getenv("DL_COMM_SHM_DIR");
  if (folder == nullptr || *folder == '\0') folder = "/dev/shm";
  struct statvfs system{};
  if (::statvfs(folder, &system) != 0) return false;
  const double free_blocks =
      static_cast<double>(system.f_bavail) - static_cast<double>(system.f_blocks) * kReservedFraction;
  return free_blocks * static_cast<double>(system.f_frsize) >= static_cast<double>(bytes);
}

at::DataPtr wrap(void* memory) { return {memory, new Block{memory, ::getpid()}, &free_block, at::kCPU}; }

// The storages that came once.
class Seen {
 public:
  // Whether this storage has come before. It is forgotten then.
  bool again(const at::Storage& storage) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto* const key = storage.unsafeGetStorageImpl();
    const auto found = storages_.find(key);
    const bool known = found != storages_.end() && !found->second.expired();
    if (known) {
      storages_.erase(found);
      return true;
    }
    if (storages_.size() >= kMost) forget_freed();
    if (storages_.size() < kMost) {
      storages_.erase(key);
      storages_.emplace(key, c10::weak_intrusive_ptr<c10::StorageImpl>(storage.getWeakStorageImpl()));
    }
    return false;
  }

 private:
  static constexpr std::size_t kMost = 1024;

  void forget_freed() {
    for (auto entry = storages_.begin(); entry != storages_.end();)
      entry = entry->second.expired() ? storages_.erase(entry) : std::next(entry);
  }

  std::mutex mutex_;
  std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
};

// Whether nobody outside of torch can have the address of the tensor's memory, and the tensor is all of its storage.
bool is_bucket(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.dim() != 1 || !tensor.is_contiguous() || tensor.storage_offset() != 0) return false;
  const auto& storage = tensor.storage();
  return storage.nbytes() >= kSmallestBucket && storage.nbytes() == tensor.nbytes() &&
         torch::autograd::get_current_graph_task_id() >= 0 &&
         storage.data_ptr().get_deleter() == c10::GetDefaultCPUAllocator()->raw_deleter();
}

}  // namespace

at::Tensor shared_tensor(int64_t size, at::TensorOptions options) {
  if (options.device().type() != at::kCPU) throw_invalid(c10::str("no shared memory for ", options.device()));
  const std::size_t bytes = static_cast<std::size_t>(size) * options.dtype().itemsize();
  void* memory = nullptr;
  check(dl_comm_alloc(std::max<std::size_t>(bytes, 1), &memory));
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, wrap(memory), nullptr, false);
  auto tensor = at::empty({0}, options);
  tensor.set_(storage, 0, {size}, {1});
  return tensor;
}

void share_bucket(const at::Tensor& tensor) {
  // Never destroyed: other threads may call while the process exits.
  static Seen* const seen = new Seen;
  if (!is_bucket(tensor) || !seen->again(tensor.storage())) return;
  auto* const storage = tensor.storage().unsafeGetStorageImpl();
  const std::size_t bytes = storage->nbytes();
  void* memory = nullptr;
  // Without shared memory, the bucket stays where it is, and calls copy it.
  if (!has_space(bytes) || dl_comm_alloc(bytes, &memory) < 0) return;
  std::memcpy(memory, storage->data(), bytes);
  const at::DataPtr old = storage->set_data_ptr(wrap(memory));
}

}  // namespace dl_comm::c10d_backend
