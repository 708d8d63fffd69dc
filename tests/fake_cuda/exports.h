// What libcuda.so.1 has beside CUDA's own functions, for the fake NCCL and for tests; and the few of CUDA's that the
// fake NCCL calls.
//
// Thread rule: everything may be called from any thread.
#pragma once

#include "cuda_api.h"

// Runs `function(argument)` on the stream (0, 1, 2: those of the calling thread's current context), in its order.
FAKE_API CUresult fake_cuda_enqueue(CUstream stream, void (*function)(void*), void* argument);

// The address at which the host finds this device memory. Dies, naming `what`, when this is no device memory.
FAKE_API void* fake_cuda_host_address(CUdeviceptr address, std::size_t bytes, const char* what);

// Allocations of device memory made so far, bytes of device memory in use now (allocated, or
// freed and still open in other processes), kernels launched, copies made (copies
// and launches count when they are asked for).
FAKE_API void fake_cuda_counters(long out[4]);

FAKE_API CUresult cuCtxGetDevice(CUdevice* device);
FAKE_API CUresult cuCtxGetCurrent(CUcontext* context);
FAKE_API CUresult cuCtxSetCurrent(CUcontext context);
FAKE_API CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice device);
