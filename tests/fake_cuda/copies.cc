// cuMemcpy* and cuMemset*. Every range is checked twice: when the operation is enqueued, so that the backtrace shows
// the caller, and when it runs, because the memory may have been freed.
#include <cstring>

#include "counters.h"
#include "memory.h"
#include "stream.h"

using namespace fake;

namespace {

// One end of a copy. `hold` finds its region or dies.
struct End {
  KeepAlive (*find)(std::uintptr_t, std::size_t, const char*);
  std::uintptr_t address;
  const char* what;

  KeepAlive hold(std::size_t bytes) const { return find(address, bytes, what); }
  char* host() const { return address >= kOffset ? host_of(address) : reinterpret_cast<char*>(address); }
};

KeepAlive find_pinned(std::uintptr_t address, std::size_t bytes, const char* what) {
  return pinned_memory(reinterpret_cast<const void*>(address), bytes, what);
}
KeepAlive find_device(std::uintptr_t address, std::size_t bytes, const char* what) {
  return device_memory(address, bytes, what);
}
// For blocking calls, which accept any host memory: the real driver stages it through a pinned buffer.
KeepAlive find_any(std::uintptr_t, std::size_t, const char*) { return nullptr; }

End device(CUdeviceptr address, const char* what) { return {find_device, address, what}; }
End pinned(const void* host, const char* what) { return {find_pinned, number_of(host), what}; }
End any(const void* host, const char* what) { return {find_any, number_of(host), what}; }

CUresult copy(End to, End from, std::size_t bytes, Stream& stream) {
  if (bytes == 0) return CUDA_SUCCESS;
  to.hold(bytes);
  from.hold(bytes);
  const CUresult refused = stream.push([to, from, bytes] {
    const KeepAlive target = to.hold(bytes);
    const KeepAlive source = from.hold(bytes);
    std::memmove(to.host(), from.host(), bytes);
  });
  if (refused == CUDA_SUCCESS) ++counters().copies;
  return refused;
}

CUresult copy_async(End to, End from, std::size_t bytes, CUstream handle) {
  std::shared_ptr<Stream> stream;
  if (const CUresult refused = need_stream(handle, &stream)) return refused;
  return copy(to, from, bytes, *stream);
}

CUresult copy_now(End to, End from, std::size_t bytes) {
  std::shared_ptr<Stream> stream;
  if (const CUresult refused = need_stream(nullptr, &stream)) return refused;
  if (const CUresult refused = copy(to, from, bytes, *stream)) return refused;
  return stream->finish();
}

}  // namespace

FAKE_API CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  return copy_async(pinned(to, "cuMemcpyDtoHAsync, target"), device(from, "cuMemcpyDtoHAsync, source"), bytes, stream);
}

FAKE_API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, std::size_t bytes, CUstream stream) {
  return copy_async(device(to, "cuMemcpyHtoDAsync, target"), pinned(from, "cuMemcpyHtoDAsync, source"), bytes, stream);
}

FAKE_API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  return copy_async(device(to, "cuMemcpyDtoDAsync, target"), device(from, "cuMemcpyDtoDAsync, source"), bytes, stream);
}

FAKE_API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, std::size_t bytes) {
  return copy_now(device(to, "cuMemcpyHtoD, target"), any(from, "cuMemcpyHtoD, source"), bytes);
}

FAKE_API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, std::size_t bytes) {
  return copy_now(any(to, "cuMemcpyDtoH, target"), device(from, "cuMemcpyDtoH, source"), bytes);
}

FAKE_API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t bytes, CUstream handle) {
  std::shared_ptr<Stream> stream;
  if (const CUresult refused = need_stream(handle, &stream)) return refused;
  if (bytes == 0) return CUDA_SUCCESS;
  device_memory(to, bytes, "cuMemsetD8Async");
  return stream->push([to, value, bytes] {
    const KeepAlive target = device_memory(to, bytes, "cuMemsetD8Async");
    std::memset(host_of(to), value, bytes);
  });
}
