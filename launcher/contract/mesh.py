"""Ranks on a mesh of parallel axes and on the cluster: rank <-> coordinates, groups, nodes and links."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

from launcher.contract.config import ClusterConfig, LinkConfig

AXES = ("pp", "dp", "tp")
"""Every mesh axis, in the default order: outermost first."""


class Coordinates(NamedTuple):
    """Index of a rank on each axis."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The trainer ranks 0 .. dp*tp*pp-1, in ``order``, the last axis contiguous.

    >>> mesh = Mesh(pp=2, dp=1, tp=2)
    >>> [tuple(mesh.coordinates(rank)) for rank in range(4)]
    [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
    >>> mesh.group("tp", 3), mesh.group("pp", 3)
    ((2, 3), (1, 3))
    """

    pp: int
    dp: int
    tp: int
    order: tuple[str, ...] = AXES
    """Axes from the outermost to the innermost."""

    @cached_property
    def strides(self) -> dict[str, int]:
        """Distance in rank between neighbours on each axis."""
        return {
            axis: prod(self.size(inner) for inner in self.order[position + 1 :])
            for position, axis in enumerate(self.order)
        }

    def size(self, axis: str) -> int:
        """Number of ranks along one axis."""
        return int(getattr(self, axis))

    @property
    def num_ranks(self) -> int:
        """Number of trainer ranks."""
        return self.pp * self.dp * self.tp

    def rank(self, coordinates: Coordinates) -> int:
        """The rank at the given coordinates."""
        return sum(index * self.strides[axis] for axis, index in coordinates._asdict().items())

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of a rank."""
        assert 0 <= rank < self.num_ranks, f"rank {rank} is not on a mesh of {self.num_ranks}"
        return Coordinates(**{axis: rank // self.strides[axis] % self.size(axis) for axis in AXES})

    def group(self, axes: str | Iterable[str], rank: int) -> tuple[int, ...]:
        """The ranks that share every coordinate of ``rank`` but those on ``axes``, ascending."""
        free = {axes} if isinstance(axes, str) else set(axes)
        here = self.coordinates(rank)._asdict()
        indices = [range(self.size(axis)) if axis in free else (here[axis],) for axis in AXES]
        return tuple(sorted(self.rank(Coordinates(*each)) for each in product(*indices)))

    def groups(self, axes: str | Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """All groups along ``axes``: a partition of the ranks, the same list on every rank."""
        free = (axes,) if isinstance(axes, str) else tuple(axes)
        fixed = [(0,) if axis in free else range(self.size(axis)) for axis in AXES]
        return tuple(self.group(free, self.rank(Coordinates(*each))) for each in product(*fixed))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal devices; ranks fill a node before the next begins."""

    config: ClusterConfig

    def node(self, rank: int) -> int:
        """The node that holds a rank."""
        return rank // self.config.devices_per_node

    def local_rank(self, rank: int) -> int:
        """The place of a rank inside its node."""
        return rank % self.config.devices_per_node

    def crosses_nodes(self, mesh: Mesh, axis: str) -> bool:
        """Whether any group of the axis has members on more than one node."""
        if self.config.nodes == 1 or mesh.size(axis) == 1:
            return False
        block = mesh.strides[axis] * mesh.size(axis)
        return self.config.devices_per_node % block != 0

    def link(self, mesh: Mesh, axis: str) -> LinkConfig:
        """The slowest link inside a group of the axis."""
        if self.crosses_nodes(mesh, axis):
            return self.config.inter_node
        return self.config.intra_node
