// The part of NCCL's API that the fake implements. It is declared here because the machines that use the fake have no
// NCCL headers.
//
// Names, numbers and layouts are those of NCCL 2.28.
#pragma once

#include <climits>
#include <cstddef>

#include "cuda_api.h"

enum ncclResult_t : int {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
};

enum ncclDataType_t : int {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
};

// Higher values are handles of user-defined reductions.
using ncclRedOp_t = int;
constexpr ncclRedOp_t ncclSum = 0;
constexpr ncclRedOp_t ncclProd = 1;
constexpr ncclRedOp_t ncclMax = 2;
constexpr ncclRedOp_t ncclMin = 3;
constexpr ncclRedOp_t ncclAvg = 4;
constexpr ncclRedOp_t ncclNumOps = 5;

enum ncclScalarResidence_t : int { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 };

struct ncclUniqueId {
  char internal[128];
};

constexpr unsigned kNcclConfigMagic = 0xcafebeef;
// The first fields; `size` is the size of the caller's struct, which may have more.
struct ncclConfig_t {
  std::size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
};

using ncclComm_t = struct ncclComm*;
