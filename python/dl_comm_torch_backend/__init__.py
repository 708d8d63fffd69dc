"""Entry points by which torch finds the backend ``dl_comm`` of ``torch.distributed``.

``import torch`` runs ``autoload`` in every environment with dl_comm. So this package imports nothing of dl_comm, and
loads no library, before a script uses the backend.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

NAME = "dl_comm"


def autoload() -> None:
    """Registers the backend with a torch that does not look for it by itself. Never raises.

    The entry point ``torch.backends``. Also lets ``init_process_group("dl_comm")`` find the ranks of an MPI launcher.
    """
    try:
        import torch.distributed as dist

        # From 2.14 on torch looks for the entry point of a name that it does not know.
        if not hasattr(dist.Backend, "_ensure_backend_registered"):
            register_if_available()
        if dist.is_available():
            _extend_rendezvous()
    except Exception:
        # `import torch` must work for scripts that do not use dl_comm. Those that do get torch's error for an unknown
        # backend, and `import dl_comm.torch` raises the reason.
        return


def register() -> None:
    """Registers the backend with ``torch.distributed``; once. Entry point ``torch.distributed.backends``."""
    import torch.distributed as dist

    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def register_if_available() -> None:
    """Calls ``register`` unless torch was built without ``torch.distributed``."""
    import torch.distributed as dist

    if dist.is_available():
        register()


def _create(options: Any, pg_options: Any = None) -> Any:
    from dl_comm._torch_distributed import create_backend

    return create_backend(options, pg_options)


def _extend_rendezvous() -> None:
    """Makes ``init_process_group("dl_comm")`` find the ranks as ``dl_comm.init`` does, without torch's variables.

    Replaces the function by which torch's own one finds them. Calls that do not name this backend go to torch's.
    """
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    usual: Callable[..., Iterator[tuple[Any, int, int]]] = c10d.rendezvous
    if getattr(usual, "__module__", "") == __name__:
        return

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        # The function gets no backend; a variable of its caller has it.
        is_ours = NAME in str(sys._getframe(1).f_locals.get("backend", "")).lower()
        if is_ours and url == "env://" and (rank, world_size) == (-1, -1):
            from dl_comm._torch_distributed import rendezvous_of_ranks

            if (found := rendezvous_of_ranks(**kwargs)) is not None:
                return found
        return usual(url, rank, world_size, **kwargs)

    c10d.rendezvous = rendezvous
