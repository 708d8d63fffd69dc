#!/usr/bin/env python3
"""Creates several "hosts" on one Linux machine, to test communication between hosts.

Each host is a network namespace on one bridge, with its own host name, /etc/hosts, /dev/shm and IPC namespace, so that
neither MPI nor dl_comm can share memory between two hosts. Needs root and iproute2 (see ``possible()``).

As a program it replaces ssh: ``hosts.py [ssh options] HOST COMMAND...`` runs the command inside the host.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch import QUIET, Finished, mpiexec, run

_STATE = "DL_COMM_TEST_HOSTS"
_CONTEXTS = itertools.count()


def possible() -> bool:
    """Whether this process can create hosts: root, the tools, and a kernel with network namespaces."""
    tools = all(shutil.which(tool) for tool in ("ip", "nsenter", "unshare", "mount"))
    if os.geteuid() != 0 or not tools:
        return False
    probe = f"dlcprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", probe], check=True)
    return made


class Hosts:
    """A context with ``count`` hosts; ``rate`` (in tc's format, ``1gbit``) caps each link."""

    def __init__(self, count: int, rate: str | None = None) -> None:
        # Concurrent runs, and contexts inside each other, have other names.
        self._stem = f"dlc{os.getpid()}.{next(_CONTEXTS)}"
        self.names = [f"{self._stem}h{i + 1}" for i in range(count)]
        self._rate = rate
        self._state = Path(tempfile.mkdtemp(prefix="dl_comm_hosts."))

    def __enter__(self) -> Hosts:
        switch = f"{self._stem}sw"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        lines = ["127.0.0.1 localhost"]
        for number, name in enumerate(self.names, 1):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            port = ("peer", "name", f"p{number}", "netns", switch)
            _ip("link", "add", "eth0", "netns", name, "type", "veth", *port)
            _ip("-n", switch, "link", "set", f"p{number}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            if self._rate:
                shape = ("root", "tbf", "rate", self._rate, "burst", "256kb", "latency", "50ms")
                subprocess.run(["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", *shape], check=True)
            lines.append(f"10.77.0.{number} {name}")
        (self._state / "hosts").write_text("\n".join(lines) + "\n")
        # MPI fails or hangs if it starts before the links are up.
        for name in self.names:
            while "UP" not in _ip("-n", name, "-br", "link", "show", "eth0").split():
                time.sleep(0.05)
        return self

    def __exit__(self, *error: object) -> None:
        for name in [*self.names, f"{self._stem}sw"]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        shutil.rmtree(self._state, ignore_errors=True)

    def launch(
        self,
        per_host: int | Sequence[int],
        command: Sequence[str],
        timeout: float = 120,
        env: Mapping[str, str] | None = None,
    ) -> Finished:
        """Runs ``command`` on ``per_host`` ranks of every host (or a number for each host), with MPICH's mpiexec."""
        counts = [per_host] * len(self.names) if isinstance(per_host, int) else per_host
        slots = ",".join(f"{name}:{count}" for name, count in zip(self.names, counts, strict=True))
        count = str(sum(counts))
        return self.run([*mpiexec(), *self.ssh.split(), "-hosts", slots, "-n", count, *command], timeout, env)

    def each(
        self, commands: Sequence[Sequence[str]], timeout: float = 120, env: Mapping[str, str] | None = None
    ) -> Finished:
        """Runs one command on each host at once, without a launcher. The status is 0 if all have succeeded."""
        insides = [
            shlex.join(inside(name, self._state, command)) for name, command in zip(self.names, commands, strict=True)
        ]
        starts = "".join(f'{command} & all="$all $!"\n' for command in insides)
        script = f'{starts}status=0\nfor pid in $all; do wait "$pid" || status=$?; done\nexit $status'
        return run(["sh", "-c", script], timeout, {**QUIET, **(env or {})})

    def ranks(
        self,
        per_host: int | Sequence[int],
        command: Sequence[str],
        timeout: float = 120,
        env: Mapping[str, str] | None = None,
    ) -> Finished:
        """Runs ``command`` on ``per_host`` ranks of every host, as plain processes that variables make ranks."""
        counts = [per_host] * len(self.names) if isinstance(per_host, int) else per_host
        script = (
            'first=$1; count=$2; shift 2; status=0; all=""\n'
            'for rank in $(seq "$first" $((first + count - 1))); do DL_COMM_RANK=$rank "$@" & all="$all $!"; done\n'
            'for pid in $all; do wait "$pid" || status=$?; done; exit $status'
        )
        firsts = [sum(counts[:host]) for host in range(len(counts))]
        commands = [
            ["sh", "-c", script, "ranks", str(first), str(count), *command]
            for first, count in zip(firsts, counts, strict=True)
        ]
        settings = {"DL_COMM_SIZE": str(sum(counts)), "DL_COMM_ADDR": "10.77.0.1:29511", "DL_COMM_JOB_KEY": "secret"}
        return self.each(commands, timeout, {**settings, **(env or {})})

    @property
    def ssh(self) -> str:
        """The options of MPICH's mpiexec for these hosts."""
        return f"-launcher ssh -launcher-exec {Path(__file__).resolve()}"

    def run(self, command: Sequence[str], timeout: float = 120, env: Mapping[str, str] | None = None) -> Finished:
        """Runs ``command`` on the first host."""
        settings = {**QUIET, **(env or {}), _STATE: str(self._state)}
        return run(inside(self.names[0], self._state, command), timeout, settings)


def inside(host: str, state: Path, command: Sequence[str]) -> list[str]:
    """The command line that runs ``command`` inside ``host``."""
    script = """
        set -e
        hostname "$1"; mount --bind "$2" /etc/hosts; mount -t tmpfs -o size=4g tmpfs /dev/shm
        mount -t sysfs sysfs /sys 2>/dev/null || true
        shift 2; exec "$@"
    """
    spaces = ["nsenter", f"--net=/run/netns/{host}", "--", "unshare", "--uts", "--mount", "--ipc", "--"]
    return [*spaces, "bash", "-c", script, "inside", host, str(state / "hosts"), *command]


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def main() -> None:
    """The ssh replacement."""
    words = sys.argv[1:]
    while words and words[0].startswith("-"):
        words = words[2 if words[0] in ("-o", "-p", "-l", "-F", "-i", "-e") else 1 :]
    host, *command = words
    line = inside(host, Path(os.environ[_STATE]), ["/bin/sh", "-c", " ".join(command)])
    os.execvp(line[0], line)


if __name__ == "__main__":
    main()
