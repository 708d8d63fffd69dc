// cuStreamWriteValue32 and cuStreamWaitValue32: flags in memory for streams of several processes.
#include "abort.h"
#include "faults.h"
#include "memory.h"
#include "stream.h"

using namespace fake;

namespace {

bool forbidden() { return setting("FAKE_CUDA_NO_MEMOPS", 0) != 0; }

// CUDA does not support these operations on managed memory.
bool is_managed(CUdeviceptr address, const char* what) {
  return device_memory(address, 4, what)->kind == Kind::kManaged;
}

unsigned* word_at(CUdeviceptr address) { return reinterpret_cast<unsigned*>(host_of(address)); }

}  // namespace

// Only the v1 API has the flag that omits the memory barrier: "not supported in the v2 API" (cuda.h).
FAKE_API CUresult cuStreamWriteValue32_v2(CUstream handle, CUdeviceptr address, unsigned value, unsigned flags) {
  std::shared_ptr<Stream> stream;
  if (const CUresult refused = need_stream(handle, &stream)) return refused;
  if (forbidden()) return CUDA_ERROR_NOT_SUPPORTED;
  if (address % 4 != 0 || flags != CU_STREAM_WRITE_VALUE_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
  if (is_managed(address, "cuStreamWriteValue32")) return CUDA_ERROR_INVALID_VALUE;
  return stream->push([address, value] {
    const KeepAlive region = device_memory(address, 4, "cuStreamWriteValue32");
    __atomic_store_n(word_at(address), value, __ATOMIC_SEQ_CST);
  });
}

FAKE_API CUresult cuStreamWaitValue32_v2(CUstream handle, CUdeviceptr address, unsigned value, unsigned flags) {
  std::shared_ptr<Stream> stream;
  if (const CUresult refused = need_stream(handle, &stream)) return refused;
  if (forbidden()) return CUDA_ERROR_NOT_SUPPORTED;
  const unsigned condition = flags & ~CU_STREAM_WAIT_VALUE_FLUSH;
  if (address % 4 != 0 || condition > CU_STREAM_WAIT_VALUE_EQ) return CUDA_ERROR_INVALID_VALUE;
  if (is_managed(address, "cuStreamWaitValue32")) return CUDA_ERROR_INVALID_VALUE;
  return stream->push([address, value, condition] {
    const KeepAlive region = device_memory(address, 4, "cuStreamWaitValue32");
    for (int round = 0;;) {
      const unsigned found = __atomic_load_n(word_at(address), __ATOMIC_SEQ_CST);
      const bool met = condition == CU_STREAM_WAIT_VALUE_EQ ? found == value : static_cast<int>(found - value) >= 0;
      if (met || fault() != CUDA_SUCCESS) return;
      backoff(round);
    }
  });
}
