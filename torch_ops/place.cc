#include "place.h"

#include <atomic>

#include "failure.h"

namespace dl_comm::torch_ops {
namespace {

std::atomic<StreamSource>& source() {
  static std::atomic<StreamSource> instance{nullptr};
  return instance;
}

}  // namespace

void use_streams(StreamSource given) { source() = given; }

Place now(Place place) {
  if (place.device < 0) return place;
  const StreamSource streams = source();
  if (streams == nullptr) {
    throw failure(-3, "a tensor is on a CUDA device, but libdl_comm_torch_cuda.so is not loaded: rebuild it with this ",
                  "torch by 'python -m dl_comm.build --force'");
  }
  Place found{place.device, 0};
  if (streams(place.device, &found.stream) != 0) {
    throw failure(-7, "torch cannot tell its current stream of CUDA device ", place.device);
  }
  return found;
}

std::optional<Place> place_of(const ::torch::stable::Tensor& tensor) {
  if (tensor.is_cpu()) return Place{};
  if (!tensor.is_cuda()) return std::nullopt;
  return now({static_cast<int32_t>(tensor.get_device_index()), 0});
}

}  // namespace dl_comm::torch_ops
