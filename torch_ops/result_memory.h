// New tensors for results.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "dl_comm/blocks.h"

namespace dl_comm::torch_ops {

// A contiguous tensor of unknown values, of the type and device of `like`. Large ones in host memory lie in the memory
// of freed results (dl_comm_result_alloc) from torch 2.11 on. Thread rule: any thread.
::torch::stable::Tensor new_result(const ::torch::stable::Tensor& like, Extents shape);

}  // namespace dl_comm::torch_ops
