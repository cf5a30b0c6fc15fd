"""The addresses at which processes listen for connections (Linux)."""

import os
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

_LISTEN = "0A"
"""State of a socket in /proc/net/tcp."""


def listening(pids: list[int]) -> set[str]:
    """The local addresses, without ports, of all TCP sockets on which the processes listen."""
    sockets = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                sockets.add(os.readlink(entry))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in sockets:
                found.add(_address(fields[1].partition(":")[0]))
    return found


def _address(digits: str) -> str:
    """The kernel writes an address as words of 32 bits in the machine's own order."""
    raw = b"".join(bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8))
    return str(IPv4Address(raw) if len(raw) == 4 else IPv6Address(raw))
