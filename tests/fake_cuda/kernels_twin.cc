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

template <void kKernel(::Work)>
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

// By the name: what follows the first '_' is the type, "bytes" for what is not averaged.
constexpr unsigned size_of(const char* name) {
  while (*name != '_') ++name;
  unsigned bits = 0;
  for (; *name != '\0' && (bits == 0 || (*name >= '0' && *name <= '9')); ++name) {
    if (*name >= '0' && *name <= '9') bits = 10 * bits + static_cast<unsigned>(*name - '0');
  }
  return bits == 0 ? 1 : bits / 8;
}
static_assert(size_of("average_bf16_precise") == 2 && size_of("average_i64") == 8 && size_of("copy_bytes") == 1);

#define DL_COMM_TWIN(name, made) {#name, size_of(#name), made, kMaxThreads, run<::name>},
constexpr Twin kTwins[] = {DL_COMM_MEANS(DL_COMM_TWIN) DL_COMM_SUMS(DL_COMM_TWIN)};

}  // namespace

const Twin* find_twin(const std::string& name) {
  for (const Twin& twin : kTwins) {
    if (name == twin.name) return &twin;
  }
  return nullptr;
}

}  // namespace fake
