"""Entry points by which torch finds the backend ``dl_comm`` of ``torch.distributed``.

``import torch`` runs ``autoload`` in every environment with dl_comm. So this package imports nothing of dl_comm, and
loads no library, before a script uses the backend.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

NAME = "dl_comm"
_LAUNCHER_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PALS_RANKID")


def autoload() -> None:
    """Registers the backend with a torch that does not look for it by itself. Never raises.

    The entry point ``torch.backends``. Also lets ``init_process_group`` find the ranks of an MPI launcher.
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


def _is_launched() -> bool:
    # A rank that has started takes the launcher's variables out of its environment.
    core = sys.modules.get("dl_comm._dl_comm")
    return any(name in os.environ for name in _LAUNCHER_RANKS) or (core is not None and core.is_up())


def _extend_rendezvous() -> None:
    """Makes ``env://`` work without torch's variables for ranks of an MPI launcher, where it would raise an error."""
    # The package has a function of the same name.
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    usual: Callable[..., Iterator[tuple[Any, int, int]]] = handlers["env"]
    if getattr(usual, "__module__", "") == __name__:
        return

    def env(url: str, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        if "rank=" in url or "RANK" in os.environ or not _is_launched():
            return usual(url, **kwargs)
        from dl_comm._torch_distributed import rendezvous_by_launcher

        return rendezvous_by_launcher(**kwargs)

    handlers["env"] = env
