// A GPU device of TensorFlow on the fake CUDA driver, as a pluggable device (tf.load_pluggable_device_library). It has
// memory, streams and copies, and no kernels: TensorFlow's own run on the CPU, dl_comm's on this device.
//
// TensorFlow has no C function that gives a kernel the driver's stream. The kernels of dl_comm ask the method
// StreamCommon::platform_specific_handle, which this library replaces: preload it (LD_PRELOAD).
//
// Thread rule: any thread; TensorFlow guards its streams.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "tensorflow/c/experimental/stream_executor/stream_executor.h"

extern "C" {
using Handle = void*;
using Address = unsigned long long;
int cuInit(unsigned);
int cuDeviceGetCount(int*);
int cuDevicePrimaryCtxRetain(Handle*, int);
int cuCtxSetCurrent(Handle);
int cuMemAlloc_v2(Address*, std::size_t);
int cuMemFree_v2(Address);
int cuMemHostAlloc(void**, std::size_t, unsigned);
int cuMemFreeHost(void*);
int cuMemcpyDtoH_v2(void*, Address, std::size_t);
int cuMemcpyHtoD_v2(Address, const void*, std::size_t);
int cuMemcpyDtoDAsync_v2(Address, Address, std::size_t, Handle);
int cuMemsetD8Async(Address, unsigned char, std::size_t, Handle);
int cuStreamCreate(Handle*, unsigned);
int cuStreamDestroy_v2(Handle);
int cuStreamSynchronize(Handle);
int cuStreamWaitEvent(Handle, Handle, unsigned);
int cuEventCreate(Handle*, unsigned);
int cuEventDestroy_v2(Handle);
int cuEventRecord(Handle, Handle);
int cuEventQuery(Handle);
int cuEventSynchronize(Handle);
int fake_cuda_enqueue(Handle, void (*)(void*), void*);
}

struct SP_Stream_st {
  Handle stream;
};
struct SP_Event_st {
  Handle event;
};

namespace {

constexpr int kNotReady = 600;
constexpr unsigned kNonBlocking = 1, kNoTiming = 2;

std::mutex mutex;
// Guarded by `mutex`.
std::vector<SP_Stream> streams;
std::vector<Handle> contexts;

// An error of the driver is one of the test.
void check(const char* call, int code) {
  if (code == 0) return;
  std::fprintf(stderr, "tensorflow_device: %s: error %d\n", call, code);
  std::abort();
}
#define CHECK_CU(call) check(#call, call)

void enter(const SP_Device* device) { CHECK_CU(cuCtxSetCurrent(contexts[static_cast<std::size_t>(device->ordinal)])); }
Address address_of(const SP_DeviceMemoryBase* memory) { return reinterpret_cast<Address>(memory->opaque); }

// Memory.

void allocate(const SP_Device* device, std::uint64_t bytes, std::int64_t, SP_DeviceMemoryBase* memory) {
  enter(device);
  Address address = 0;
  // Without memory TensorFlow asks for less.
  const bool done = cuMemAlloc_v2(&address, bytes) == 0;
  memory->struct_size = SP_DEVICE_MEMORY_BASE_STRUCT_SIZE;
  memory->opaque = done ? reinterpret_cast<void*>(address) : nullptr;
  memory->size = done ? bytes : 0;
}
void deallocate(const SP_Device* device, SP_DeviceMemoryBase* memory) {
  enter(device);
  CHECK_CU(cuMemFree_v2(address_of(memory)));
}
void* allocate_host(const SP_Device* device, std::uint64_t bytes) {
  enter(device);
  void* memory = nullptr;
  CHECK_CU(cuMemHostAlloc(&memory, bytes, 0));
  return memory;
}
void deallocate_host(const SP_Device* device, void* memory) {
  enter(device);
  CHECK_CU(cuMemFreeHost(memory));
}
TF_Bool allocator_stats(const SP_Device*, SP_AllocatorStats*) { return 0; }
TF_Bool memory_usage(const SP_Device*, std::int64_t* free, std::int64_t* total) {
  *free = *total = std::int64_t{1} << 30;
  return 1;
}

// Streams and events.

void create_stream(const SP_Device* device, SP_Stream* stream, TF_Status*) {
  enter(device);
  *stream = new SP_Stream_st;
  CHECK_CU(cuStreamCreate(&(*stream)->stream, kNonBlocking));
  const std::lock_guard<std::mutex> lock(mutex);
  streams.push_back(*stream);
}
void destroy_stream(const SP_Device* device, SP_Stream stream) {
  enter(device);
  CHECK_CU(cuStreamDestroy_v2(stream->stream));
  const std::lock_guard<std::mutex> lock(mutex);
  streams.erase(std::remove(streams.begin(), streams.end(), stream), streams.end());
  delete stream;
}
void create_event(const SP_Device* device, SP_Event* event, TF_Status*) {
  enter(device);
  *event = new SP_Event_st;
  CHECK_CU(cuEventCreate(&(*event)->event, kNoTiming));
}
void destroy_event(const SP_Device* device, SP_Event event) {
  enter(device);
  CHECK_CU(cuEventDestroy_v2(event->event));
  delete event;
}
void record_event(const SP_Device* device, SP_Stream stream, SP_Event event, TF_Status*) {
  enter(device);
  CHECK_CU(cuEventRecord(event->event, stream->stream));
}
void wait_for_event(const SP_Device* const device, SP_Stream stream, SP_Event event, TF_Status* const) {
  enter(device);
  CHECK_CU(cuStreamWaitEvent(stream->stream, event->event, 0));
}
void make_dependent(const SP_Device* device, SP_Stream later, SP_Stream earlier, TF_Status* status) {
  SP_Event event = nullptr;
  create_event(device, &event, status);
  record_event(device, earlier, event, status);
  wait_for_event(device, later, event, status);
  destroy_event(device, event);
}
void stream_status(const SP_Device*, SP_Stream, TF_Status*) {}
SE_EventStatus event_status(const SP_Device* device, SP_Event event) {
  enter(device);
  const int code = cuEventQuery(event->event);
  return code == 0 ? SE_EVENT_COMPLETE : code == kNotReady ? SE_EVENT_PENDING : SE_EVENT_ERROR;
}
void wait_for_host_event(const SP_Device* device, SP_Event event, TF_Status*) {
  enter(device);
  CHECK_CU(cuEventSynchronize(event->event));
}
void wait_for_stream(const SP_Device* device, SP_Stream stream, TF_Status*) {
  enter(device);
  CHECK_CU(cuStreamSynchronize(stream->stream));
}
void wait_for_all(const SP_Device* device, TF_Status* status) {
  std::vector<SP_Stream> all;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    all = streams;
  }
  for (SP_Stream stream : all) wait_for_stream(device, stream, status);
}

// Copies. Those with the host wait, as its memory may be pageable.

void copy_to_host_now(const SP_Device* device, void* host, const SP_DeviceMemoryBase* memory, std::uint64_t bytes,
                      TF_Status*) {
  enter(device);
  CHECK_CU(cuMemcpyDtoH_v2(host, address_of(memory), bytes));
}
void copy_to_device_now(const SP_Device* device, SP_DeviceMemoryBase* memory, const void* host, std::uint64_t bytes,
                        TF_Status*) {
  enter(device);
  CHECK_CU(cuMemcpyHtoD_v2(address_of(memory), host, bytes));
}
void copy_to_host(const SP_Device* device, SP_Stream stream, void* host, const SP_DeviceMemoryBase* memory,
                  std::uint64_t bytes, TF_Status* status) {
  wait_for_stream(device, stream, status);
  copy_to_host_now(device, host, memory, bytes, status);
}
void copy_to_device(const SP_Device* device, SP_Stream stream, SP_DeviceMemoryBase* memory, const void* host,
                    std::uint64_t bytes, TF_Status* status) {
  wait_for_stream(device, stream, status);
  copy_to_device_now(device, memory, host, bytes, status);
}
void copy(const SP_Device* device, SP_Stream stream, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from,
          std::uint64_t bytes, TF_Status*) {
  enter(device);
  CHECK_CU(cuMemcpyDtoDAsync_v2(address_of(to), address_of(from), bytes, stream->stream));
}
void copy_now(const SP_Device* device, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from, std::uint64_t bytes,
              TF_Status*) {
  enter(device);
  CHECK_CU(cuMemcpyDtoDAsync_v2(address_of(to), address_of(from), bytes, nullptr));
  CHECK_CU(cuStreamSynchronize(nullptr));
}
void fill(const SP_Device* device, SP_Stream stream, SP_DeviceMemoryBase* memory, std::uint8_t value,
          std::uint64_t bytes, TF_Status*) {
  enter(device);
  CHECK_CU(cuMemsetD8Async(address_of(memory), value, bytes, stream->stream));
}
void fill_with_zeros(const SP_Device* device, SP_Stream stream, SP_DeviceMemoryBase* memory, std::uint64_t bytes,
                     TF_Status* status) {
  fill(device, stream, memory, 0, bytes, status);
}
void fill_words(const SP_Device*, SP_Stream, SP_DeviceMemoryBase*, std::uint32_t, std::uint64_t, TF_Status*) {
  check("memset32, which the fake driver lacks", -1);
}

// Callbacks. TensorFlow's library is loaded by Python for itself only, so its functions are looked up.

struct Callback {
  SE_StatusCallbackFn function;
  void* argument;
};
decltype(&TF_NewStatus) new_status;
decltype(&TF_DeleteStatus) delete_status;

void call(void* argument) {
  const auto* callback = static_cast<Callback*>(argument);
  TF_Status* const status = new_status();
  callback->function(callback->argument, status);
  delete_status(status);
  delete callback;
}
TF_Bool enqueue_callback(const SP_Device* device, SP_Stream stream, SE_StatusCallbackFn function, void* argument) {
  enter(device);
  CHECK_CU(fake_cuda_enqueue(stream->stream, call, new Callback{function, argument}));
  return 1;
}

// Timers, which nobody reads.

void create_timer(const SP_Device*, SP_Timer* timer, TF_Status*) { *timer = nullptr; }
void destroy_timer(const SP_Device*, SP_Timer) {}
void use_timer(const SP_Device*, SP_Stream, SP_Timer, TF_Status*) {}
std::uint64_t nanoseconds(SP_Timer) { return 0; }

// The platform.

void count_devices(const SP_Platform*, int* count, TF_Status*) {
  CHECK_CU(cuInit(0));
  CHECK_CU(cuDeviceGetCount(count));
  contexts.resize(static_cast<std::size_t>(*count));
  for (int device = 0; device < *count; ++device) {
    CHECK_CU(cuDevicePrimaryCtxRetain(&contexts[static_cast<std::size_t>(device)], device));
  }
}
void create_device(const SP_Platform*, SE_CreateDeviceParams* params, TF_Status*) {
  params->device->ordinal = params->ordinal;
  params->device->hardware_name = "Fake GPU";
  params->device->device_vendor = "tests";
  params->device->pci_bus_id = "0000:00:00.0";
}
void destroy_device(const SP_Platform*, SP_Device*) {}
std::int32_t numa_node(const SP_Device*) { return 0; }
std::int64_t memory_bandwidth(const SP_Device*) { return 1; }
double gflops(const SP_Device*) { return 1; }
void create_device_functions(const SP_Platform*, SE_CreateDeviceFnsParams* params, TF_Status*) {
  params->device_fns->get_numa_node = numa_node;
  params->device_fns->get_memory_bandwidth = memory_bandwidth;
  params->device_fns->get_gflops = gflops;
}
void destroy_device_functions(const SP_Platform*, SP_DeviceFns*) {}
void create_executor(const SP_Platform*, SE_CreateStreamExecutorParams* params, TF_Status*) {
  SP_StreamExecutor* const executor = params->stream_executor;
  executor->allocate = allocate;
  executor->deallocate = deallocate;
  executor->host_memory_allocate = allocate_host;
  executor->host_memory_deallocate = deallocate_host;
  executor->get_allocator_stats = allocator_stats;
  executor->device_memory_usage = memory_usage;
  executor->create_stream = create_stream;
  executor->destroy_stream = destroy_stream;
  executor->create_stream_dependency = make_dependent;
  executor->get_stream_status = stream_status;
  executor->create_event = create_event;
  executor->destroy_event = destroy_event;
  executor->get_event_status = event_status;
  executor->record_event = record_event;
  executor->wait_for_event = wait_for_event;
  executor->create_timer = create_timer;
  executor->destroy_timer = destroy_timer;
  executor->start_timer = use_timer;
  executor->stop_timer = use_timer;
  executor->memcpy_dtoh = copy_to_host;
  executor->memcpy_htod = copy_to_device;
  executor->memcpy_dtod = copy;
  executor->sync_memcpy_dtoh = copy_to_host_now;
  executor->sync_memcpy_htod = copy_to_device_now;
  executor->sync_memcpy_dtod = copy_now;
  executor->block_host_for_event = wait_for_host_event;
  executor->block_host_until_done = wait_for_stream;
  executor->synchronize_all_activity = wait_for_all;
  executor->mem_zero = fill_with_zeros;
  executor->memset = fill;
  executor->memset32 = fill_words;
  executor->host_callback = enqueue_callback;
}
void destroy_executor(const SP_Platform*, SP_StreamExecutor*) {}
void create_timer_functions(const SP_Platform*, SP_TimerFns* functions, TF_Status*) {
  functions->nanoseconds = nanoseconds;
}
void destroy_timer_functions(const SP_Platform*, SP_TimerFns*) {}
void destroy_platform(SP_Platform*) {}
void destroy_platform_functions(SP_PlatformFns*) {}

}  // namespace

// StreamCommon::platform_specific_handle() const, of a stream that holds the stream of this plugin in one of its first
// words. It returns a struct of one pointer.
extern "C" __attribute__((visibility("default"))) void* _ZNK15stream_executor12StreamCommon24platform_specific_handleEv(
    void* const* self) {
  constexpr int kWords = 64;
  const std::lock_guard<std::mutex> lock(mutex);
  for (int word = 1; word < kWords; ++word) {
    const auto found = std::find(streams.begin(), streams.end(), static_cast<SP_Stream>(self[word]));
    if (found != streams.end()) return (*found)->stream;
  }
  return nullptr;
}

extern "C" __attribute__((visibility("default"))) void SE_InitPlugin(SE_PlatformRegistrationParams* params,
                                                                     TF_Status*) {
  new_status = reinterpret_cast<decltype(new_status)>(dlsym(RTLD_DEFAULT, "TF_NewStatus"));
  delete_status = reinterpret_cast<decltype(delete_status)>(dlsym(RTLD_DEFAULT, "TF_DeleteStatus"));
  if (new_status == nullptr || delete_status == nullptr) check("TF_NewStatus", -1);
  SP_Platform* const platform = params->platform;
  platform->name = "FAKE_GPU";
  platform->type = "GPU";
  platform->use_bfc_allocator = 1;
  platform->force_memory_growth = 1;
  SP_PlatformFns* const functions = params->platform_fns;
  functions->get_device_count = count_devices;
  functions->create_device = create_device;
  functions->destroy_device = destroy_device;
  functions->create_device_fns = create_device_functions;
  functions->destroy_device_fns = destroy_device_functions;
  functions->create_stream_executor = create_executor;
  functions->destroy_stream_executor = destroy_executor;
  functions->create_timer_fns = create_timer_functions;
  functions->destroy_timer_fns = destroy_timer_functions;
  params->destroy_platform = destroy_platform;
  params->destroy_platform_fns = destroy_platform_functions;
}
