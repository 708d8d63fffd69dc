"""Who is to blame: ``python -m dl_comm.blame FOLDER`` reads the dumps of all ranks and says which rank, which call.

``docs/diagnosis.md`` tells where dumps come from and what they hold.
"""

from __future__ import annotations

__all__: list[str] = []
