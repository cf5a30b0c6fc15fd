"""The machines as the planner sees them."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.contract.config import ClusterConfig, DeviceConfig, LinkConfig
from launcher.contract.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal devices; ranks fill a node before the next begins."""

    config: ClusterConfig
    device: DeviceConfig

    @property
    def num_devices(self) -> int:
        """Devices in the whole cluster."""
        return self.config.nodes * self.config.devices_per_node

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
