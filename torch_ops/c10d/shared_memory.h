// Tensors in memory that the ranks of a host share, in which collectives work in place.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

namespace dl_comm::c10d_backend {

// A one-dimensional CPU tensor of `size` elements. Its memory is freed with it.
at::Tensor shared_tensor(int64_t size, at::TensorOptions options);

// Moves the memory of a DistributedDataParallel bucket, if `tensor` is one that comes for the second time, into shared
// memory. All views of the bucket, and so the gradients in it, move too. Does nothing for other tensors: those outside
// of a backward pass, that are a part of a storage, or whose memory torch's CPU allocator does not own.
//
// Thread rule: any thread; the tensor is used by no other.
void share_bucket(const at::Tensor& tensor);

}  // namespace dl_comm::c10d_backend
