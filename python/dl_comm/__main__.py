"""``python -m dl_comm``: prints the version and the list of commands."""

from __future__ import annotations

import argparse
import json

from dl_comm import _dl_comm

_COMMANDS = """\
commands:
  dl-comm-run                      start a program on several ranks (python -m dl_comm.run)
  python -m dl_comm.doctor         check the installation
  python -m dl_comm.analyze_dumps  find the rank that hangs or is late, from dumps
  python -m dl_comm.timeline       report a recorded timeline
  python -m dl_comm.build          compile the op libraries for the installed frameworks
  python -m dl_comm.tf1            run a TensorFlow 1 script
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
