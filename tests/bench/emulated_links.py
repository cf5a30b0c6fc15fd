"""Forked ranks, each in a network of its own behind a slow full-duplex link (needs root, ip and tc).

rank 0 --[ rate, rate ]--+
rank 1 --[ rate, rate ]--+-- bridge       what a rank sends and what it receives are limited apart
rank 2 --[ rate, rate ]--+

What else the kernel would do to the times is turned off. A connection that has been quiet for a moment keeps
its window. It does not probe for a rate, as BBR does, which takes the pauses of a training for a slow link.
Little is under way at once, as over a switch with short queues: words behind megabytes would come late. And
frames are large, of which headers are 1 %, not 5 %.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.helpers.ranks import run_ranks

_CLONE_NEWNET = 0x40000000
_TIMEOUT_S = 60.0
_MTU = 9000
_WINDOW_BYTES = 2**19
_TCP = {
    "tcp_congestion_control": "reno",
    "tcp_slow_start_after_idle": "0",
    "tcp_rmem": f"4096 131072 {_WINDOW_BYTES}",
    "tcp_wmem": f"4096 131072 {_WINDOW_BYTES}",
}
"""Settings of each network, by their names in /proc/sys/net/ipv4."""


@contextmanager
def links(num_ranks: int, bytes_per_s: float) -> Iterator[None]:
    """Inside, `run_behind_links` can be used."""
    bridge = f"b{_mark()}"
    _remove(num_ranks, bridge)
    try:
        _ip(f"link add {bridge} type bridge")
        _ip(f"link set {bridge} up")
        for rank in range(num_ranks):
            name, inside, outside = _names(rank)
            _ip(f"netns add {name}")
            _ip(f"link add {outside} mtu {_MTU} type veth peer name {inside} mtu {_MTU}")
            _ip(f"link set {inside} netns {name}")
            _ip(f"link set {outside} master {bridge} up")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} addr add 10.77.0.{rank + 1}/24 dev {inside}")
            _ip(f"-n {name} link set {inside} up")
            _run_words(["ip", "netns", "exec", name, "sysctl", "-qw", *_tcp_words()])
            limit = f"root tbf rate {round(8 * bytes_per_s)}bit burst 32kb latency 1s"
            _run(f"tc qdisc add dev {outside} {limit}")
            _run(f"tc -n {name} qdisc add dev {inside} {limit}")
        time.sleep(0.5)  # a port of the bridge forwards only after a moment
        yield
    finally:
        _remove(num_ranks, bridge)


def run_behind_links(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """As `run_ranks`, with every rank behind its link."""
    return run_ranks(num_ranks, _inside, function, args, timeout_s=_TIMEOUT_S, before=_enter)


def _enter(rank: int) -> None:
    """Puts this process into its network before it opens a connection."""
    name, inside, _ = _names(rank)
    handle = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(handle, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(handle)
    os.environ["GLOO_SOCKET_IFNAME"] = inside


def _mark() -> int:
    """Tells the links of several such programs apart: theirs are named by the process that makes them."""
    return int(os.environ.setdefault("EMULATED_LINKS_PID", str(os.getpid())))


def _names(rank: int) -> tuple[str, str, str]:
    """Of a rank's network, and of the two ends of its link."""
    return f"n{_mark()}-{rank}", f"i{_mark()}-{rank}", f"o{_mark()}-{rank}"


def _inside(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(rank, *args)


def _remove(num_ranks: int, bridge: str) -> None:
    for rank in range(num_ranks):
        name, _, outside = _names(rank)
        _run(f"ip netns del {name}", is_needed=False)
        _run(f"ip link del {outside}", is_needed=False)
    _run(f"ip link del {bridge}", is_needed=False)


def _tcp_words() -> list[str]:
    return [f"net.ipv4.{name}={value}" for name, value in _TCP.items()]


def _ip(words: str) -> None:
    _run(f"ip {words}")


def _run(words: str, *, is_needed: bool = True) -> None:
    _run_words(words.split(), is_needed=is_needed)


def _run_words(words: list[str], *, is_needed: bool = True) -> None:
    subprocess.run(words, check=is_needed, capture_output=True)
