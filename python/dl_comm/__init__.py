"""dl_comm: data-parallel training for PyTorch, TensorFlow, Keras and NumPy over MPI and shared memory.

Two calls make a loop that trains on one process train on many:

    import dl_comm

    world = dl_comm.world()  # starts the ranks
    world.broadcast(parameters, 0)  # in place: all begin with rank 0's
    world.allreduce(gradients, "mean", out=gradients)  # in each step

Start it with ``mpiexec -n 4 python script.py``; without a launcher a script is rank 0 of 1. The lists may hold NumPy
arrays, TensorFlow or PyTorch tensors. ``dl_comm.torch``, ``dl_comm.tensorflow`` and ``dl_comm.keras`` have optimizers
and callbacks. ``dir(dl_comm)`` shows the main names, the reference all of them. ``dl_comm.compat`` lists those of the
Cray PE DL Plugin and of TorchMPI; each is ``dl_comm.NAME``, too. Importing this package imports no framework, loads the
core only on the first use of a name, and changes no handler of the process.

Thread rule: any thread may call every function. All ranks must call those marked *collective*; the core matches the
calls by signature if their order differs. No function holds the GIL while it waits.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dl_comm._api.names import *  # noqa: F403
    from dl_comm._api.names import __all__ as __all__
    from dl_comm._api.unlisted import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name not in ("__all__", "__version__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")  # a private module, not yet imported
    if name in ("compat", "run"):
        return importlib.import_module(f"dl_comm.{name}")  # the latter needs no core, and scripts seldom need it
    listed, unlisted = (importlib.import_module(f"dl_comm._api.{module}") for module in ("names", "unlisted"))
    if name != "__all__" and name not in listed.__all__ and name not in unlisted.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in (listed, unlisted):
        for each in vars(module).keys() & module.__all__:
            globals().setdefault(each, getattr(module, each))  # a program may have replaced one
    # Scripts of the plugin may import all names.
    globals()["__all__"] = [*listed.__all__, *unlisted.__all__]
    return globals()[name]


def __dir__() -> list[str]:
    main: tuple[str, ...] = importlib.import_module("dl_comm._api.names").MAIN
    return sorted({*main, "__version__", "compat", "timeline", "training"})
