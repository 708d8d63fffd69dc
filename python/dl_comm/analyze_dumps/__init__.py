"""``python -m dl_comm.analyze_dumps FOLDER``: reads the dumps of all ranks and finds the rank and call that others wait for.

``docs/diagnosis.md`` tells where dumps come from and what they hold.
"""

from __future__ import annotations

__all__: list[str] = []
