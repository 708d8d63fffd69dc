"""``dl-comm build [torch] [tensorflow] [--force | --into FOLDER]``: builds the op libraries.

Without arguments, builds for every installed framework. Prints the path of each library. For a wheel, ``dl-comm build
kernels --into FOLDER`` compiles the kernels for GPUs.

``python -m dl_comm.build`` is the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dl_comm._libraries.build import KERNELS, build_into, cached_library, compile_kernels, existing_library, libraries
from dl_comm._libraries.frameworks import FRAMEWORKS, is_installed


def main(arguments: Sequence[str] | None = None, prog: str = "python -m dl_comm.build") -> int:
    """The command line; returns the exit status 0."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n\n")[1])
    parser.add_argument(
        "frameworks", nargs="*", metavar="FRAMEWORK", help=f"one of {', '.join(FRAMEWORKS)}; or {KERNELS}"
    )
    parser.add_argument("--force", action="store_true", help="rebuild existing libraries, in the cache")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="build for a wheel: tests/full_wheel.sh")
    options = parser.parse_args(arguments)
    if options.frameworks == [KERNELS]:
        if options.into is None:
            parser.error(f"{KERNELS} needs --into FOLDER")
        print(f"{KERNELS}: {compile_kernels(options.into)} files in {options.into}")
        return 0
    for name in options.frameworks:
        if name not in FRAMEWORKS:
            parser.error(f"unknown framework {name} (expected one of {', '.join(FRAMEWORKS)})")
    wanted = options.frameworks or [framework for framework in FRAMEWORKS if is_installed(framework)]
    if not wanted:
        print("no framework is installed: nothing to build")
    for framework in wanted:
        for name in libraries(framework):
            if options.into is not None:
                print(f"{name}: {build_into(name, options.into)}")
                continue
            library = None if options.force else existing_library(name)
            print(f"{name}: {library or cached_library(name, options.force)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
