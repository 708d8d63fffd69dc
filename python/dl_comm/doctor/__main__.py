"""The command line of ``dl-comm doctor``, or ``python -m dl_comm.doctor``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from dl_comm.doctor import _job, _single_rank
from dl_comm.doctor._launcher import launch_of


def main(arguments: Sequence[str] | None = None, prog: str = "python -m dl_comm.doctor") -> int:
    """Runs the checks of the command line; returns the exit status: 0 healthy, 1 not."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Checks the installation of dl_comm, also under mpiexec. Exit status: 0 if healthy, else 1.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--no-launch",
        action="store_true",
        help="without a launcher: do not start two ranks",
    )
    parser.add_argument("--quick", action="store_true", help="import no framework and measure no bandwidth")
    # For the two ranks that the program starts itself: skips the checks of the machine.
    parser.add_argument("--ranks-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    launch = launch_of(os.environ)
    if launch:
        return _job.run(launch, options.json, options.quick, options.ranks_only)
    return _single_rank.run(options.json, options.quick, starts=not options.no_launch)


if __name__ == "__main__":
    sys.exit(main())
