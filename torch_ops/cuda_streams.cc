// libdl_comm_torch_cuda.so: what the ops need of a torch that was built with CUDA, its current streams. A library of
// its own, so that the ops load where torch has no CUDA; Python hands the function to them
// (torch.ops.dl_comm.set_stream_source).
//
// Thread rule: may be called from any thread; the current stream is the calling thread's.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstddef>
#include <cstdint>

// Puts torch's current stream (a cudaStream_t) of this GPU into `stream`; not 0 where torch cannot tell it.
extern "C" __attribute__((visibility("default"))) int32_t dl_comm_current_stream(int32_t device, std::size_t* stream) {
  void* found = nullptr;
  const int32_t code = aoti_torch_get_current_cuda_stream(device, &found);
  *stream = reinterpret_cast<std::size_t>(found);
  return code;
}
