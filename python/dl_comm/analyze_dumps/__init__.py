"""``python -m dl_comm.analyze_dumps FOLDER`` reads the dumps of all ranks and finds the rank that the others wait for.

``docs/diagnosis.md`` describes how dumps are written and their format.
"""

from __future__ import annotations

__all__: list[str] = []
