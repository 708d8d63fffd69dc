// Reductions for NCCL's element types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "nccl_api.h"

namespace fake {

// How a reduction combines the values of the ranks.
struct Reduction {
  // ncclSum, ncclProd, ncclMax or ncclMin.
  ncclRedOp_t op = ncclSum;
  // Whether to multiply every value by `scalar` first. `scalar` holds a value of the element type in its low bytes.
  bool scaled = false;
  std::uint64_t scalar = 0;
  // Divisor of the sum, truncating toward zero: the mean of integers.
  std::int64_t divisor = 1;
};

// Size of an element; 0 if the fake does not support the type.
std::size_t size_of(ncclDataType_t dtype);

// The reduction for ncclAvg: floating point is multiplied by 1/n, integers are divided.
Reduction average_of(ncclDataType_t dtype, int nranks);

// Reduces `count` elements of all sources. Floating-point values are combined in the order of the sources and rounded
// once (float16 and bfloat16: from float32). Integers wrap around. Minima and maxima ignore NaN beside numbers.
void reduce(ncclDataType_t dtype, const Reduction& reduction, const std::vector<const char*>& sources, char* target,
            std::size_t count);

}  // namespace fake
