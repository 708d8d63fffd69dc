"""Network interfaces: the variables that select one, and this host's addresses for other hosts."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def variables(interface: str, sys_net: Path = Path("/sys/class/net")) -> dict[str, str]:
    """The variables that restrict any MPI library to ``interface``.

    ``FI_TCP_IFACE`` is libfabric's (fi_tcp(7)), ``UCX_NET_DEVICES`` UCX's, ``OMPI_MCA_...`` Open MPI's, and
    ``DL_COMM_SOCKET_IFNAME`` dl_comm's. For an InfiniBand interface, UCX also needs the device's name; otherwise UCX
    uses TCP there.
    """
    devices = [interface]
    behind = sys_net / interface / "device/infiniband"
    if behind.is_dir():
        number = sys_net / interface / "dev_port"
        port = int(number.read_text()) + 1 if number.exists() else 1
        devices = [*(f"{device.name}:{port}" for device in sorted(behind.iterdir())), interface]
    return {
        "DL_COMM_SOCKET_IFNAME": interface,
        "FI_TCP_IFACE": interface,
        "UCX_NET_DEVICES": ",".join(devices),
        "OMPI_MCA_btl_tcp_if_include": interface,
    }


def addresses(hosts: Iterable[str], interface: str | None, anywhere: bool = False) -> list[str]:
    """The IPv4 addresses at which ``hosts`` may reach this host, most likely first.

    Args:
        hosts: Host names; none: this host only.
        interface: If it has an address here, only that address is used.
        anywhere: Whether there may be other hosts.
    """
    names = list(hosts)
    here = all(is_here(name) for name in names)
    if here and not anywhere:
        return ["127.0.0.1"]
    named = _address(interface) if interface else None
    found = [named] if named else [_source_address(name) for name in names[:8]]
    found += [] if named else [_address(name) for _, name in socket.if_nameindex()]
    others = [address for address in dict.fromkeys(found) if address and not address.startswith("127.")]
    return [*others, "127.0.0.1"] if here else others


def is_here(name: str) -> bool:
    """Whether ``name`` is certainly this host."""
    here = socket.gethostname()
    return name in ("localhost", "127.0.0.1", here, here.partition(".")[0])


def _address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # no address
            return None
    return socket.inet_ntoa(answer[20:24])


def _source_address(host: str) -> str | None:
    """This host's source address for packets to ``host``. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:  # unknown host or no route: the launcher reports it
            return None
        return str(probe.getsockname()[0])
