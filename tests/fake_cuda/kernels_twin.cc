// Compiles the kernels of the core for the host, and lists them.
//
// The folder of means.cu and sums.cu is in the include path. Thread rule: as in kernels_shim.h.
#include <cstring>

#include "kernels_shim.h"
#include "means.cu"
#include "sums.cu"
#include "twin.h"

namespace fake {
namespace {

static_assert(sizeof(Work) == sizeof(::Work) && sizeof(Item) == sizeof(::Item), "twin.h is behind memory.cuh");

template <void kKernel(const ::Work&)>
void run(const Work& work, Index grid, Index block) {
  ::Work same;
  std::memcpy(&same, &work, sizeof same);
  gridDim = grid;
  blockDim = block;
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
        for (threadIdx.z = 0; threadIdx.z < block.z; ++threadIdx.z) {
          for (threadIdx.y = 0; threadIdx.y < block.y; ++threadIdx.y) {
            for (threadIdx.x = 0; threadIdx.x < block.x; ++threadIdx.x) kKernel(same);
          }
        }
      }
    }
  }
}

#define DL_COMM_TWIN_MEAN(type, S) {"average_" #type, S::kSize, S::kSize, kMaxThreads, run<::average_##type>},
#define DL_COMM_TWIN_SUM(type, S) {"sum_" #type, S::kSize, sizeof(S::Acc), kMaxThreads, run<::sum_##type>},
constexpr Twin kTwins[] = {DL_COMM_TYPES(DL_COMM_TWIN_MEAN) DL_COMM_TYPES(DL_COMM_TWIN_SUM){
    "copy_bytes", Bytes::kSize, Bytes::kSize, kMaxThreads, run<::copy_bytes>}};

}  // namespace

const Twin* find_twin(const std::string& name) {
  for (const Twin& twin : kTwins) {
    if (name == twin.name) return &twin;
  }
  return nullptr;
}

}  // namespace fake
