// Functions of libcuda.so.1 for tests and the fake NCCL: own additions, and the CUDA functions that the fake NCCL
// calls.
//
// Thread rule: any thread.
#pragma once

#include "cuda_api.h"

// Enqueues `function(argument)` on the stream. Handles 0, 1 and 2 are streams of the thread's current context.
FAKE_API CUresult fake_cuda_enqueue(CUstream stream, void (*function)(void*), void* argument);

// As fake_cuda_enqueue of `function(make(prototype))`. A graph that captures the stream makes one for each of its
// launches, when that is called. `release(prototype)` comes at the end, also after an error.
struct FakeOperation {
  void* (*make)(void* prototype);
  void (*function)(void* made);
  void (*release)(void* prototype);
};
FAKE_API CUresult fake_cuda_enqueue_made(CUstream stream, const FakeOperation* operation, void* prototype);

// The host address of device memory. Dies, naming `what`, if this is no device memory.
FAKE_API void* fake_cuda_host_address(CUdeviceptr address, std::size_t bytes, const char* what);

// Device allocations so far; bytes of device memory in use (allocated, or freed but open in other processes); kernel
// launches; copies; questions about an address. Launches and copies count when enqueued.
FAKE_API void fake_cuda_counters(long out[5]);

FAKE_API CUresult cuCtxGetDevice(CUdevice* device);
FAKE_API CUresult cuCtxGetCurrent(CUcontext* context);
FAKE_API CUresult cuCtxSetCurrent(CUcontext context);
FAKE_API CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice device);
