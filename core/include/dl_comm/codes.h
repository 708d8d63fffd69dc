// The collectives and the operators: their names in the bindings and their numbers in dl_comm.h. Pure.
//
// The rows say the same as those of core/src/collective/operation.rs; tests/single/test_op_headers.py compares them.
#pragma once

#include <cstdint>

#include "dl_comm.h"

namespace dl_comm {

// What a tensor holds: one block, or a block for each rank along the first axis.
enum class Blocks { kOne, kPerRank };

// The ranks that have inputs and outputs: all; only the root has inputs; only the root has outputs.
enum class Root { kNone, kSource, kTarget };

// A collective.
struct CollectiveKind {
  const char* name;
  int32_t code;
  Blocks in;
  Blocks out;
  bool reduces;
  Root root;

  constexpr bool same_shape() const { return in == Blocks::kOne && out == Blocks::kOne; }
  constexpr bool joins() const { return in == Blocks::kOne && out == Blocks::kPerRank; }
  constexpr bool exchanges() const { return in == Blocks::kPerRank && out == Blocks::kPerRank; }
};

inline constexpr CollectiveKind kCollectives[] = {
    {"allreduce", DL_COMM_ALLREDUCE, Blocks::kOne, Blocks::kOne, true, Root::kNone},
    {"broadcast", DL_COMM_BROADCAST, Blocks::kOne, Blocks::kOne, false, Root::kSource},
    {"barrier", DL_COMM_BARRIER, Blocks::kOne, Blocks::kOne, false, Root::kNone},
    {"reduce", DL_COMM_REDUCE, Blocks::kOne, Blocks::kOne, true, Root::kTarget},
    {"all_gather", DL_COMM_ALLGATHER, Blocks::kOne, Blocks::kPerRank, false, Root::kNone},
    {"gather", DL_COMM_GATHER, Blocks::kOne, Blocks::kPerRank, false, Root::kTarget},
    {"scatter", DL_COMM_SCATTER, Blocks::kPerRank, Blocks::kOne, false, Root::kSource},
    {"reduce_scatter", DL_COMM_REDUCE_SCATTER, Blocks::kPerRank, Blocks::kOne, true, Root::kNone},
    {"all_to_all", DL_COMM_ALLTOALL, Blocks::kPerRank, Blocks::kPerRank, false, Root::kNone},
};

// The collective with this code; null if there is none.
constexpr const CollectiveKind* find_collective(int32_t code) {
  for (const CollectiveKind& kind : kCollectives)
    if (kind.code == code) return &kind;
  return nullptr;
}

// An operator of a reduction that a caller may name.
struct Operator {
  const char* name;
  int32_t code;
  // With factors; kNoFactors: it takes none.
  int32_t scaled;
};

inline constexpr int32_t kNoFactors = -1;

inline constexpr Operator kOperators[] = {
    {"sum", DL_COMM_SUM, DL_COMM_SCALED_SUM},
    {"mean", DL_COMM_MEAN, DL_COMM_SCALED_MEAN},
    {"min", DL_COMM_MIN, DL_COMM_SCALED_MIN},
    {"max", DL_COMM_MAX, DL_COMM_SCALED_MAX},
    {"product", DL_COMM_PRODUCT, DL_COMM_SCALED_PRODUCT},
    {"bit_and", DL_COMM_BITAND, kNoFactors},
    {"bit_or", DL_COMM_BITOR, kNoFactors},
    {"bit_xor", DL_COMM_BITXOR, kNoFactors},
    {"adasum", DL_COMM_ADASUM, kNoFactors},
};

}  // namespace dl_comm
