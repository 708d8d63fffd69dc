"""Public functions from a line of arguments: Horovod's functions take the same ones in many orders, also by position.

    @takes("tensor name process_set")
    def allgather(tensor, name, process_set): ...   # allgather(tensor, name=None, process_set=global_process_set)

Thread rule: at import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from horovod.common.compression import NoneCompressor
from horovod.common.process_sets import global_process_set

ARGUMENTS: dict[str, tuple[str, Any]] = {
    "average": ("bool | None", None),
    "average_aggregated_gradients": ("bool", False),
    "backward_passes_per_step": ("int", 1),
    "compression": ("type[Compressor]", NoneCompressor),
    "device_dense": ("str", ""),
    "device_sparse": ("str", ""),
    "gradient_predivide_factor": ("float", 1.0),
    "groups": ("int | list[list[Any]] | None", None),
    "ignore_name_scope": ("bool", False),
    "local_layers": ("Any", None),
    "name": ("str | None", None),
    "num_groups": ("int", 0),
    "op": ("int | None", None),
    "postscale_factor": ("float", 1.0),
    "prescale_factor": ("float", 1.0),
    "process_set": ("ProcessSet", global_process_set),
    "scale_local_gradients": ("bool", True),
    "session": ("Any", None),
    "sparse_as_dense": ("bool", False),
    "splits": ("Any", None),
    "use_locking": ("bool", False),
}
"""The type and the default of each argument; others have no default, and any type."""


def takes(arguments: str, name: str = "", **defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: a function with these arguments, in this order, that calls the decorated one with all by name.

    Args:
        arguments: The names of the arguments; ``name=None`` gives another default than `ARGUMENTS`.
        name: That of the function; empty: that of the decorated one.
        defaults: Further ones.
    """
    module = sys._getframe(1).f_globals["__name__"]  # that has the function, for pickles
    names = [each.partition("=")[0] for each in arguments.split()]
    known = {each: default for each, (_, default) in ARGUMENTS.items()} | defaults

    def decorator(run: Callable[..., Any]) -> Callable[..., Any]:
        called = name or run.__name__
        parameters = ", ".join(f"{each}=_defaults['{each}']" if each in known else each for each in arguments.split())
        passed = ", ".join(f"{each}={each}" for each in names)
        space: dict[str, Any] = {"_decorated": run, "_defaults": known, "__name__": module}
        source = f"def {called}({parameters}):\n    return _decorated({passed})\n"
        exec(compile(source, f"<{module}.{called}>", "exec"), space)
        function: Callable[..., Any] = space[called]
        function.__doc__ = run.__doc__
        function.__annotations__ = {each: ARGUMENTS.get(each, ("Any",))[0] for each in names}
        return function

    return decorator
