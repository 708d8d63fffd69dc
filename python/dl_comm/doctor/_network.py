"""Detects the network between hosts from the process's open files; MPI libraries have no common query for it.

Sources are TCP connections to other hosts and open devices of fast networks.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import Any

_SIOCGIFADDR = 0x8915  # netdevice(7)
_ESTABLISHED = "01"  # include/net/tcp_states.h
_DEVICES = {"/dev/infiniband/": "verbs", "/dev/cxi": "Slingshot", "/dev/hfi1": "Omni-Path", "/dev/knem": "KNEM"}


def used() -> dict[str, Any]:
    """The network of this process: ``tcp``, a list of interfaces with peer addresses, and ``devices``."""
    interfaces = _interfaces()
    sockets, devices = set(), set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # already closed
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
            devices |= {f"{kind} ({target})" for start, kind in _DEVICES.items() if target.startswith(start)}
    tcp: dict[str, set[str]] = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # a kernel without IPv6
            for line in Path("/proc/self/net", name).read_text().splitlines()[1:]:
                fields = line.split()
                local, remote = (_address(field.partition(":")[0]) for field in fields[1:3])
                if fields[3] == _ESTABLISHED and fields[9] in sockets and str(remote) not in interfaces:
                    tcp.setdefault(interfaces.get(str(local), str(local)), set()).add(str(remote))
    return {
        "tcp": [{"interface": name, "peers": sorted(peers)} for name, peers in sorted(tcp.items())],
        "devices": sorted(devices),
    }


def used_text(network: dict[str, Any]) -> str:
    """The network as text for people."""
    parts = [*network["devices"], *(f"TCP on {item['interface']}" for item in network["tcp"])]
    return " and ".join(parts) or "an unknown network: no TCP connection and no device of a fast network is open"


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parses an address of /proc/net/tcp: words of 32 bits in host byte order."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    raw = struct.pack(f"={len(words)}I", *words)
    if len(words) == 1:
        return ipaddress.IPv4Address(raw)
    address = ipaddress.IPv6Address(raw)
    return address.ipv4_mapped or address


def _interfaces() -> dict[str, str]:
    """The interface of each address of this host."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[socket.inet_ntoa(answer[20:24])] = name
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/net/if_inet6").read_text().splitlines():
            fields = line.split()
            found[str(ipaddress.IPv6Address(bytes.fromhex(fields[0])))] = fields[5]
    return found
