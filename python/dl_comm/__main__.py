"""``python -m dl_comm``: the version, and which commands there are."""

from __future__ import annotations

import argparse
import json

from dl_comm import _dl_comm

_COMMANDS = """\
commands:
  dl-comm-run               start a program on several ranks (python -m dl_comm.run)
  python -m dl_comm.doctor  what works here, and what does not
  python -m dl_comm.analyze_dumps  find the rank that hangs, from dumps
  python -m dl_comm.timeline  what every thread did when
  python -m dl_comm.build   compile the operations for the installed frameworks
  python -m dl_comm.tf1     run a script of TensorFlow 1
"""


def main() -> None:
    """The command line."""
    mpi = json.loads(_dl_comm.describe())["mpi"]["library_version"].splitlines()[0]
    parser = argparse.ArgumentParser(
        prog="python -m dl_comm",
        description="Data-parallel training over MPI and shared memory.",
        epilog=_COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"dl_comm {_dl_comm.__version__}, built for {' '.join(mpi.split())}"
    parser.add_argument("--version", action="version", version=version)
    parser.parse_args()
    parser.print_help()


if __name__ == "__main__":
    main()
