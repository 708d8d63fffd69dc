// cuCtx* and cuDevicePrimaryCtx*: see context.h.
#include "context.h"

#include <deque>
#include <vector>

#include "abort.h"

namespace fake {
namespace {

// The primary contexts of all devices, by ordinal. A handle is an invalid address.
struct Contexts {
  std::deque<Context> all;
  Contexts() : all(static_cast<std::size_t>(device_count())) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i].device = static_cast<int>(i);
      all[i].handle = reinterpret_cast<CUcontext>((std::uintptr_t{0x5fc0} << 48) + 16 * (i + 1));
    }
  }
  // Null if the handle is unknown.
  Context* find(CUcontext handle) {
    for (Context& context : all) {
      if (context.handle == handle) return &context;
    }
    return nullptr;
  }
};

Contexts& contexts() { return never_destroyed<Contexts>(); }

thread_local std::vector<Context*> stack;

}  // namespace

CUresult need_context(Context** context) {
  if (const CUresult refused = need_init()) return refused;
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = stack.back();
  const std::lock_guard lock((*context)->lock);
  return (*context)->retained > 0 ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

}  // namespace fake

using namespace fake;

FAKE_API CUresult cuDevicePrimaryCtxRetain(CUcontext* handle, CUdevice device) {
  if (const CUresult refused = need_device(device)) return refused;
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (setting("FAKE_CUDA_EXCLUSIVE", 0) != 0) return CUDA_ERROR_DEVICE_UNAVAILABLE;
  Context& context = contexts().all[static_cast<std::size_t>(device)];
  const std::lock_guard lock(context.lock);
  ++context.retained;
  *handle = context.handle;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  if (const CUresult refused = need_device(device)) return refused;
  Context& context = contexts().all[static_cast<std::size_t>(device)];
  const std::lock_guard lock(context.lock);
  if (context.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
  --context.retained;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuCtxSetCurrent(CUcontext handle) {
  if (const CUresult refused = need_init()) return refused;
  Context* context = contexts().find(handle);
  if (handle != nullptr && context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (!stack.empty()) stack.pop_back();
  if (context != nullptr) stack.push_back(context);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuCtxGetCurrent(CUcontext* handle) {
  if (const CUresult refused = need_init()) return refused;
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *handle = stack.empty() ? nullptr : stack.back()->handle;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuCtxPushCurrent_v2(CUcontext handle) {
  if (const CUresult refused = need_init()) return refused;
  Context* context = contexts().find(handle);
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  stack.push_back(context);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuCtxPopCurrent_v2(CUcontext* handle) {
  if (const CUresult refused = need_init()) return refused;
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (handle != nullptr) *handle = stack.back()->handle;
  stack.pop_back();
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuCtxGetDevice(CUdevice* device) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *device = context->device;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuCtxEnablePeerAccess(CUcontext handle, unsigned flags) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  const Context* peer = contexts().find(handle);
  if (peer == nullptr || peer == context) return CUDA_ERROR_INVALID_CONTEXT;
  if (!are_peers(context->device, peer->device)) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  const std::lock_guard lock(context->lock);
  return context->peers.insert(peer->device).second ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

FAKE_API CUresult cuCtxSynchronize() {
  die("cuCtxSynchronize was called: nobody may wait for all that others do on the device");
}
