"""Every replica updates its own copy of the parameters with the gradient of the global batch."""

from __future__ import annotations

from launcher.runtime.api import RankContext, Update
from launcher.runtime.update import NativeUpdate


def update(ctx: RankContext) -> Update:
    """The update of this rank: all-reduced gradients, AdamW on every replica."""
    return NativeUpdate(ctx)
