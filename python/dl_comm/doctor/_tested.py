"""The tested versions: the table of docs/wheels.md, results of ``tests/wheels.sh``."""

from __future__ import annotations

import re

TESTED = {"python": ((3, 10), (3, 13)), "torch": ((2, 10), (2, 15)), "tensorflow": ((2, 16), (2, 21))}
"""The lowest and the highest version (major, minor) of each."""


def is_tested(name: str, version: str) -> bool:
    """Whether ``version`` (for example ``2.11.0+cpu``) of ``name`` is in the tested range."""
    found = re.match(r"(\d+)\.(\d+)", version)
    lowest, highest = TESTED[name]
    return found is not None and lowest <= (int(found[1]), int(found[2])) <= highest


def tested_text(name: str) -> str:
    """The tested range for people: ``2.10 to 2.15``."""
    return " to ".join(".".join(map(str, version)) for version in TESTED[name])
