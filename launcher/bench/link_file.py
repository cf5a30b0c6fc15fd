"""Measured links as a file of the config group ``cluster``."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from launcher.base.errors import LauncherError
from launcher.base.redaction import escaped
from launcher.base.units import format_bytes, format_duration
from launcher.bench.model import Fit
from launcher.bench.tables import WHERE, links
from launcher.contract.bench import BenchResult, Link
from launcher.contract.config import ClusterConfig, LinkConfig

NO_BANDWIDTH = "--save: these sizes do not determine a bandwidth. Give several, such as --sizes 4KB,1MB,16MB."


def cluster_text(name: str, cluster: ClusterConfig, result: BenchResult, day: str) -> str:
    """The YAML file of a cluster whose links are the measured ones.

    A link that was not measured is taken from the cluster that was measured.

    Raises:
        LauncherError: when the measurements determine no link.
    """
    found = links(result)
    if not found or not all(isfinite(fit.bandwidth) for fit in found.values()):
        raise LauncherError(NO_BANDWIDTH)
    hosts = ", ".join(result.hostnames)
    device = f'"{cluster.device_name}"' if cluster.device_name else "null"
    lines = [
        f"# Links measured by `trireme bench collectives` on {day}: {result.backend} of torch "
        f"{result.torch_version}",
        f"# on {result.device}, {hosts}.",
        f"name: {name}",
        f"nodes: {cluster.nodes}",
        f"devices_per_node: {cluster.devices_per_node}",
        f"device_name: {device}",
        f"allow_idle_devices: {'true' if cluster.allow_idle_devices else 'false'}",
        *_link_lines("intra_node", cluster.intra_node, found, cluster.name),
        *_link_lines("inter_node", cluster.inter_node, found, cluster.name),
    ]
    return escaped("\n".join(lines)) + "\n"


def _link_lines(link: Link, assumed: LinkConfig, found: Mapping[Link, Fit], base: str) -> list[str]:
    if link in found:
        fit = found[link]
        latency, bandwidth = fit.latency_s, fit.bandwidth
        note = (
            f"# {WHERE[link]}: ± {format_duration(fit.latency_error_s)}, "
            f"± {format_bytes(fit.bandwidth_error)}/s; off by {fit.misfit:.0%}, at worst "
            f"{fit.worst_misfit:.0%}"
        )
    else:
        latency, bandwidth = assumed.latency_s, assumed.bandwidth_bytes_per_s
        note = f"# {WHERE[link]}: not measured, as in {base}"
    return [note, f"{link}:", f"  latency_s: {latency:.4g}", f"  bandwidth_bytes_per_s: {bandwidth:.4g}"]
