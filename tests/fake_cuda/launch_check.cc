// See launch_check.h.
#include "launch_check.h"

#include "abort.h"
#include "faults.h"

namespace fake {
namespace {

class Check {
 public:
  Check(const HostKernel& kernel, const KernelArgs& work, Context& context)
      : kernel_(kernel), work_(work), context_(context) {}

  std::vector<KeepAlive> run() {
    if (work_.divisor == 0) die("%s: divided by 0", kernel_.name);
    if (work_.nsources == 0 && (work_.fills == 0 || work_.stop == 0)) die("%s: no sources", kernel_.name);
    if (kernel_.name == std::string("copy_bytes") && work_.nsources > 1) die("copy_bytes: it copies one source");
    bool stopped = false;
    if (work_.stop != 0) {
      touch("the stop flag", work_.stop, kStopBytes, 4);
      stopped = *reinterpret_cast<const volatile unsigned*>(host_of(work_.stop)) != 0;
      if (stopped && work_.fills == 0) return std::move(held_);
    }
    if (work_.nitems == 0) return std::move(held_);
    const auto* items =
        reinterpret_cast<const BlockRange*>(list("items", work_.items, sizeof(BlockRange) * work_.nitems));
    for (unsigned i = 0; i < work_.nitems; ++i) {
      const BlockRange item = items[i];
      if (work_.nsources > 0 && item.count > kMaxItemElements)
        die("%s: item %u has %u elements", kernel_.name, i, item.count);
      if (!stopped) elements("a source", work_.sources, work_.nsources, item, kernel_.size);
      elements("a target", work_.targets, work_.ntargets, item, kernel_.target_size);
    }
    return std::move(held_);
  }

 private:
  // The data at `offset` bytes in the lists, which are in device memory or in the parameters.
  const char* list(const char* what, std::size_t offset, std::size_t bytes) {
    if (work_.lists != 0) {
      touch(what, work_.lists + offset, bytes, 8);
      return host_of(work_.lists + offset);
    }
    if (offset % 8 != 0 || offset > sizeof work_.table || bytes > sizeof work_.table - offset) {
      die("%s, %s: %zu bytes at %zu of the parameters", kernel_.name, what, bytes, offset);
    }
    return reinterpret_cast<const char*>(work_.table) + offset;
  }

  // Checks an item's elements of `size` bytes in all sources, or in all targets.
  void elements(const char* what, unsigned addresses, unsigned number, const BlockRange& item, unsigned size) {
    if (number == 0) return;
    const std::size_t row = addresses + sizeof(CUdeviceptr) * item.piece * number;
    const char* starts = list("the table of addresses", row, sizeof(CUdeviceptr) * number);
    for (unsigned i = 0; i < number; ++i) {
      const CUdeviceptr first = reinterpret_cast<const CUdeviceptr*>(starts)[i] + item.first * size;
      if (item.count > 0) touch(what, first, std::size_t{size} * item.count, size);
    }
  }

  void touch(const char* what, CUdeviceptr address, std::size_t bytes, unsigned alignment) {
    if (address % alignment != 0) die("%s: %s at %#llx is no multiple of %u", kernel_.name, what, address, alignment);
    for (const KeepAlive& region : held_) {
      const CUdeviceptr offset = address - region->address();
      if (offset < region->bytes && bytes <= region->bytes - offset) return;
    }
    const std::string message = std::string(kernel_.name) + ", " + what;
    KeepAlive region = device_memory(address, bytes, message.c_str());
    if (!may_touch(*region)) {
      bad_access("%s: %#llx is memory of device %d, to which device %d has no access", message.c_str(), address,
                 region->device, context_.device);
    }
    held_.push_back(std::move(region));
  }

  bool may_touch(const Region& region) {
    if (region.pinned() || region.context == &context_) return true;
    const std::lock_guard lock(context_.lock);
    return context_.peers.count(region.device) != 0;
  }

  const HostKernel& kernel_;
  const KernelArgs& work_;
  Context& context_;
  std::vector<KeepAlive> held_;
};

}  // namespace

std::vector<KeepAlive> check_launch(const HostKernel& kernel, const KernelArgs& work, Context& context) {
  return Check(kernel, work, context).run();
}

}  // namespace fake
