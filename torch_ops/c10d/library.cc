// The op through which Python makes a backend, without pybind11: a process group is a TorchBind object.
#include <torch/library.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "backend.h"
#include "dl_comm.h"
#include "pool.h"

namespace {

using dl_comm::c10d_backend::Backend;

// Puts a backend for the ranks `ranks` of the job into `holder`. `timeout`: the deadline of calls in seconds.
// Collective over these ranks.
void attach(const c10::intrusive_ptr<::c10d::ProcessGroup>& holder, const std::vector<int64_t>& ranks,
            const std::string& name, double timeout) {
  const std::vector<int> members(ranks.begin(), ranks.end());
  const auto time = std::chrono::milliseconds(static_cast<int64_t>(timeout * 1e3));
  const c10::intrusive_ptr<::c10d::Backend> backend =
      c10::make_intrusive<Backend>(holder->getRank(), members, name, time);
  holder->setBackend(c10::DeviceType::CPU, ::c10d::ProcessGroup::BackendType::CUSTOM, backend);
}

// Equal for all users of one core in this process.
int64_t core_id() { return static_cast<int64_t>(dl_comm_core_id()); }

// The version of torch that this library was built for, the only one that it works with.
std::string torch_version() { return DL_COMM_TORCH_VERSION; }

}  // namespace

TORCH_LIBRARY(dl_comm_c10d, library) {
  library.def("attach(__torch__.torch.classes.c10d.ProcessGroup holder, int[] ranks, str name, float timeout) -> ()",
              &attach);
  library.def("close_pool() -> ()", &dl_comm::c10d_backend::close_pool);
  library.def("core_id() -> int", &core_id);
  library.def("torch_version() -> str", &torch_version);
}
