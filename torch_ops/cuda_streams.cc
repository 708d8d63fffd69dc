// libdl_comm_torch_cuda.so: returns torch's current CUDA streams. A separate library, so that the ops also load with a
// torch without CUDA. Python passes the function to the ops (torch.ops.dl_comm.set_stream_source).
//
// Thread rule: any thread may call it; the current stream is the calling thread's.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstddef>
#include <cstdint>

// Stores torch's current stream (a cudaStream_t) of this GPU in `stream`. Returns 0 on success.
extern "C" __attribute__((visibility("default"))) int32_t dl_comm_current_stream(int32_t device, std::size_t* stream) {
  void* found = nullptr;
  const int32_t code = aoti_torch_get_current_cuda_stream(device, &found);
  *stream = reinterpret_cast<std::size_t>(found);
  return code;
}
