"""Removes the banner that MPICH's launcher prints on stdout after a failure; our report has more detail."""

from __future__ import annotations

import os
import re
import selectors

_RULE = b"=" * 83 + b"\n"
_FIRST = _RULE + b"=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
_BANNER = re.compile(
    re.escape(_FIRST) + rb".*?" + re.escape(_RULE) + rb"(YOUR APPLICATION TERMINATED .*?debugging suggestions\n)?",
    re.DOTALL,
)
_MAX_BYTES = 1 << 12
_TIMEOUT_S = 0.5  # how long a possible banner is held for the rest


class Banner:
    """Removes the banner from a stream of bytes. Pure."""

    def __init__(self) -> None:
        self.held = b""  # a possible banner, or its start
        self._at_line = True  # whether the next byte begins a line

    def feed(self, data: bytes) -> bytes:
        """Adds ``data``; returns the bytes that can be shown now."""
        text = self.held + data
        starts = [0] if self._at_line else []
        starts += [match.end() for match in re.finditer(rb"\n", text)]
        for start in starts:
            rest = text[start:]
            if rest and (rest.startswith(_FIRST) or _FIRST.startswith(rest)) and len(rest) < _MAX_BYTES:
                self.held, self._at_line = rest, True
                return text[:start]
        self.held = b""
        self._at_line = text.endswith(b"\n") or (self._at_line and not text)
        return text

    def rest(self) -> bytes:
        """Returns the held bytes without the banner, at the end of the stream or after the timeout."""
        shown, self.held = _BANNER.sub(b"", self.held), b""
        self._at_line = shown.endswith(b"\n") or not shown
        return shown


def copy_without_banner(source: int, target: int) -> None:
    """Copies ``source`` to ``target`` until its end, without the banner. After a write error it only reads."""
    banner, reads, more = Banner(), True, True
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        while more:
            if banner.held and not selector.select(_TIMEOUT_S):
                shown = banner.rest()
            else:
                data = os.read(source, 1 << 16)
                more = bool(data)
                shown = banner.feed(data) if data else banner.rest()
            while shown and reads:
                try:
                    shown = shown[os.write(target, shown) :]
                except OSError:
                    reads = False
    os.close(source)
