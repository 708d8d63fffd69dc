"""The names of other libraries, for scripts that were written for them.

``dl_comm.compat.cray`` has those of the Cray PE DL Plugin, ``dl_comm.compat.torchmpi`` those of TorchMPI. They are the
same objects as ``dl_comm.NAME``, which stays for scripts that use it.
"""

from __future__ import annotations

from dl_comm.compat import cray, torchmpi

__all__ = ["cray", "torchmpi"]


def __dir__() -> list[str]:
    return sorted(__all__)
