"""Finds, or has built, the op library for the installed framework, and makes sure that it shares this core."""

from __future__ import annotations

from dl_comm import _dl_comm
from dl_comm._build import cached_library, packaged_library


def ops_library(framework: str) -> str:
    """The path of the op library for ``framework`` (``"torch"`` or ``"tensorflow"``).

    It comes with the package when it was built at install, else from the cache, where it is built when it is not there.

    Raises:
        ImportError: The framework is not installed, or the library cannot be built; the text says why and what to do.
    """
    return str(packaged_library(framework) or cached_library(framework))


def check_one_core(path: str, core_id: int) -> None:
    """Makes sure that the op library at ``path`` uses the core that this package uses.

    Raises:
        ImportError: It has loaded a second core, so it would know nothing of ``init``.
    """
    mine = _dl_comm.core_id()
    if core_id != mine:
        raise ImportError(
            f"{path} uses another core of dl_comm (id {core_id:#x}) than {_dl_comm.__file__} (id {mine:#x}); rebuild "
            "it with 'python -m dl_comm.build --force'"
        )
