"""Every replica updates its own copy of the parameters with the gradient of the global batch."""

from __future__ import annotations

from launcher.runtime.api import RankContext, Update
from launcher.runtime.update import NativeUpdate
from launcher_plugins.architectures.decentralized import settings_of
from launcher_plugins.architectures.hierarchical_runtime import HierarchicalSum


def update(ctx: RankContext) -> Update:
    """The update of this rank: summed gradients, AdamW on every replica."""
    if settings_of(ctx.config.architecture.options).reduce == "hierarchical":
        ctx.exchange_gradients = HierarchicalSum(ctx)
    return NativeUpdate(ctx)
