"""Starts DeepSpeed on the launcher's own ranks and process groups."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from launcher.runtime.api import DTYPES, GlobalSlice, RankContext, new_parameter, slice_of
from launcher.runtime.process.groups import Group, Groups

_COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")
"""The collectives that ZeRO uses, by the names of DeepSpeed's communication backend."""
_MATRIX = 2
"""Dims from which on weights decay."""


def load_deepspeed(ctx: RankContext) -> Any:
    """The module deepspeed, set up for this rank's device and the existing process groups."""
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed requires it; our own starters set it
    if ctx.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # On a CPU the start would compile this operator, which needs a compiler; gloo works without it.
    __compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)
    return deepspeed


def start_engine(ctx: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer, config: Any) -> Any:
    """DeepSpeed's engine around this rank's part of the model. Collective over all ranks."""
    deepspeed = load_deepspeed(ctx)
    for param in model.parameters():
        _mark(param, ctx)
    mpu = topology(ctx.groups)
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, mpu=mpu, dist_init_required=False
    )
    for held, before in buffers:  # older versions cast them with the weights
        held.update(before)
    timed = {"dp": ctx.groups.dp, "model": ctx.groups.model}
    kinds = {group.handle: kind for kind, group in timed.items() if group.handle is not None}
    time_collectives(deepspeed.comm.comm.cdb, kinds, ctx)
    return engine


def placeholders(ctx: RankContext, model: nn.Module, dims: Iterable[int]) -> list[nn.Parameter]:
    """Adds to a stage a matrix and a vector of one zero each, where it trains none; ``dims``: of what it
    trains.

    DeepSpeed sums a norm over all stages for each group of parameters (matrices, which decay, and others),
    and cannot start without any. Zeros whose gradients are zeros change neither the norm nor themselves.
    """
    has = {min(number, _MATRIX) for number in dims}
    added = []
    for number in {1, _MATRIX} - has:
        shape, dtype = (1,) * number, DTYPES[ctx.config.precision.compute]
        param = new_parameter(GlobalSlice.unsharded(f"placeholder.{number}", shape), shape, ctx.device, dtype)
        nn.init.zeros_(param)
        model.register_parameter(f"placeholder_{number}", param)
        added.append(param)
    return added


def partitioner(ctx: RankContext, config: Any) -> Callable[[nn.Module], None]:
    """A function that partitions the parameters of a module over the replicas; DeepSpeed gathers them when
    used."""
    deepspeed, mpu = load_deepspeed(ctx), topology(ctx.groups)
    group = mpu.get_data_parallel_group()

    def partition(module: nn.Module) -> None:
        deepspeed.zero.Init(module, data_parallel_group=group, config_dict_or_path=config, mpu=mpu)

    return partition


def topology(groups: Groups) -> SimpleNamespace:
    """The mesh with the interface of Megatron's ``mpu``, which DeepSpeed uses: ``get_AXIS_group()``,
    ``get_AXIS_rank()`` and ``get_AXIS_world_size()`` of four axes. Collective over the rank's groups."""
    axes = {
        "data_parallel": (groups.dp, groups.dp.rank),
        # Norms are summed over all ranks of a replica; whole parameters count on tp_rank 0 of every stage.
        "model_parallel": (groups.model, groups.tp.rank),
        "tensor_model_parallel": (groups.tp, groups.tp.rank),
        "pipeline_model_parallel": (groups.pp, groups.pp.rank),
    }
    values: dict[str, Any] = {"get_data_parallel_group_ranks": groups.dp.ranks}
    for axis, (group, rank) in axes.items():
        values[f"get_{axis}_group"] = _handle(group)
        values[f"get_{axis}_rank"] = rank
        values[f"get_{axis}_world_size"] = group.size
    return SimpleNamespace(**{name: lambda value=value: value for name, value in values.items()})


def _handle(group: Group) -> dist.ProcessGroup:
    """The process group; a single rank gets one of its own, since DeepSpeed reads None as the whole world."""
    if group.handle is not None:
        return group.handle
    return cast(dist.ProcessGroup, dist.new_group(list(group.ranks), use_local_synchronization=True))


def _mark(param: nn.Parameter, ctx: RankContext) -> None:
    """Marks for DeepSpeed which parameters count in this rank's share of the gradient norm."""
    where = slice_of(param)
    param.model_parallel = where.is_sharded or ctx.groups.tp.rank == 0  # type: ignore[attr-defined]
    param.ds_pipe_replicated = where.is_tied_copy  # type: ignore[attr-defined]


def time_collectives(backend: Any, kinds: dict[Any, str], ctx: RankContext) -> None:
    """Times every collective of a backend whose group is in ``kinds``, as that kind: else the clock would
    count it as compute."""
    for name in _COLLECTIVES:
        setattr(backend, name, partial(_timed, getattr(backend, name), kinds, ctx))


def _timed(
    send: Callable[..., Any], kinds: dict[Any, str], ctx: RankContext, *args: Any, **kwargs: Any
) -> Any:
    kind = kinds.get(kwargs.get("group"))
    if kind is None:
        return send(*args, **kwargs)
    with ctx.clock.section(kind):
        handle = send(*args, **kwargs)
    return _TimedHandle(handle, kind, ctx) if kwargs.get("async_op") else handle


class _TimedHandle:
    """An asynchronous collective whose wait is timed."""

    def __init__(self, handle: Any, kind: str, ctx: RankContext) -> None:
        self._handle, self._kind, self._ctx = handle, kind, ctx

    def wait(self, *args: Any) -> Any:
        """Returns when the tensor may be used."""
        with self._ctx.clock.section(self._kind):
            return self._handle.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)
