"""The command line: `python -m benchmarks.simulate` from the root of the repository."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import benchmarks.simulate as package
from benchmarks.common import machine
from benchmarks.simulate import check, notices, report
from benchmarks.simulate.constants import NETWORKS, SERVER, measure_host
from benchmarks.simulate.cost import NetworkModel
from benchmarks.simulate.model import Host
from benchmarks.simulate.plot import draw_check, draw_hosts
from benchmarks.simulate.ranks import possible


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("simulate"), help="folder of the results (simulate)")
    parser.add_argument("--ranks", nargs="+", type=int, help="ranks a host (2; with --check 1 2)")
    parser.add_argument(
        "--host", choices=["measured", "server"], default="measured", help="host constants: measured here, or a preset"
    )
    parser.add_argument("--in-place", action="store_true", help="tensors in shared memory, as torch's gradients")
    parser.add_argument(
        "--network",
        nargs=3,
        type=float,
        metavar=("LATENCY", "MESSAGE", "BYTE"),
        help="a network instead of the presets, in seconds: `network` of dl_comm_describe on several hosts",
    )
    parser.add_argument(
        "--hosts", nargs="+", type=int, help="numbers of hosts (8 64 512 4096 8192; with --check 2 3 4)"
    )
    parser.add_argument("--notices", action="store_true", help="only the flags of a round on one host of many ranks")
    parser.add_argument("--check", action="store_true", help="compare with runs; needs root and iproute2")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"], help="caps of the links, with --check")
    parser.add_argument("--sizes", nargs="+", type=int, default=check.SIZES, help="bytes of the calls, with --check")
    options = parser.parse_args(words)
    options.hosts = options.hosts or ([2, 3, 4] if options.check else list(report.HOSTS))
    options.ranks = options.ranks or ([1, 2] if options.check else [2])
    if min(options.hosts) < 2 or min(options.ranks) < 1 or min(options.sizes) < 4:
        parser.error("needs at least two hosts, one rank each, and sizes of 4 bytes or more")
    if len(options.ranks) > 1 and not options.check:
        parser.error("several numbers of ranks need --check")
    try:
        list(map(check.byte_seconds, options.rates))
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> int:
    """Predicts or checks, prints tables and writes files; returns 1 after a failure."""
    options = parse()
    if options.notices:
        print(notices.table())
        return 0
    # Also stops the ranks and removes the hosts.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if options.check and not possible():
        print("--check creates network namespaces: it needs root, iproute2, nsenter, unshare and mount")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    host = SERVER if options.host == "server" else measure_host()
    facts = {"machine": machine.describe(), "method": package.__doc__, "host": asdict(host)}
    print(f"the hosts, seconds: {asdict(host)}")
    return (_check if options.check else _predict)(options, host, facts)


def _predict(options: argparse.Namespace, host: Host, facts: dict[str, Any]) -> int:
    networks = {"given": NetworkModel(*options.network)} if options.network else NETWORKS
    (ranks,) = options.ranks
    curve = {count for count in report.CURVE if count <= max(options.hosts)}
    rows = report.predict(networks, sorted({*options.hosts, *curve}), host, ranks, options.in_place)
    results = {name: asdict(network) for name, network in networks.items()}
    print(f"networks, seconds: {json.dumps(results, indent=1)}\n\n{report.prediction_table(rows, options.hosts)}\n")
    _write(options.out / "simulate.json", {**facts, "networks": results, "rows": rows})
    for name in networks:
        shown = [row for row in rows if row["network"] == name]
        title = f"An average between hosts with {ranks} rank{'s' * (ranks > 1)} each, simulated: {name}"
        file = "simulate_" + "_".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
        if not _draw(lambda: draw_hosts(shown, title, options.out / file)):  # noqa: B023 (called at once)
            break
    return 0


def _check(options: argparse.Namespace, host: Host, facts: dict[str, Any]) -> int:
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for rate in options.rates:
        for ranks in options.ranks:
            for hosts in options.hosts:
                case = check.Case(rate, hosts, ranks)
                found, failed = check.run(case, options.sizes, host)
                rows += found
                failures += failed
                load = machine.describe()["load"][0]
                if found:
                    network, probed = found[0]["network"], found[0]["probed_byte"]
                    print(f"{case}: {network}; dl_comm measured {probed:.3g} s a byte; load {load:.1f}")
                print("".join(f"failed: {text}\n" for text in failed), end="", flush=True)
                _write(options.out / "check.json", {**facts, "rows": rows, "failures": failures})
    if rows:
        print(f"\n{report.check_table(rows)}\n\n{report.ratio_table(rows)}\n")
        title = f"An average between hosts of network namespaces on {facts['machine']['cores']} processors"
        _draw(lambda: draw_check(rows, title, options.out / "check"))
    return int(bool(failures))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(path)


def _draw(work: Callable[[], list[Path]]) -> bool:
    try:
        for path in work():
            print(path)
    except ImportError as error:
        print(f"no plot: {error}; run 'pip install matplotlib'")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
