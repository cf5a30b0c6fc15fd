"""Measures the collectives of a cluster: from settings to the result of its ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.app.lifecycle import (
    EndedRun,
    failed_unless_ended,
    freeze_and_submit,
    origin_of,
    prepared,
    stopped_text,
)
from launcher.app.output import TERMINAL, Output, shown
from launcher.app.preflight import executor_faults, refuse
from launcher.app.wait import wait_for_end
from launcher.base.errors import LEFT_OUT, ConfigError, Fault, LauncherError
from launcher.base.machine import num_cores
from launcher.base.registry import load as load_plugin
from launcher.base.units import counted, format_bytes
from launcher.bench.link_file import NO_BANDWIDTH
from launcher.bench.model import has_range
from launcher.bench.placements import default_sizes, placements, world_size
from launcher.config.compose import Composed, compose
from launcher.config.load import load
from launcher.contract.bench import OPERATIONS, REQUEST_FILE, RESULT_FILE, BenchRequest, BenchResult
from launcher.contract.config import BatchConfig, LaunchConfig
from launcher.contract.executor import Executor
from launcher.contract.plan import Plan
from launcher.plan.build import build
from launcher.runs.failure import failure_text
from launcher.runs.render import executor_of
from launcher.runs.store import new_directory
from launcher.runs.watch import follow, stop_signals
from launcher.typed.read import Source, plain, read_or_raise

PROGRAM = "launcher.runtime.measure.collectives:run"
"""What the ranks do."""
BASE_RECIPE = "quickstart"
"""Gives every setting that no override changes; what it trains is not trained."""
NUM_ROUNDS = 5
_SIZES = {
    "cpu": (4_096, 32_768, 262_144, 2_097_152, 16_777_216),
    "cuda": (4_096, 65_536, 1_048_576, 16_777_216, 268_435_456),
}
"""Sizes by kind of device: those of training's messages, and small ones, which show the latency."""
MEASURED_GROUPS = ("cluster", "device", "executor", "site", "run")
"""Groups of settings that a measurement depends on."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The result of a measurement."""

    config: LaunchConfig
    run: EndedRun
    result: BenchResult | None
    """None: the ranks did not come to their end."""


def measure_collectives(
    overrides: Sequence[str],
    output: Output = TERMINAL,
    *,
    sizes: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    tells_bandwidth: bool = False,
) -> Measured:
    """Measures under overrides of the settings that a measurement depends on.

    ``sizes``: bytes; ``ranks``: sizes of the groups; None: those that suit the device and the cluster.
    ``tells_bandwidth``: whether the sizes have to be such that bandwidths can be told from them.

    Raises:
        LauncherError: when nothing could be measured.
    """
    composed = _compose(overrides)
    config = load(composed.values, composed.sources, composed.faults)
    request = _request(config, sizes, ranks)
    if tells_bandwidth and not has_range(request.sizes):
        raise LauncherError(NO_BANDWIDTH)
    plan = _plan(config, request)
    groups = dict.fromkeys(placement.num_ranks for placement in request.placements)
    output.say(
        f"{counted(len(request.operations), 'operation')}, {counted(len(request.sizes), 'size')} from "
        f"{format_bytes(min(request.sizes))} to {format_bytes(max(request.sizes))}, groups of "
        f"{' and '.join(map(str, groups))}, on {counted(plan.world_size, 'rank')}"
    )
    run = start_and_wait(plan, overrides, composed.sources, output)
    result = None
    if run.state.phase == "succeeded":
        text = (run.directory.path / RESULT_FILE).read_text(encoding="utf-8")
        result = read_or_raise(BenchResult, json.loads(text))
    return Measured(config=config, run=run, result=result)


def _compose(words: Sequence[str]) -> Composed:
    faults = []
    for word in words:
        key = word.lstrip("+~").partition("=")[0]
        if "=" not in word and not word.startswith("~"):
            raise LauncherError(f"bench collectives takes no recipe, given {word!r}: it trains nothing.")
        if key.partition(".")[0] not in MEASURED_GROUPS:
            allowed = f"has no effect here: what is measured depends on {', '.join(MEASURED_GROUPS)}"
            faults.append(
                Fault(
                    key,
                    word.partition("=")[2],
                    allowed,
                    "Leave it out.",
                    f"override {word}",
                    ways=({key: LEFT_OUT},),
                )
            )
    if faults:
        raise ConfigError(faults)
    return compose(BASE_RECIPE, words)


def _request(config: LaunchConfig, sizes: Sequence[int] | None, ranks: Sequence[int] | None) -> BenchRequest:
    is_here = load_plugin(Executor, config.executor.name).is_local
    shares_cores = config.device.kind == "cpu" and is_here
    ranks = ranks or default_sizes(config.cluster, num_cores() if shares_cores else None)
    return BenchRequest(
        sizes=tuple(sizes or _SIZES[config.device.kind]),
        placements=placements(config.cluster, ranks),
        num_rounds=NUM_ROUNDS,
        operations=OPERATIONS,
    )


def _plan(config: LaunchConfig, request: BenchRequest) -> Plan:
    """A plan of as many ranks as are needed, which do something else than train."""
    num_ranks = world_size(config.cluster, [placement.num_ranks for placement in request.placements])
    config = replace(
        config,
        name="collectives",
        parallel=replace(config.parallel.on_one_device(), dp=num_ranks),
        batch=BatchConfig(global_size=num_ranks, micro_size=1, num_microbatches=1, seq_length=1),
        # A rank more or less is no device that stays idle: it is in no group.
        cluster=replace(config.cluster, allow_idle_devices=True),
        device=replace(config.device, measured_in=None),
        report=replace(config.report, baseline="none"),
    )
    return replace(build(config), program=PROGRAM, documents={REQUEST_FILE: plain(request)}, notes=())


def start_and_wait(
    plan: Plan, overrides: Sequence[str], sources: Mapping[str, Source], output: Output
) -> EndedRun:
    """Runs the ranks to their end, in a new run directory, and says why where that was too early.

    Raises:
        LauncherError: when they cannot be started.
    """
    is_local = executor_of(plan).is_local
    refuse(executor_faults(prepared(plan), is_here=is_local), sources)
    directory = new_directory(plan.config.run, plan.config.name)
    output.say(f"run directory: {shown(directory.path)}")
    run = prepared(plan, directory)
    origin = origin_of("", overrides)
    with stop_signals() as stop:
        with failed_unless_ended(directory):
            if is_local:
                run.record(origin)
                directory.write_status("running")
                state = follow(run.executor, run.script, stop, directory.check, output.warn)
                directory.write_state(state)
            else:
                handle, _ = freeze_and_submit(run, origin)
        if not is_local:  # its job goes on where it cannot be asked for
            output.say(f"submitted as job {handle.id}")
            state = wait_for_end(directory, output, stop=stop)
            directory.write_state(state)
    if state.phase == "cancelled" and is_local:
        output.warn(stopped_text(state.reason))
    elif state.phase == "cancelled":  # its ranks end when the scheduler comes to it
        output.warn(f"job {handle.id} is cancelled ({state.reason}). Run directory: {shown(directory.path)}")
    elif state.phase == "failed":
        output.warn(failure_text(directory.path, state))
    return EndedRun(directory=directory, state=state)
