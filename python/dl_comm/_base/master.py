"""Where the ranks of a launcher meet: MASTER_ADDR and MASTER_PORT, the same on all of them, before a program starts.

- All six variables of a user are kept, and one of MASTER_ADDR and MASTER_PORT too.
- MPICH's launchers: rank 0 takes a free port, and tells it through the launcher's key-value space (PMI-1).
- ``srun``: the first host of the step; other launchers: this host, or the first one of PBS. The port is a hash of the
  number of the job, from 20000 to 29999, which the system gives to nobody by itself.

Rank 0 keeps the port until its program has ended. Standard library only. Thread rule: the main thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path

from dl_comm._base.network import addresses, is_here
from dl_comm._base.torch_variables import MARK, Position, given, hold_port

_KEY = "dl_comm_master"
_PORTS = range(20000, 30000)
_FINALIZE_S = 5.0
_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid", "PALS_APID", "PBS_JOBID", "LSB_JOBID")
_OF_TORCHRUN = ("TORCHELASTIC_", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
_SET_BOTH = "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, for all ranks"


class MasterError(Exception):
    """The ranks cannot agree where to meet; the text says what to do."""


class UnknownMasterError(MasterError):
    """The launcher does not tell enough."""


class Start:
    """The variables of a rank's program, and what its start needs until it ends. ``close`` it then."""

    def __init__(
        self,
        env: Mapping[str, str],
        position: Position,
        known: tuple[str, int] | None = None,
        *,
        is_needed: bool = True,
    ) -> None:
        """Finds them. Collective, unless the address is ``known`` or the user's.

        Without ``is_needed``, MASTER_ADDR and MASTER_PORT are left out where the launcher does not tell enough: torch
        asks for them if it needs them.

        Raises:
            MasterError: The ranks cannot agree.
        """
        self.variables = position.variables()
        self._held: socket.socket | None = None
        self._relay: _Relay | None = None
        try:
            address, port = self._meet(env, position, known)
        except UnknownMasterError:
            if is_needed:
                raise
            return
        self.variables |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}

    def apply(self, env: Mapping[str, str]) -> dict[str, str]:
        """``env`` with the variables, and without those of a job around this one."""
        kept = {name: value for name, value in env.items() if name != MARK}
        if "TORCHELASTIC_RUN_ID" in env:
            kept = {name: value for name, value in kept.items() if not name.startswith(_OF_TORCHRUN)}
        return {**kept, **self.variables}

    def close(self, succeeded: bool) -> None:
        """After the end of the program."""
        if self._relay is not None:
            self._relay.close(succeeded)
        if self._held is not None:
            self._held.close()

    def _meet(self, env: Mapping[str, str], position: Position, known: tuple[str, int] | None) -> tuple[str, int]:
        # Those of torchrun are of its own store.
        mine = {} if "TORCHELASTIC_RUN_ID" in env else given(env)
        address, port = mine.get("MASTER_ADDR"), _port(mine.get("MASTER_PORT"))
        if known is not None:
            # The launcher of all ranks has chosen it, and sees the same variables.
            found = (address or known[0], port or known[1])
        elif position.size == 1:
            self._held = None if port else hold_port()
            found = (address or "127.0.0.1", port or self._held_port())
        elif position.launcher == "Hydra" and (connection := _connection(env)) is not None:
            found = self._by_pmi(env, position, connection, address, port)
        else:
            found = (address or _first_host(env, position), port or _port_of_job(env, position))
        if position.rank == 0 and not port and self._held is None:
            try:
                self._held = hold_port(found[1])
            except OSError as error:
                raise MasterError(
                    f"port {found[1]}, on which the ranks would meet, is not free on {socket.gethostname()} "
                    f"({error.strerror}): set MASTER_PORT to another one, for all ranks"
                ) from error
        return found

    def _held_port(self) -> int:
        assert self._held is not None
        return int(self._held.getsockname()[1])

    def _by_pmi(
        self, env: Mapping[str, str], position: Position, connection: int, address: str | None, port: int | None
    ) -> tuple[str, int]:
        relay = _Relay(connection, _timeout(env))
        own = ""
        if position.rank == 0:
            if not port:
                self._held = hold_port()
            own = f"{address or _own_address(env, position)}:{port or self._held_port()}"
        try:
            host, _, number = relay.exchange(own).rpartition(":")
        except (OSError, ValueError) as error:
            raise MasterError(f"rank {position.rank}: the launcher has no address of rank 0 ({error})") from error
        if (address or host, port or int(number)) != (host, int(number)):
            raise MasterError(
                f"rank {position.rank} has MASTER_ADDR={address or host} and MASTER_PORT={port or number}, but rank 0 "
                f"has {host} and {number}: set the same ones on all ranks, or none"
            )
        self.variables["PMI_FD"] = str(relay.start())
        self._relay = relay
        return host, int(number)


class _Relay:
    """Speaks PMI-1 with the launcher, then passes on what the program and the launcher say to each other.

    MPICH's launchers kill all ranks when a process ends that has spoken and not finalized. So the end of a program that
    has not started MPI is told to the launcher; of others the launcher learns by the closed connection, as usual.
    """

    def __init__(self, connection: int, timeout: float | None) -> None:
        os.set_inheritable(connection, False)
        self._launcher = socket.socket(fileno=connection)
        self._launcher.settimeout(timeout)
        self._program, self._child = socket.socketpair()
        self._has_spoken = False
        self._thread = threading.Thread(target=self._run, name="dl_comm PMI", daemon=True)

    def exchange(self, value: str) -> str:
        """The value of rank 0; the other ranks pass an empty text."""
        name = self._ask("cmd=get_my_kvsname")["kvsname"]
        if value:
            self._ask(f"cmd=put kvsname={name} key={_KEY} value={value}")
        self._ask("cmd=barrier_in")
        return self._ask(f"cmd=get kvsname={name} key={_KEY}")["value"]

    def start(self) -> int:
        """Starts to pass on; returns the descriptor for the program."""
        self._launcher.settimeout(None)
        os.set_inheritable(self._child.fileno(), True)
        self._thread.start()
        return self._child.fileno()

    def close(self, succeeded: bool) -> None:
        """After the end of the program."""
        self._child.close()
        # Another process may still have the program's end.
        self._program.shutdown(socket.SHUT_RD)
        self._thread.join(_FINALIZE_S)
        if succeeded and not self._has_spoken:
            self._launcher.settimeout(_FINALIZE_S)
            with contextlib.suppress(OSError, ValueError):  # the launcher has ended
                self._ask("cmd=finalize")
        # It closes with this process: the launcher could kill this process before it has its exit status.

    def _ask(self, request: str) -> dict[str, str]:
        self._launcher.sendall(request.encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            data = self._launcher.recv(4096)
            if not data:
                raise OSError("the launcher has closed the connection")
            answer += data
        fields = dict(word.split("=", 1) for word in answer.decode().split() if "=" in word)
        if fields.get("rc", "0") != "0":
            raise ValueError(f"the answer to '{request}' is '{answer.decode().strip()}'")
        return fields

    def _run(self) -> None:
        ends = {self._program: self._launcher, self._launcher: self._program}
        while self._program in ends:
            for ready in select.select(list(ends), [], [])[0]:
                try:
                    data = ready.recv(1 << 16)
                    ends[ready].sendall(data)
                except OSError:
                    data = b""
                self._has_spoken |= ready is self._program and bool(data)
                if not data:
                    del ends[ready]
                    if ready is self._launcher:
                        with contextlib.suppress(OSError):
                            self._program.shutdown(socket.SHUT_WR)


def has_connection(env: Mapping[str, str]) -> bool:
    """Whether this process has a connection to a launcher of MPICH's kind."""
    return _connection(env) is not None


def _connection(env: Mapping[str, str]) -> int | None:
    """The descriptor of the connection to the launcher, if this process has it."""
    try:
        number = int(env.get("PMI_FD", ""))
        return number if stat.S_ISSOCK(os.fstat(number).st_mode) else None
    except (ValueError, OSError):
        return None


def _own_address(env: Mapping[str, str], position: Position) -> str:
    """An address of this host that the other ranks can reach."""
    if position.on_one_host:
        return "127.0.0.1"
    interface = env.get("DL_COMM_SOCKET_IFNAME") or None
    name = env.get("PMI_HOSTNAME", "")
    if interface is None and name and not (is_here(name) and name.startswith(("localhost", "127."))):
        return name
    return next(iter(addresses([], interface, anywhere=True)), socket.gethostname())


def _first_host(env: Mapping[str, str], position: Position) -> str:
    if position.on_one_host:
        return "127.0.0.1"
    if position.launcher == "srun" and (nodes := env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")):
        from dl_comm.run._hosts import slurm

        try:
            return slurm(nodes, None)[0].name
        except ValueError as error:
            raise MasterError(f"{error}: {_SET_BOTH}") from error
    if path := env.get("PBS_NODEFILE"):
        with contextlib.suppress(OSError):
            if words := Path(path).read_text().split():
                return words[0]
    raise UnknownMasterError(
        f"{position.launcher} does not tell the host of rank 0, and the ranks are on several: {_SET_BOTH}"
    )


def _port_of_job(env: Mapping[str, str], position: Position) -> int:
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID") if position.launcher == "srun" else _JOBS
    job = [env[name] for name in names if env.get(name)]
    if not job:
        raise UnknownMasterError(f"{position.launcher} does not tell the number of the job: {_SET_BOTH}")
    return _PORTS[zlib.crc32(".".join(job).encode()) % len(_PORTS)]


def _port(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 65536):
        raise MasterError(f"MASTER_PORT is '{text}'; set it to a port from 1 to 65535")
    return int(text)


def _timeout(env: Mapping[str, str]) -> float | None:
    """The deadline of a start; None: no limit. The program tells what is wrong with another value."""
    try:
        seconds = float(env.get("DL_COMM_TIMEOUT_S") or 300)
    except ValueError:
        seconds = 300.0
    return seconds if 0 < seconds < 1e9 else None
