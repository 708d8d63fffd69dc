"""``horovod.run``: starts ranks on this host, calls a function on each, and returns the results.

Thread rule: any thread, several at a time.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_ELASTIC = ("min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range", "host_discovery_script")
_NO_EFFECT = ["ssh_port", "ssh_identity_file", "disable_cache", "verbose", "output_filename", "mpi_args"]
_NO_EFFECT += ["start_timeout"]
_OLD = {"np": "num_proc", "min_np": "min_num_proc", "max_np": "max_num_proc", "network_interface": "network_interfaces"}


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Any = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: Any = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Starts ranks, calls a function on each, and returns the results by rank; as ``dl_comm.run``.

        def train(rate):
            hvd.init()
            return hvd.rank()

        ranks = horovod.run(train, args=(0.1,), num_proc=4)

    Args:
        func: The function. It and its results are pickled by cloudpickle.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: The number of ranks.
        min_num_proc: Refused: elastic training comes later; so are ``max_num_proc``, ``slots``, ``reset_limit``,
            ``cooldown_range`` and ``host_discovery_script``.
        max_num_proc: See above.
        slots: See above.
        reset_limit: See above.
        cooldown_range: See above.
        hosts: This host, as ``localhost:4``; for others, ``horovodrun`` starts a script.
        hostfile: A file with lines ``localhost slots=4``.
        host_discovery_script: See above.
        start_timeout: No effect, as the options below that do not say more.
        ssh_port: See above.
        ssh_identity_file: See above.
        disable_cache: See above.
        output_filename: See above.
        verbose: See above.
        use_gloo: No effect: the ranks are the same.
        use_mpi: No effect; not together with ``use_gloo``.
        mpi_args: See above.
        network_interface: Deprecated: ``network_interfaces``.
        network_interfaces: The interface of dl_comm's connections; the first counts.
        executable: Refused, unless it is this Python.
        np: Deprecated: ``num_proc``.
        min_np: Deprecated: ``min_num_proc``.
        max_np: Deprecated: ``max_num_proc``.

    Raises:
        ValueError: An argument is invalid, or needs other hosts.
        NotImplementedError: An argument of elastic training.
        dl_comm.CommError: The ranks failed, as in ``dl_comm.run``.
    """
    import sys

    import dl_comm

    given = dict(locals())
    for old, new in _OLD.items():
        if given[old] is not None:
            warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=2)
            given[new] = given[old].split(",") if old == "network_interface" else given[old]
    elastic = [name for name in _ELASTIC if given[name] is not None]
    if elastic:
        raise NotImplementedError(f"elastic training comes later: {', '.join(elastic)}")
    if hosts is not None and hostfile is not None:
        raise ValueError("give hosts or hostfile, not both")
    if use_gloo and use_mpi:
        raise ValueError("give use_gloo or use_mpi, not both")
    if executable not in (None, sys.executable):
        raise ValueError(f"executable is {executable}; the ranks run this Python, {sys.executable}")
    ignored = [name for name in _NO_EFFECT if given[name]]
    if ignored:
        warnings.warn(f"no effect with dl_comm: {', '.join(ignored)}", stacklevel=2)
    ranks = int(given["num_proc"])
    if hosts is not None or hostfile is not None:
        free = _local_slots(hosts, hostfile)
        if ranks > free:
            raise ValueError(f"num_proc is {ranks}, and the hosts have {free} slots")
    interfaces = given["network_interfaces"]
    env = {"DL_COMM_SOCKET_IFNAME": str(interfaces[0])} if interfaces else None
    return dl_comm.run(func, ranks, args, kwargs=kwargs, env=env)


def _local_slots(hosts: str | None, hostfile: str | None) -> int:
    """The ranks that ``hosts`` (``localhost:4``) or ``hostfile`` (``localhost slots=4``) allows here.

    Raises:
        ValueError: One is another host, or the text is invalid.
        OSError: The file cannot be read.
    """
    entries = [entry.partition(":")[::2] for entry in (hosts or "").split(",") if entry]
    if hostfile is not None:
        lines = (line.split("#")[0].split() for line in Path(hostfile).read_text().splitlines())
        entries = [(words[0], words[1].removeprefix("slots=") if words[1:] else "") for words in lines if words]
    names = {"localhost", "127.0.0.1", socket.gethostname()}
    others = [name for name, _ in entries if name not in names]
    if others:
        raise ValueError(f"horovod.run starts ranks on this host only, not on {', '.join(others)}: use horovodrun")
    return sum(int(slots or 1) for _, slots in entries)
