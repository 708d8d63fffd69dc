"""The contenders on GPU tensors; each rank uses the GPU local rank modulo GPU count.

A call is timed until it is complete on the GPU. With ``BENCH_DEVICE=cpu`` the tensors are in host memory, to test the
contenders without a GPU.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

from benchmarks.allreduce.backends import Backend, Operation, Tensors
from benchmarks.common.worker import join_gloo, numbered

DEVICE = os.environ.get("BENCH_DEVICE", "cuda")


class CudaTensors(Tensors):
    """On torch tensors on this rank's GPU."""

    def use(self, rank: int) -> None:
        """Selects the GPU of this rank."""
        if DEVICE == "cuda":
            if not self.torch.cuda.is_available():
                raise RuntimeError("torch sees no GPU")
            self.torch.cuda.set_device(rank % self.torch.cuda.device_count())

    def empty(self, length: int, dtype: str) -> Any:
        return self.torch.empty(length, dtype=self.dtypes[dtype], device=DEVICE)

    def fill(self, tensor: Any, pattern: np.ndarray) -> None:
        few = self.torch.from_numpy(pattern).to(tensor)
        whole = tensor.numel() // len(pattern) * len(pattern)
        tensor[:whole].view(-1, len(pattern)).copy_(few)
        tensor[whole:].copy_(few[: tensor.numel() - whole])
        self.finish()

    def values(self, tensor: Any, begin: int, end: int) -> np.ndarray:
        found: np.ndarray = tensor[begin:end].to(self.torch.float64).cpu().numpy()
        return found

    def finish(self) -> None:
        """Waits for the GPU's current stream."""
        if DEVICE == "cuda":
            self.torch.cuda.current_stream().synchronize()

    def each(self, average: Any) -> Operation:
        """The operation that averages each tensor separately, in place."""

        def operation(tensors: list[Any]) -> list[Any]:
            for tensor in tensors:
                average(tensor)
            self.finish()
            return tensors

        return operation


class DlComm(CudaTensors):
    """dl_comm, in place, with the path of ``DL_COMM_GPU_PATH``."""

    def __init__(self) -> None:
        super().__init__()
        self.dl_comm = importlib.import_module("dl_comm")
        self.dl_comm.init(framework="torch")
        self.rank, self.ranks = self.dl_comm.get_rank(), self.dl_comm.get_nranks()
        self.use(self.dl_comm.local_rank())

    def operation(self, mode: str) -> Operation:
        average = importlib.import_module("dl_comm.torch._ops").average_in_place

        def operation(tensors: list[Any]) -> list[Any]:
            average(tensors, 0, "benchmark")
            self.finish()
            return tensors

        return operation

    def close(self) -> None:
        self.dl_comm.finalize()


class Gloo(CudaTensors):
    """torch.distributed's gloo, which copies GPU tensors through the host."""

    def __init__(self) -> None:
        super().__init__()
        self.distributed = importlib.import_module("torch.distributed")
        self.rank, self.ranks = join_gloo()
        self.use(self.rank)

    def operation(self, mode: str) -> Operation:
        def average(tensor: Any) -> None:
            self.distributed.all_reduce(tensor)
            tensor.div_(self.ranks)

        return self.each(average)

    def close(self) -> None:
        self.distributed.destroy_process_group()


class Nccl(CudaTensors):
    """torch.distributed's NCCL, which needs a GPU for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.ranks = numbered()
        shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        if not self.torch.cuda.is_available() or (self.torch.cuda.device_count() < self.ranks and not shares):
            raise RuntimeError("NCCL needs a GPU for each rank, or NCCL_MULTI_RANK_GPU_ENABLE=1")
        self.use(self.rank)
        self.distributed = importlib.import_module("torch.distributed")
        store = f"file://{os.environ['BENCH_STORE']}"
        self.distributed.init_process_group("nccl", init_method=store, rank=self.rank, world_size=self.ranks)

    def operation(self, mode: str) -> Operation:
        mean = self.distributed.ReduceOp.AVG
        return self.each(lambda tensor: self.distributed.all_reduce(tensor, mean))

    def close(self) -> None:
        self.distributed.destroy_process_group()


class Mpi(CudaTensors):
    """mpi4py through pinned host memory: copy to the host, MPI_Allreduce, copy back."""

    def __init__(self) -> None:
        super().__init__()
        self.mpi = importlib.import_module("mpi4py.MPI")
        self.rank, self.ranks = self.mpi.COMM_WORLD.rank, self.mpi.COMM_WORLD.size
        self.use(self.rank)

    def refusal(self, dtype: str) -> str | None:
        return None if dtype in ("f32", "f64") else "mpi4py does not support this NumPy type"

    def operation(self, mode: str) -> Operation:
        hosts: dict[int, Any] = {}

        def average(tensor: Any) -> None:
            key = tensor.numel() * tensor.element_size()
            if key not in hosts:
                hosts[key] = self.torch.empty_like(tensor, device="cpu", pin_memory=DEVICE == "cuda")
            host = hosts[key]
            host.copy_(tensor)
            array = host.numpy()
            self.mpi.COMM_WORLD.Allreduce(self.mpi.IN_PLACE, array, self.mpi.SUM)
            tensor.copy_(host, non_blocking=True)
            tensor.div_(self.ranks)

        return self.each(average)

    def close(self) -> None:
        pass  # mpi4py finalizes MPI at interpreter exit


class Limit(CudaTensors):
    """A limit: moves the bytes of an allreduce without computing a mean."""

    averages = False

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.ranks = numbered()
        self.use(self.rank)
        self.spare: dict[int, Any] = {}

    def like(self, tensor: Any, times: int = 1, pinned: bool = False) -> Any:
        """Memory for `times` tensors of this length, cached for the next call."""
        key = (tensor.numel() * times, tensor.dtype, pinned)
        if key not in self.spare:
            self.spare = {at: memory for at, memory in self.spare.items() if at[0] >= key[0]}
            device = "cpu" if pinned else DEVICE
            self.spare[key] = self.torch.empty(
                key[0], dtype=tensor.dtype, device=device, pin_memory=pinned and DEVICE == "cuda"
            )
        return self.spare[key]

    def close(self) -> None:
        pass


class CopyLimit(Limit):
    """On one GPU: rank 0 reads and writes the bytes of all ranks' tensors once, 2pN / B."""

    def operation(self, mode: str) -> Operation:
        def copy(tensor: Any) -> None:
            if self.rank == 0:
                whole = self.like(tensor, 2 * self.ranks)
                half = whole.numel() // 2
                whole[:half].copy_(whole[half:])

        return self.each(copy)


class PinnedLimit(Limit):
    """Through the host: concurrent pinned copies of the tensor in both directions, on all ranks."""

    def operation(self, mode: str) -> Operation:
        side = self.torch.cuda.Stream() if DEVICE == "cuda" else None

        def copy(tensor: Any) -> None:
            host = self.like(tensor, 2, pinned=True)
            down, up = host[: tensor.numel()], host[tensor.numel() :]
            other = self.like(tensor)
            if side is None:
                down.copy_(tensor)
                other.copy_(up)
                return
            with self.torch.cuda.stream(side):
                other.copy_(up, non_blocking=True)
            down.copy_(tensor, non_blocking=True)
            side.synchronize()

        return self.each(copy)


BACKENDS: dict[str, type[Backend]] = {
    "cuda": DlComm,
    "cuda-gloo": Gloo,
    "cuda-nccl": Nccl,
    "cuda-mpi4py": Mpi,
    "cuda-limit-copy": CopyLimit,
    "cuda-limit-pinned": PinnedLimit,
}
"""As `backends.BACKENDS`."""
