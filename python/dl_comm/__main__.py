"""``dl-comm``, or ``python -m dl_comm``: runs ``env``, or prints the version and the list of commands."""

from __future__ import annotations

import argparse
import json
import sys

_COMMANDS = """\
commands:
  dl-comm-run                      start a program on several ranks (python -m dl_comm.run)
  mpiexec -n 2 dl-comm env ...     set torch's variables for a program that asks for them first
  python -m dl_comm.doctor         check the installation
  python -m dl_comm.analyze_dumps  find the rank that hangs or is late, from dumps
  python -m dl_comm.timeline       report a recorded timeline
  python -m dl_comm.build          compile the op libraries for the installed frameworks
  python -m dl_comm.tf1            run a TensorFlow 1 script
"""


def main() -> int:
    """The command line."""
    if sys.argv[1:2] == ["env"]:
        # Imports no compiled module: the program may be anything.
        from dl_comm.run._env import main as run

        return run(sys.argv[2:])
    from dl_comm import _dl_comm

    mpi = json.loads(_dl_comm.describe())["mpi"]["library_version"].splitlines()[0]
    parser = argparse.ArgumentParser(
        prog="dl-comm",
        description="Data-parallel training over MPI and shared memory.",
        epilog=_COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"dl_comm {_dl_comm.__version__}, built for {' '.join(mpi.split())}"
    parser.add_argument("--version", action="version", version=version)
    parser.parse_args()
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
