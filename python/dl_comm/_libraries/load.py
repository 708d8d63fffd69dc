"""Finds or builds the op library for the installed framework, and checks that it uses this core."""

from __future__ import annotations

from dl_comm import _dl_comm
from dl_comm._libraries.build import cached_library, existing_library


def ops_library(name: str) -> str:
    """The path of the op library ``name``: ``"torch"``, ``"torch.distributed"`` or ``"tensorflow"``.

    Uses the library in the cache, else that of the package. Builds it in the cache if both are missing.

    Raises:
        ImportError: The framework is not installed, or the build failed; the message has the reason and the fix.
    """
    return str(existing_library(name) or cached_library(name))


def check_one_core(path: str, core_id: int) -> None:
    """Checks that the op library at ``path`` uses the same core as this package.

    Raises:
        ImportError: The op library has loaded a second core, which ``init`` would not initialize.
    """
    mine = _dl_comm.core_id()
    if core_id != mine:
        raise ImportError(
            f"{path} uses another core of dl_comm (id {core_id:#x}) than {_dl_comm.__file__} (id {mine:#x}); rebuild "
            "it with 'python -m dl_comm.build --force'"
        )
