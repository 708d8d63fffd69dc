"""``horovod.run``: starts ranks on this host, calls a function on each, and returns the results.

Thread rule: any thread, several at a time.
"""

from __future__ import annotations

import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from horovod.common._arguments import takes

_ELASTIC = ("min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range", "host_discovery_script")
_NO_EFFECT = ["ssh_port", "ssh_identity_file", "disable_cache", "verbose", "output_filename", "mpi_args"]
_NO_EFFECT += ["start_timeout"]
_OLD = {"np": "num_proc", "min_np": "min_num_proc", "max_np": "max_num_proc", "network_interface": "network_interfaces"}


@takes(
    "func args=() kwargs=None num_proc=1 min_num_proc=None max_num_proc=None slots=None reset_limit=None "
    "cooldown_range=None hosts=None hostfile=None host_discovery_script=None start_timeout=None ssh_port=None "
    "ssh_identity_file=None disable_cache=None output_filename=None verbose=None use_gloo=None use_mpi=None "
    "mpi_args=None network_interface=None network_interfaces=None executable=None np=None min_np=None max_np=None"
)
def run(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, **given: Any) -> list[Any]:
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
    import dl_comm

    for old, new in _OLD.items():
        if given[old] is not None:
            warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=3)
            given[new] = given[old].split(",") if old == "network_interface" else given[old]
    hosts, hostfile, executable = given["hosts"], given["hostfile"], given["executable"]
    elastic = [name for name in _ELASTIC if given[name] is not None]
    if elastic:
        raise NotImplementedError(f"elastic training comes later: {', '.join(elastic)}")
    for one, other in (("hosts", "hostfile"), ("use_gloo", "use_mpi")):
        if given[one] and given[other]:
            raise ValueError(f"give {one} or {other}, not both")
    if executable not in (None, sys.executable):
        raise ValueError(f"executable is {executable}; the ranks run this Python, {sys.executable}")
    ignored = [name for name in _NO_EFFECT if given[name]]
    if ignored:
        warnings.warn(f"no effect with dl_comm: {', '.join(ignored)}", stacklevel=3)
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
