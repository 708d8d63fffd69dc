// Sums of NCCL's types, as an all-reduce makes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "nccl_api.h"

namespace fake {

// How the values of the ranks become one.
struct Reduction {
  // Every value is multiplied by `scalar` first, a number of the type; bits in its lower end.
  bool scaled = false;
  std::uint64_t scalar = 0;
  // The sum is divided by this, toward zero: averages of integers.
  std::int64_t divisor = 1;
};

// The size of an element; 0 for a type that the fake does not have.
std::size_t size_of(ncclDataType_t dtype);

// What ncclAvg means for this type and number of ranks: floating point is scaled, integers are divided.
Reduction average_of(ncclDataType_t dtype, int nranks);

// Writes the reduction of `count` elements from every source. Floating-point numbers are added in the order of the
// sources and rounded once (float16 and bfloat16: from float32); integers wrap around.
void reduce(ncclDataType_t dtype, const Reduction& reduction, const std::vector<const char*>& sources, char* target,
            std::size_t count);

}  // namespace fake
