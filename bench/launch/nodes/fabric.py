"""The network between nodes as this one has it: which interface leads to the others, how fast, what else there is."""

import contextlib
import fcntl
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

SIOCGIFADDR = 0x8915  # linux/sockios.h
NET, INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")


def interface_of(address: str) -> str | None:
    """The interface that has this IPv4 address, eth0; None where that is not known."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def facts(interface: str | None) -> dict:
    """{"interface", "mtu_bytes", "speed_mbit_per_s", "infiniband": [{"device", "rate"}]}; None: not known.

    speed: as the driver says it, of /sys/class/net; a virtual interface has none.
    """
    folder = NET / (interface or "")
    rates = [
        {"device": path.parents[2].name, "rate": _read(path)} for path in sorted(INFINIBAND.glob("*/ports/*/rate"))
    ]
    speed = _whole(folder / "speed") if interface else None
    return {
        "interface": interface,
        "mtu_bytes": _whole(folder / "mtu") if interface else None,
        "speed_mbit_per_s": speed if speed is not None and speed > 0 else None,
        "infiniband": rates,
    }


def variables(interface: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """That gloo and NCCL use it too, unless the user chose: by themselves they take what the host's name leads to."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: interface for name in names if interface and name not in environ}


def _whole(path):
    word = _read(path)
    return int(word) if word and word.lstrip("-").isdigit() else None


def _read(path):
    try:
        return path.read_text().strip()
    except OSError:
        return None
