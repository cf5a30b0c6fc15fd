"""The update of a rank, with the moments of its own parameters alone."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW
from trireme_example_parallel import NAME, ShardedConfig

from launcher.runtime.api import FragmentReader, GlobalFragment, GlobalSlice, RankContext, Update, slice_of
from launcher.runtime.train.native_update import NativeUpdate
from launcher.typed.read import read_or_raise


def apply(ctx: RankContext) -> None:
    """Gradients are summed as by plain data parallelism."""


def update(ctx: RankContext) -> Update:
    """The update of this rank."""
    return ShardedUpdate(ctx)


class ShardedUpdate(NativeUpdate):
    """The launcher's own update, whose optimizer updates a part and receives the rest."""

    def make_optimizer(self, tensors: Iterable[tuple[Tensor, GlobalSlice]]) -> Any:
        """AdamW in torch's wrapper. Its state is that of the part."""
        plain = super().make_optimizer(tensors)
        assert plain is not None, "the plan refuses a model without parameters"
        options = read_or_raise(ShardedConfig, self._ctx.config.parallel.plugins[NAME])
        self._sharded = ZeroRedundancyOptimizer(
            plain.param_groups,
            AdamW,
            process_group=self._ctx.groups.dp.handle,
            parameters_as_bucket_view=options.bucket_view,
            **{name: plain.defaults[name] for name in ("lr", "betas", "eps", "fused", "foreach")},
        )
        self._sharded.state = self._sharded.optim.state
        return self._sharded

    def state(self) -> Iterator[GlobalFragment]:
        """Master weights and moments of this rank's part; the first replica's counters."""
        mine = {slice_of(param).name for param, master in self._masters.items() if self._is_mine(master)}
        for fragment in self._replica_state():
            kind, _, name = fragment.slice.name.partition("/")
            if name in mine or (kind == "optimizer" and self._ctx.groups.dp.rank == 0):
                yield fragment

    def load(self, read: FragmentReader) -> None:
        """Takes back what `state` gave, under any layout."""
        super().load(read)
        for master in self._masters.values():
            if not self._is_mine(master):
                self._sharded.state.pop(master)

    def _is_mine(self, master: Tensor) -> bool:
        return bool(self._sharded._param_to_rank[master] == self._ctx.groups.dp.rank)
