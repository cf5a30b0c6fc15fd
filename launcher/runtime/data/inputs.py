"""Whether a run that is resumed still has the data and the user's code that it was started with."""

from __future__ import annotations

from pathlib import Path

from launcher.base.errors import ConfigError
from launcher.contract.data.files import input_files
from launcher.contract.heartbeat import LOADING
from launcher.contract.inputs.record import (
    UNKNOWN,
    Inputs,
    read_inputs,
    refusal,
    resume_command,
    write_inputs,
)
from launcher.contract.inputs.text import blocks_per_file, file_digests
from launcher.contract.inputs.user_code import code_digests
from launcher.runtime.api import RankContext
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.process.log import log

_COUNT, _ITEM = "number of items", "item "


def check_inputs(ctx: RankContext, loader: Loader, run_dir: Path, *, resume: bool) -> None:
    """Compares data and code with those of the start that wrote them down, which the first one does. One
    rank does it for all.

    Raises:
        ConfigError: when they differ, naming what does and how to go on.
    """
    if ctx.plan.rank != ctx.plan.role.first_rank:
        return
    with ctx.clock.doing(LOADING):
        old = read_inputs(run_dir) if resume else None
        new = _found(ctx, loader, old)
    if old is None:
        if resume:
            log(UNKNOWN)
        write_inputs(run_dir, new)
    elif changed := old.changes(new):
        raise ConfigError([refusal(str(run_dir), changed, resume_command(run_dir))])


def _found(ctx: RankContext, loader: Loader, old: Inputs | None) -> Inputs:
    """What there is now, in the same measure as ``old``."""
    num_blocks = old.num_blocks if old else 1
    if ctx.config.data.target is not None:
        data = _items(loader, old)
    else:
        files = input_files(ctx.config.data)
        num_blocks = old.num_blocks if old else blocks_per_file(files)
        data = file_digests(files, num_blocks)
    code = code_digests(ctx.config, ctx.plan.plan.source_roots, with_installed=True)
    return Inputs(data=data, code=code, num_blocks=num_blocks)


def _items(loader: Loader, old: Inputs | None) -> dict[str, str]:
    """How many items are trained on, and the digests of those that all ranks have compared; not of items
    that are drawn anew each time."""
    count, digests = loader.num_samples, loader.first_digests
    if old is None:
        some = [index for index in digests if index < count]
        pairs = zip(some, loader.digests(some), strict=True)
        digests = {index: again for index, again in pairs if again == digests[index]}
    else:
        known = [int(name.removeprefix(_ITEM)) for name in old.data if name.startswith(_ITEM)]
        some = [index for index in known if index < count and index not in digests]
        digests = digests | dict(zip(some, loader.digests(some), strict=True))
        digests = {index: digests[index] for index in known if index in digests}
    return {_COUNT: str(count), **{f"{_ITEM}{index}": digest for index, digest in digests.items()}}
