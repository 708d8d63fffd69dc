// cuInit and cuDevice*: FAKE_CUDA_DEVICES identical devices, the same in all processes.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "abort.h"
#include "context.h"
#include "faults.h"
#include "memory.h"

namespace fake {
namespace {

// The process that has called cuInit. As with the real driver, a forked child is not initialized.
std::atomic<pid_t> initialised{0};

bool mem_ops() { return setting("FAKE_CUDA_NO_MEMOPS", 0) == 0; }

CUresult copy_text(const std::string& text, char* out, int length) {
  if (out == nullptr || length <= static_cast<int>(text.size())) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(out, text.c_str(), text.size() + 1);
  return CUDA_SUCCESS;
}

}  // namespace

int device_count() {
  static const int count = static_cast<int>(setting("FAKE_CUDA_DEVICES", 1));
  return count;
}

int capability() { return static_cast<int>(setting("FAKE_CUDA_CAPABILITY", 91)); }

int gpu_of(int device) {
  const int slices = static_cast<int>(setting("FAKE_CUDA_MIG", 0));
  return slices == 0 ? device : device / slices;
}

bool are_peers(int device, int other) {
  return device != other && setting("FAKE_CUDA_NO_PEERS", 0) == 0 && setting("FAKE_CUDA_MIG", 0) == 0;
}

CUuuid device_uuid(int device) {
  CUuuid uuid = {"fake device"};
  std::memcpy(uuid.bytes + sizeof uuid.bytes - sizeof device, &device, sizeof device);
  return uuid;
}

CUresult need_init() {
  if (initialised != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
  return fault();
}

CUresult need_device(CUdevice device) {
  if (const CUresult refused = need_init()) return refused;
  return device >= 0 && device < device_count() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

}  // namespace fake

using namespace fake;

FAKE_API CUresult cuInit(unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (device_count() == 0) return CUDA_ERROR_NO_DEVICE;
  if (initialised == getpid()) return fault();
  remove_stale(kFilePrefix);
  // Exit handlers that were registered before cuInit find the driver shut down.
  std::atexit([] {
    if (initialised == getpid()) deinitialise();
  });
  initialised = getpid();
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDriverGetVersion(int* version) {
  if (fault() == CUDA_ERROR_DEINITIALIZED) return CUDA_ERROR_DEINITIALIZED;
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = static_cast<int>(setting("FAKE_CUDA_DRIVER", 13000));
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceGetCount(int* count) {
  if (const CUresult refused = need_init()) return refused;
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = device_count();
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (const CUresult refused = need_device(ordinal)) return refused;
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  if (const CUresult refused = need_device(device)) return refused;
  return copy_text("Fake GPU", name, length);
}

FAKE_API CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
  if (const CUresult refused = need_device(device)) return refused;
  char text[32];
  std::snprintf(text, sizeof text, "0000:%02x:00.0", gpu_of(device) + 1);
  return copy_text(text, id, length);
}

FAKE_API CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  if (const CUresult refused = need_device(device)) return refused;
  if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *uuid = device_uuid(device);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }

FAKE_API CUresult cuDeviceTotalMem_v2(std::size_t* bytes, CUdevice device) {
  if (const CUresult refused = need_device(device)) return refused;
  if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *bytes = kDeviceBytes;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  if (const CUresult refused = need_device(device)) return refused;
  if (const CUresult refused = need_device(peer)) return refused;
  if (can == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *can = are_peers(device, peer);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (const CUresult refused = need_device(device)) return refused;
  if (value == nullptr || attribute <= 0) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = 1024;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = 4;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
      *value = setting("FAKE_CUDA_EXCLUSIVE", 0) != 0 ? 3 : 0;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = capability() / 10;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = capability() % 10;
      break;
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR_V1:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR:
      *value = mem_ops();
      break;
    default:
      *value = 1;
  }
  return CUDA_SUCCESS;
}

// NVRTC asks a loaded driver for internal tables. Without this function it would call missing ones.
FAKE_API CUresult cuGetExportTable(const void** table, const void*) {
  if (table != nullptr) *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}
