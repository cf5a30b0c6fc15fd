"""Which operations run as one kernel: what cannot be, and what a reader of the plan should know."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.base.errors import Fault
from launcher.contract.config import DEFAULT_SCHEDULE, LaunchConfig
from launcher.contract.optim.plugin import optimizer_of
from launcher.contract.strategy import JobShape, Schedule

NOT_COMPILED = ({"fusion.compile": "none"},)
"""The way out where layers cannot be compiled."""


def fusion_faults(config: LaunchConfig, schedule: Schedule) -> Iterator[Fault]:
    """Settings of ``fusion`` that could not take effect, or would compute something else."""
    if config.fusion.attention == "plain" and config.model.family == "custom":
        rule = "has no effect on a model of family custom, whose layers come from model.target"
        yield Fault("fusion.attention", "plain", rule, ways=({"fusion.attention": "fused"},))
    if config.fusion.compile != "none":
        yield from _compile_faults(config, schedule)


def _compile_faults(config: LaunchConfig, schedule: Schedule) -> Iterator[Fault]:
    name, parallel = config.fusion.compile, config.parallel
    if schedule.splits_backward:
        rule = f"torch.compile cannot split a layer's backward, which {parallel.schedule} needs"
        ways = (*NOT_COMPILED, {"parallel.schedule": DEFAULT_SCHEDULE})
        yield Fault("fusion.compile", name, rule, ways=ways)
    if "selective" in parallel.recompute:
        rule = "lets the compiler decide what a layer computes again, and parallel.recompute is selective"
        yield Fault("fusion.compile", name, rule, ways=(*NOT_COMPILED, {"parallel.recompute": "none"}))
    if config.report.warmup_steps == 0:
        rule = "counts the first step, in which layers are compiled (fusion.compile=block)"
        yield Fault("report.warmup_steps", 0, rule, ways=({"report.warmup_steps": 1}, *NOT_COMPILED))


_MEANINGS = {
    "optimizer": {
        "fused": "one kernel",
        "foreach": "one kernel per operation, over all tensors",
        "loop": "one tensor after the other",
    },
    "attention": {
        "fused": "one kernel, which keeps no scores",
        "plain": "matrix products and a softmax, whose weights are kept",
    },
    "compile": {"none": "layers run as they are written", "block": "kernels of each layer's own"},
}


def fusion_rows(config: LaunchConfig) -> list[list[str]]:
    """Each setting, its value, and what that means, as the plan shows them."""
    values = {name: getattr(config.fusion, name) for name in _MEANINGS}
    if config.model.family == "custom":
        del values["attention"]  # the layers are the user's
    values["optimizer"] = optimizer_of(config).kernel(config)
    return [[name, value, _MEANINGS[name][value]] for name, value in values.items()]


def compile_note(job: JobShape) -> str:
    """What compiling changes of what the plan predicts; empty where nothing is compiled."""
    if job.config.fusion.compile == "none":
        return ""
    inside = " Messages inside a layer (parallel.tp) lie between compiled pieces." if job.mesh.tp > 1 else ""
    return (
        "Layers are compiled in the first step, which takes some 10 s to minutes longer and is no measured "
        "one; what was compiled is kept for later runs. Predicted times and activations are those of layers "
        f"that are not compiled: what a compiled one keeps, the compiler decides.{inside}"
    )
