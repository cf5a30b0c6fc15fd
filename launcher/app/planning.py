"""From a recipe's name to its plan, and to that of the same training on one device."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.app.trust.check import check
from launcher.app.trust.question import Allow, never
from launcher.app.user_model import is_seen_here, measured_code, refuse_shadowed, source_roots
from launcher.base.errors import ConfigError, LauncherError
from launcher.config.baseline import of_baseline
from launcher.config.compose import Composed, compose
from launcher.config.load import load
from launcher.contract.config import DEFAULT_ARCHITECTURE, LaunchConfig, PluginChoice
from launcher.contract.data.config import BYTES
from launcher.contract.data.tokenizer import is_here, read_tokenizer
from launcher.contract.model.from_folder import settled
from launcher.contract.plan import Plan
from launcher.plan.build import build
from launcher.plan.checked_job import PlanInputs, needs_measuring
from launcher.plan.cost.measured import MeasuredRun
from launcher.plan.rules.checks import with_sources
from launcher.runs.fingerprint import common_recompute
from launcher.typed.read import NO_SOURCES, Source


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A recipe composed and planned."""

    plan: Plan
    composed: Composed


def make_plan(
    recipe: str,
    overrides: Sequence[str],
    swept: Container[str] = (),
    *,
    of_recipe: Container[str] = (),
    allow: Allow = never,
) -> Planned:
    """The plan of a recipe under overrides, of which one point of a sweep alone has those ``swept``, and the
    recipe itself has written those ``of_recipe``.

    A user's own modules are looked for beside the recipe, then in the current folder. ``allow`` decides
    whether what a recipe names may be run, where its folder is not trusted already.

    Raises:
        LauncherError: when the recipe cannot be composed, is wrong, may not be run, or cannot run.
    """
    composed = compose(recipe, overrides, swept, of_recipe)
    try:
        config = load(composed.values, composed.sources, composed.faults)
        roots = source_roots(config, check(composed, config, allow))
        config = _with_model(config, composed.sources)
        refuse_shadowed(config, roots, composed.sources)
        inputs = plan_inputs(config, roots, composed.sources)
        plan = build(config, composed.sources, inputs=inputs, source_roots=roots)
    except LauncherError as error:
        for note in composed.notes:
            error.add_note(note)
        raise
    return Planned(plan=plan, composed=composed)


def _with_model(config: LaunchConfig, sources: Mapping[str, Source]) -> LaunchConfig:
    """With the model of the folder that ``model.path`` names."""
    given = [path for path, source in sources.items() if source.is_given]
    try:
        return replace(config, model=settled(config.model, config.batch.seq_length, given))
    except ConfigError as error:
        raise ConfigError(with_sources(error.faults, sources)) from None


def plan_inputs(
    config: LaunchConfig, roots: tuple[str, ...], sources: Mapping[str, Source] = NO_SOURCES
) -> PlanInputs:
    """What the plan of a configuration has to know of a user's own model and data, and of a run that
    measured.

    Raises:
        PlanError: when the user's model or dataset cannot be made.
        PluginError: when a named plugin fails to load.
    """
    measured: MeasuredRun | LauncherError | None = None
    needs_code = needs_measuring(config, sources) and is_seen_here(config)
    code = measured_code(config, roots) if needs_code else None
    if config.device.measured_in is not None:
        try:
            measured = measured_run(config.device.measured_in)
        except LauncherError as error:
            measured = error
    inputs = PlanInputs(measured=measured, num_token_ids=_num_token_ids(config))
    return inputs if code is None else replace(inputs, shape=code.model, num_samples=code.num_samples)


def _num_token_ids(config: LaunchConfig) -> int | None:
    """The vocabulary of a tokenizer's file that is on this machine; of a container's nothing is seen."""
    data = config.data
    if data.target is not None or data.tokenizer == BYTES or not is_here(data):
        return None
    tokenizer = None if config.site.container_image is not None else read_tokenizer(data)
    return None if tokenizer is None else tokenizer.num_ids


def measured_run(path: str) -> MeasuredRun:
    """What a run measured of its stages.

    Raises:
        LauncherError: when it is none, or has measured nothing.
    """
    from launcher.report.bubble import stage_times  # few plans read a run
    from launcher.report.runs import load_run

    run = load_run(Path(os.path.expanduser(path)))
    times = stage_times(run)
    return MeasuredRun(
        plan=run.plan,
        forward_s=[stage.forward_s for stage in times],
        backward_s=[stage.backward_s + stage.weight_s for stage in times],
    )


def one_device_plan(plan: Plan) -> Plan:
    """The plan of the same training on one device.

    Raises:
        ConfigError: when it does not run on one.
    """
    config, roots = one_device(plan), plan.source_roots
    return build(config, inputs=plan_inputs(config, roots), source_roots=roots)


def one_device(plan: Plan) -> LaunchConfig:
    """The same training on one device: the same batch in the same microbatches, all in one place; of a long
    one the first steps."""
    config, batch = of_baseline(plan.config), plan.batch
    return replace(
        config,
        name=f"{config.name}-baseline",
        device=replace(config.device, measured_in=None),
        cluster=replace(config.cluster, nodes=1, devices_per_node=1),
        parallel=replace(config.parallel.on_one_device(), recompute=common_recompute(plan)),
        batch=replace(
            config.batch,
            global_size=batch.global_size,
            micro_size=batch.micro_size,
            num_microbatches=batch.global_size // batch.micro_size,
        ),
        site=replace(config.site, nodelist=None),
        architecture=PluginChoice(name=DEFAULT_ARCHITECTURE, options={}),
        report=replace(config.report, baseline="none", claims=False),
        run=replace(config.run, dir=None, notify=(), prometheus=None),
    )
