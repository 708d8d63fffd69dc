"""Makes a small libnccl.so.2 for one kind of GPU: NVIDIA's has more than 200 MB.

    python tests/gpu/nccl_library.py LIBRARY CAPABILITY OUTPUT

LIBRARY is libnccl.so.2 of a package of NVIDIA (nvidia-nccl-cu13), CAPABILITY the compute capability of the GPU without
the dot (90 for H100 and H200), OUTPUT a file that ends with .so.2.gz. Only GPU code for that capability stays; that of
others, the code for other linkers and the debug information become zeros. Nothing moves, so the library works as before
on such a GPU, and gzip makes it small.
"""

from __future__ import annotations

import gzip
import mmap
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

CODE = ".nv_fatbin"
UNUSED = ("__nv_relfatbin", ".debug_info", ".debug_line", ".debug_str", ".debug_loc", ".debug_ranges", ".debug_abbrev")
"""Sections that no process reads: code for linkers, and for debuggers."""
BUNDLE = struct.Struct("<IHHQ")
"""The head of some GPU code: magic, version, bytes of this head, bytes of the entries."""
ENTRY = struct.Struct("<HHIQ12xI")
"""The head of an entry: kind, version, bytes of its head, bytes of its code, and the capability."""
MAGIC = 0xBA55ED50


def sections(library: mmap.mmap) -> dict[str, tuple[int, int]]:
    """The places and bytes of the sections of a 64-bit ELF file."""
    if library[:5] != b"\x7fELF\x02":
        raise ValueError("this is no 64-bit ELF library")
    (table,) = struct.unpack_from("<Q", library, 40)
    size, count, names = struct.unpack_from("<HHH", library, 58)
    rows = [struct.unpack_from("<IIQQQQ", library, table + size * index) for index in range(count)]
    text = rows[names][4]
    found = {}
    for name, *_, at, length in rows:
        end = library.find(b"\0", text + name)
        found[library[text + name : end].decode()] = (at, length)
    return found


def entries(library: mmap.mmap, at: int, size: int) -> Iterator[tuple[int, int, int]]:
    """The GPU code in a section: capability, place and bytes of each entry."""
    end = at + size
    while at < end:
        if struct.unpack_from("<I", library, at)[0] != MAGIC:
            at += 8  # padding between bundles
            continue
        _, _, head, length = BUNDLE.unpack_from(library, at)
        entry, at = at + head, at + head + length
        while entry < at:
            _, _, head, length, capability = ENTRY.unpack_from(library, entry)
            yield capability, entry + head, length
            entry += head + length


def keep(library: mmap.mmap, capability: int) -> int:
    """Overwrites all other GPU code with zeros; returns the bytes of what stays."""
    places = sections(library)
    for name in UNUSED:
        at, size = places.get(name, (0, 0))
        library[at : at + size] = bytes(size)
    kept, others = 0, set()
    for found, at, size in list(entries(library, *places[CODE])):
        if found == capability:
            kept += size
        else:
            others.add(found)
            library[at : at + size] = bytes(size)
    if not kept:
        raise ValueError(f"no code for capability {capability}, only for {sorted(others)}")
    return kept


def main(words: list[str]) -> int:
    """The command line."""
    if len(words) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    source, capability, target = Path(words[0]), int(words[1]), Path(words[2])
    with tempfile.TemporaryFile() as copy:
        with source.open("rb") as original:
            shutil.copyfileobj(original, copy)
        with mmap.mmap(copy.fileno(), 0) as library:
            kept = keep(library, capability)
        copy.seek(0)
        with gzip.open(target, "wb", compresslevel=6) as packed:
            shutil.copyfileobj(copy, packed)
    print(f"{target}: {target.stat().st_size >> 20} MiB, with {kept >> 20} MiB of GPU code for {capability}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
