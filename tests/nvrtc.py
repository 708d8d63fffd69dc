"""NVRTC, NVIDIA's compiler for CUDA C++, from installed wheels. It needs no GPU.

Any thread may compile, several at a time. A library stays loaded as long as the process lives.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


class NotInstalled(Exception):
    """No wheel with this NVRTC is installed."""


class Failed(Exception):
    """An NVRTC call failed; the text is its log, or the name of its error."""


@dataclass(frozen=True)
class Compiled:
    """The result of a compilation: messages, PTX, and machine code (empty for ``compute_...``)."""

    log: str
    ptx: str
    cubin: bytes


class Nvrtc:
    """One version of NVRTC: ``Nvrtc("cu13/lib/libnvrtc.so.13")`` below the wheels' folder ``nvidia``."""

    def __init__(self, library: str) -> None:
        spec = importlib.util.find_spec("nvidia")
        folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or []]
        paths = [folder / library for folder in folders if (folder / library).is_file()]
        if not paths:
            raise NotInstalled(f"no wheel here has nvidia/{library}")
        # NVRTC loads its builtins library by name; load it first, so that the loader finds it.
        for builtins in paths[0].parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(str(paths[0]))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: object) -> None:
        code = self._library[name](*arguments)
        if code != 0:
            raise Failed(f"{name}: {self._library.nvrtcGetErrorString(code).decode()}")

    def architectures(self) -> list[int]:
        """The supported compute capabilities: 90 is 9.0."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return list(numbers)

    def compile(self, source: str, name: str, options: list[str], headers: Mapping[str, str] | None = None) -> Compiled:
        """Compiles ``source``, which includes ``headers`` by name; raises :class:`Failed` with the log."""
        program = ctypes.c_void_p()
        names, texts = _texts(headers or {}), _texts((headers or {}).values())
        create = "nvrtcCreateProgram"
        self._call(
            create, ctypes.byref(program), source.encode(), name.encode(), ctypes.c_int(len(names)), texts, names
        )
        try:
            code = self._library.nvrtcCompileProgram(program, ctypes.c_int(len(options)), _texts(options))
            log = self._text(program, "ProgramLog").strip()
            if code != 0:
                raise Failed(f"{self._library.nvrtcGetErrorString(code).decode()}\n{log}")
            return Compiled(log, self._text(program, "PTX"), self._bytes(program, "CUBIN"))
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        if size.value == 0:
            return b""
        data = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, data)
        return data.raw

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        return self._bytes(program, what).rstrip(b"\0").decode()


def _texts(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)
