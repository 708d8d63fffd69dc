// See exports.h.
#include "exports.h"

#include "abort.h"
#include "counters.h"
#include "memory.h"
#include "stream.h"

fake::Counters& fake::counters() { return never_destroyed<Counters>(); }

using namespace fake;

FAKE_API CUresult fake_cuda_enqueue(CUstream handle, void (*function)(void*), void* argument) {
  std::shared_ptr<Stream> stream;
  if (const CUresult refused = need_stream(handle, &stream)) return refused;
  return stream->push([function, argument] { function(argument); });
}

FAKE_API CUresult fake_cuda_enqueue_made(CUstream handle, const FakeOperation* operation, void* prototype) {
  const std::shared_ptr<void> kept(prototype, operation->release);
  std::shared_ptr<Stream> stream;
  if (const CUresult refused = need_stream(handle, &stream)) return refused;
  return stream->push_made([make = operation->make, function = operation->function, kept] {
    return [function, made = make(kept.get())] { function(made); };
  });
}

FAKE_API void* fake_cuda_host_address(CUdeviceptr address, std::size_t bytes, const char* what) {
  if (bytes > 0) device_memory(address, bytes, what);
  return host_of(address);
}

FAKE_API void fake_cuda_counters(long out[5]) {
  out[0] = counters().allocations;
  out[1] = 0;
  for (int device = 0; device < device_count(); ++device) out[1] += static_cast<long>(bytes_in_use(device));
  out[2] = counters().launches;
  out[3] = counters().copies;
  out[4] = counters().queries;
}
