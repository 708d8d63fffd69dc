"""``horovodrun``: starts a script on ranks, by ``dl-comm-run``.

    horovodrun -np 4 python train.py
    horovodrun -np 8 -H node1:4,node2:4 python train.py
    horovodrun --check-build

Options that set variables of Horovod's engine set them for the ranks; those without a meaning here are named in one
line. Imports neither a framework nor dl_comm's core.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod._version import __version__

_VARIABLES: dict[str, tuple[str, Callable[[Any], Any], float]] = {
    "fusion-threshold-mb": ("FUSION_THRESHOLD", int, 1024 * 1024),
    "cycle-time-ms": ("CYCLE_TIME", float, 1),
    "cache-capacity": ("CACHE_CAPACITY", int, 1),
    "autotune-log-file": ("AUTOTUNE_LOG", str, 1),
    "autotune-warmup-samples": ("AUTOTUNE_WARMUP_SAMPLES", int, 1),
    "autotune-steps-per-sample": ("AUTOTUNE_STEPS_PER_SAMPLE", int, 1),
    "autotune-bayes-opt-max-samples": ("AUTOTUNE_BAYES_OPT_MAX_SAMPLES", int, 1),
    "autotune-gaussian-process-noise": ("AUTOTUNE_GAUSSIAN_PROCESS_NOISE", float, 1),
    "timeline-filename": ("TIMELINE", str, 1),
    "stall-check-warning-time-seconds": ("STALL_CHECK_TIME_SECONDS", int, 1),
    "stall-check-shutdown-time-seconds": ("STALL_SHUTDOWN_TIME_SECONDS", int, 1),
    "num-nccl-streams": ("NUM_NCCL_STREAMS", int, 1),
    "thread-affinity": ("THREAD_AFFINITY", str, 1),
    "gloo-timeout-seconds": ("GLOO_TIMEOUT_SECONDS", int, 1),
    "log-level": ("LOG_LEVEL", str, 1),
}
"""Options with a value: the variable, its type, and the factor of the value."""
_SWITCHES = {
    "hierarchical-allreduce": ("no-hierarchical-allreduce", "HIERARCHICAL_ALLREDUCE"),
    "hierarchical-allgather": ("no-hierarchical-allgather", "HIERARCHICAL_ALLGATHER"),
    "torus-allreduce": ("no-torus-allreduce", "TORUS_ALLREDUCE"),
    "autotune": ("no-autotune", "AUTOTUNE"),
    "timeline-mark-cycles": ("no-timeline-mark-cycles", "TIMELINE_MARK_CYCLES"),
    "no-stall-check": ("stall-check", "STALL_CHECK_DISABLE"),
    "mpi-threads-disable": ("no-mpi-threads-disable", "MPI_THREADS_DISABLE"),
    "log-without-timestamp": ("log-with-timestamp", "LOG_HIDE_TIME"),
}
"""Options without one: that of the other value, and the variable."""
_SECTIONS = {"params": "", "autotune": "autotune-", "timeline": "timeline-", "stall_check": "stall-check-"}
_SECTIONS |= {"library_options": "", "logging": "log-"}
"""Sections of a configuration file, and what the options' names have before the keys."""
_ELASTIC = ["min-np --min-num-proc", "max-np --max-num-proc", "slots-per-host", "elastic-timeout", "reset-limit"]
_ELASTIC += ["blacklist-cooldown-range", "host-discovery-script"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("horovodrun", usage="%(prog)s [options] PROGRAM [ARGUMENT...]", allow_abbrev=False)
    add = parser.add_argument
    add("-v", "--version", action="version", version=__version__)
    add("-np", "--num-proc", type=int, dest="num_proc", metavar="N", help="number of ranks; default: all slots")
    add("-cb", "--check-build", action="store_true", help="print what is available, and end")
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts with their slots")
    add("-hostfile", "--hostfile", metavar="FILE", help="file with lines 'HOST slots=N'")
    add("--network-interfaces", "--network-interface", dest="interfaces", metavar="A,B", help="the first one counts")
    add("--output-filename", metavar="FOLDER", help="a log file of each rank there")
    add("--config-file", metavar="YAML", help="file with options")
    add("--mpi-args", action="append", default=[], metavar="'WORDS'", help="more options of the launcher")
    add("--binding-args", action="append", default=[], metavar="'WORDS'", help="the same")
    add("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true", help="show the output of all ranks")
    add("--verbose", action="store_true", help="print the launcher's command line first")
    add("--disable-cache", action="store_true", help="no effect: nothing is cached")
    add("--tcp", action="store_true", help="no effect")
    add("--start-timeout", type=int, metavar="S", help="DL_COMM_TIMEOUT_S of the ranks' start")
    for name in ("-p/--ssh-port", "-i/--ssh-identity-file"):
        add(*name.split("/"), metavar="VALUE", help="no effect: use ~/.ssh/config")
    controller = parser.add_mutually_exclusive_group()
    for name in ("gloo", "mpi", "jsrun"):
        controller.add_argument(f"--{name}", action="store_true", help="no effect: the launcher is found")
    for name in _ELASTIC:
        values = 2 if name.endswith("range") else 1
        add(*f"--{name}".split(), action="append", dest="elastic", nargs=values, help=argparse.SUPPRESS)
    engine = parser.add_argument_group("variables of the ranks: HOROVOD_...")
    for name, (variable, kind, _) in _VARIABLES.items():
        engine.add_argument(f"--{name}", type=kind, dest=variable, metavar="VALUE", help=variable)
    for name, (other, variable) in _SWITCHES.items():
        pair = engine.add_mutually_exclusive_group()
        pair.add_argument(f"--{name}", action="store_const", const=True, dest=variable, help=f"{variable}=1")
        pair.add_argument(f"--{other}", action="store_const", const=False, dest=variable, help=f"{variable}=0")
    add("command", nargs=argparse.REMAINDER, metavar="PROGRAM", help="the program and its arguments")
    return parser


def _configured(path: str) -> dict[str, Any]:
    """The options of a configuration file, by their names on the command line."""
    import yaml  # type: ignore[import-untyped]

    with open(path) as file:
        content = yaml.safe_load(file) or {}
    found: dict[str, Any] = {}
    for section, before in _SECTIONS.items():
        for key, value in (content.get(section) or {}).items():
            name = key.replace("_", "-")
            if section in ("autotune", "stall_check") and name == "enabled":
                found["autotune" if section == "autotune" else "no-stall-check"] = value == (section == "autotune")
            elif name in ("hide-timestamp", "with-timestamp"):
                found["log-without-timestamp"] = value == (name == "hide-timestamp")
            else:
                found[before + name] = value
    return found


def variables(options: argparse.Namespace, configured: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables of the options; those of the command line count before those of the file."""
    table = dict(_VARIABLES)
    table.update((name, (variable, lambda value: int(bool(value)), 1)) for name, (_, variable) in _SWITCHES.items())
    found: dict[str, str] = {}
    for name, (variable, kind, factor) in table.items():
        value = getattr(options, variable)
        value = configured.get(name) if value is None else value
        if value is not None:
            found[f"HOROVOD_{variable}"] = str(value if kind is str else kind(value * factor))
    return found


def arguments(given: Sequence[str]) -> list[str]:
    """The arguments of ``dl-comm-run`` for those of ``horovodrun``.

    Raises:
        SystemExit: They are invalid, or need what comes later.
    """
    options = _parser().parse_args(given)
    if options.check_build:
        print(check_build())
        raise SystemExit(0)
    if options.elastic:
        raise SystemExit("horovodrun: elastic training comes later; start a fixed number of ranks with -np")
    try:
        configured = _configured(options.config_file) if options.config_file else {}
    except (OSError, ImportError, ValueError) as error:
        raise SystemExit(f"horovodrun: --config-file {options.config_file}: {error}") from error
    words: list[str] = []
    for option, value in (
        ("-n", options.num_proc),
        ("-H", options.hosts),
        ("--hostfile", options.hostfile),
        ("--network", (options.interfaces or "").split(",")[0] or None),
        ("--output-dir", options.output_filename),
    ):
        words += [] if value is None else [option, str(value)]
    for text in (*options.mpi_args, *options.binding_args):
        words += ["--mpi-args", text]
    set_ = variables(options, configured)
    if options.start_timeout is not None and "DL_COMM_TIMEOUT_S" not in os.environ:
        set_["HOROVOD_START_TIMEOUT"] = str(options.start_timeout)
    for name in sorted(name for name in os.environ if name.startswith("HOROVOD_") and name not in set_):
        words += ["-x", name]
    for name, value in set_.items():
        words += ["-x", f"{name}={value}"]
    return [*words, "--tag-output" if options.prefix_output_with_timestamp else "--all-output", *options.command]


def check_build() -> str:
    """What ``--check-build`` prints."""
    from horovod.common.util import extension_available, nccl_built

    parts = {
        "Frameworks": {
            "TensorFlow": extension_available("tensorflow"),
            "PyTorch": extension_available("torch"),
            "MXNet": False,
        },
        "Controllers": {"MPI": True, "Gloo": True},
        "Tensor Operations": {"NCCL": nccl_built(), "DDL": False, "CCL": False, "MPI": True, "Gloo": True},
    }
    lines = [f"Horovod v{__version__}:"]
    for title, entries in parts.items():
        lines += [
            "",
            f"Available {title}:",
            *(f"    [{'X' if is_there else ' '}] {name}" for name, is_there in entries.items()),
        ]
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    from dl_comm.run import main as start

    words = arguments(sys.argv[1:] if given is None else given)
    return start(words, prog="horovodrun")


if __name__ == "__main__":
    sys.exit(main())
