"""``--check``: runs ``python -m dl_comm.doctor`` on every host before the job."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dl_comm._base.network import is_here
from dl_comm.run._hosts import Host
from dl_comm.run._launchers import JobSpec, Launcher, command_line
from dl_comm.run._options import UsageError


def healthy(launcher: Launcher, job: JobSpec, hosts: Sequence[Host], env: Mapping[str, str]) -> bool:
    """Whether the doctor finds no problem; otherwise its report goes to stderr.

    With remote hosts it runs under the job's launcher, one rank on each host.

    Args:
        launcher: The job's.
        job: The job to start afterwards.
        hosts: Its hosts; none: this host.
        env: The launcher's environment.

    Raises:
        UsageError: The launcher cannot be started.
    """
    command = [sys.executable, "-m", "dl_comm.doctor"]
    if any(not is_here(host.name) for host in hosts):
        named = tuple(Host(host.name) for host in job.hosts)
        command = command_line(launcher, replace(job, command=command, ranks=len(hosts), hosts=named, ppn=1, bind=None))
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, check=False
        )
    except OSError as error:
        raise UsageError(f"cannot start {command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        sys.stderr.write(done.stdout.decode(errors="replace"))
        status = f"dl-comm-run: --check: 'python -m dl_comm.doctor' exited with status {done.returncode}"
        print(f"{status}; nothing was started", file=sys.stderr, flush=True)
    return done.returncode == 0
