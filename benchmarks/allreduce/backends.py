"""The Python contenders: their memory and their allreduce. A worker has one of them; each imports only what it needs.

One thread of every rank makes all calls, in the same order.
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.common import deepspeed
from benchmarks.common.worker import join_gloo

Operation = Callable[[list[Any]], list[Any]]
"""Averages a list of tensors, in place or not, and returns the means."""


class Backend(ABC):
    """One contender in one process; the constructor joins its job."""

    rank: int
    ranks: int
    averages = True
    """Whether the results are means; a limit only moves memory."""

    def refusal(self, dtype: str) -> str | None:
        """Why this type is not supported, or None."""
        return None

    @abstractmethod
    def empty(self, length: int, dtype: str) -> Any:
        """A tensor of `length` elements, in the memory kind of this contender."""

    @abstractmethod
    def fill(self, tensor: Any, pattern: np.ndarray) -> None:
        """Fills the tensor with the repeated pattern (float32)."""

    @abstractmethod
    def values(self, tensor: Any, begin: int, end: int) -> np.ndarray:
        """Elements [begin, end) as float64."""

    @abstractmethod
    def operation(self, mode: str) -> Operation:
        """The timed operation: a list in one call ("list"), one call a tensor ("each"), or one flat buffer ("flat")."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the job. Collective."""


class Arrays(Backend):
    """On NumPy arrays; bfloat16 is that of ml_dtypes."""

    def __init__(self) -> None:
        self.dtypes: dict[str, Any] = {"f32": np.float32, "f64": np.float64, "f16": np.float16}
        if importlib.util.find_spec("ml_dtypes"):
            self.dtypes["bf16"] = importlib.import_module("ml_dtypes").bfloat16

    def refusal(self, dtype: str) -> str | None:
        return None if dtype in self.dtypes else "NumPy has no bfloat16 without ml_dtypes"

    def empty(self, length: int, dtype: str) -> np.ndarray:
        return np.empty(length, self.dtypes[dtype])

    def fill(self, tensor: np.ndarray, pattern: np.ndarray) -> None:
        tensor[:] = np.resize(pattern.astype(tensor.dtype), tensor.shape)

    def values(self, tensor: np.ndarray, begin: int, end: int) -> np.ndarray:
        return tensor[begin:end].astype(np.float64)


class Tensors(Backend):
    """On torch tensors."""

    def __init__(self) -> None:
        self.torch = importlib.import_module("torch")
        names = {"f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16"}
        self.dtypes = {short: getattr(self.torch, name) for short, name in names.items()}

    def empty(self, length: int, dtype: str) -> Any:
        return self.torch.empty(length, dtype=self.dtypes[dtype])

    def fill(self, tensor: Any, pattern: np.ndarray) -> None:
        few = self.torch.from_numpy(pattern).to(tensor.dtype)
        whole = tensor.numel() // len(pattern) * len(pattern)
        tensor[:whole].view(-1, len(pattern)).copy_(few)
        tensor[whole:].copy_(few[: tensor.numel() - whole])

    def values(self, tensor: Any, begin: int, end: int) -> np.ndarray:
        found: np.ndarray = tensor[begin:end].to(self.torch.float64).numpy()
        return found


class NumpyBinding(Arrays):
    """dl_comm on NumPy arrays: new arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.dl_comm = importlib.import_module("dl_comm")
        self.dl_comm.init()
        self.rank, self.ranks = self.dl_comm.get_rank(), self.dl_comm.get_nranks()

    def operation(self, mode: str) -> Operation:
        operation: Operation = self.dl_comm.gradients
        return operation

    def close(self) -> None:
        self.dl_comm.finalize()


class NumpyBindingInPlace(NumpyBinding):
    """dl_comm on NumPy arrays, in place."""

    def operation(self, mode: str) -> Operation:
        gradients = self.dl_comm.gradients

        def operation(arrays: list[Any]) -> list[Any]:
            found: list[Any] = gradients(arrays, out=arrays)
            return found

        return operation


class NumpyBindingShared(NumpyBindingInPlace):
    """The same on arrays in shared memory."""

    def empty(self, length: int, dtype: str) -> np.ndarray:
        found: np.ndarray = self.dl_comm.shared_zeros(length, self.dtypes[dtype])
        return found


class TorchBinding(Tensors):
    """dl_comm on torch tensors: new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.dl_comm = importlib.import_module("dl_comm")
        self.dl_comm.init(framework="torch")
        self.rank, self.ranks = self.dl_comm.get_rank(), self.dl_comm.get_nranks()

    def operation(self, mode: str) -> Operation:
        operation: Operation = importlib.import_module("dl_comm.torch").gradients
        return operation

    def close(self) -> None:
        self.dl_comm.finalize()


class TorchBindingInPlace(TorchBinding):
    """dl_comm on torch tensors, in place: the optimizer's operation as a blocking call."""

    def operation(self, mode: str) -> Operation:
        average = importlib.import_module("dl_comm.torch._ops").average_in_place

        def operation(tensors: list[Any]) -> list[Any]:
            average(tensors, 0, "benchmark")
            return tensors

        return operation


class Gloo(Tensors):
    """torch.distributed's gloo, over the loopback interface."""

    def __init__(self) -> None:
        super().__init__()
        self.distributed = importlib.import_module("torch.distributed")
        self.flat = importlib.import_module("torch._utils")
        self.rank, self.ranks = join_gloo()
        self.all_reduce: Callable[[Any], Any] = self.distributed.all_reduce

    def operation(self, mode: str) -> Operation:
        all_reduce, ranks = self.all_reduce, self.ranks

        def each(tensors: list[Any]) -> list[Any]:
            for tensor in tensors:
                all_reduce(tensor)
                tensor.div_(ranks)
            return tensors

        def flat(tensors: list[Any]) -> list[Any]:
            whole = self.flat._flatten_dense_tensors(tensors)
            each([whole])
            self.torch._foreach_copy_(tensors, list(self.flat._unflatten_dense_tensors(whole, tensors)))
            return tensors

        return flat if mode == "flat" else each

    def close(self) -> None:
        self.distributed.destroy_process_group()


class DeepSpeed(Gloo):
    """DeepSpeed's allreduce in shared memory."""

    def __init__(self) -> None:
        super().__init__()
        self.all_reduce = deepspeed.all_reduce(self.rank, self.ranks)

    def refusal(self, dtype: str) -> str | None:
        return "DeepSpeed's allreduce has no float64" if dtype == "f64" else None


class Mpi4py(Arrays):
    """mpi4py on NumPy arrays, with the MPI of the environment."""

    def __init__(self) -> None:
        super().__init__()
        self.mpi = importlib.import_module("mpi4py.MPI")
        self.rank, self.ranks = self.mpi.COMM_WORLD.rank, self.mpi.COMM_WORLD.size
        names = {"f32": "FLOAT", "f64": "DOUBLE", "f16": "FLOAT16_T", "bf16": "BFLOAT16_T"}
        null = self.mpi.DATATYPE_NULL
        self.types = {short: getattr(self.mpi, name, null) for short, name in names.items()}

    def refusal(self, dtype: str) -> str | None:
        if self.types[dtype] == self.mpi.DATATYPE_NULL:
            return f"this MPI has no type for {dtype} in mpi4py"
        return super().refusal(dtype)

    def operation(self, mode: str) -> Operation:
        in_place, total, world = self.mpi.IN_PLACE, self.mpi.SUM, self.mpi.COMM_WORLD
        ranks, types = self.ranks, {np.dtype(self.dtypes[name]): kind for name, kind in self.types.items()}

        def each(arrays: list[np.ndarray]) -> list[np.ndarray]:
            kind = types[arrays[0].dtype]
            for array in arrays:
                world.Allreduce(in_place, [array.view(np.uint8), array.size, kind], total)
                np.divide(array, array.dtype.type(ranks), out=array)
            return arrays

        def flat(arrays: list[np.ndarray]) -> list[np.ndarray]:
            whole = np.concatenate(arrays)
            each([whole])
            begin = 0
            for array in arrays:
                array[:] = whole[begin : begin + array.size]
                begin += array.size
            return arrays

        return flat if mode == "flat" else each

    def close(self) -> None:
        pass  # mpi4py finalizes MPI at interpreter exit


BACKENDS: dict[str, Callable[[], Backend]] = {
    "numpy": NumpyBinding,
    "numpy-inplace": NumpyBindingInPlace,
    "numpy-shared": NumpyBindingShared,
    "torch": TorchBinding,
    "torch-inplace": TorchBindingInPlace,
    "gloo": Gloo,
    "deepspeed": DeepSpeed,
    "mpi4py": Mpi4py,
}
"""The contenders by the name on a worker's command line."""
