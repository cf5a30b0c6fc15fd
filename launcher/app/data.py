"""Has the tokens of a recipe's data made, or shown, by a process of its own: planning imports no library."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.app.output import Output
from launcher.base.errors import ConfigError, Fault, LauncherError
from launcher.base.units import counted, format_bytes, format_count
from launcher.contract.config import LaunchConfig
from launcher.contract.data.blend import NUM_PARTS, Blend
from launcher.contract.data.files import PACKAGE
from launcher.contract.data.prepared import cache_folder
from launcher.contract.data.samples import needs_preparing, sources_tokens, text_faults, training_tokens
from launcher.contract.model.checkpoint import first_step
from launcher.contract.plan import Plan
from launcher.plan.rules.checks import with_sources
from launcher.typed.read import NO_SOURCES, Source, plain

_MODULE = "launcher.runtime.tokens.command"


def is_elsewhere(config: LaunchConfig, *, is_here: bool) -> bool:
    """Whether the ranks of a run see other files than this process: those of a container, or other packages.

    ``is_here``: they start on this machine, in this environment.
    """
    packaged = any(source.startswith(PACKAGE) for source in config.data.all_sources.values())
    has_other_packages = config.site.python is not None and packaged
    return not is_here and (config.site.container_image is not None or has_other_packages)


def prepare_data(
    plan: Plan, output: Output, sources: Mapping[str, Source] = NO_SOURCES, *, is_here: bool = True
) -> None:
    """Makes the tokens that the ranks will read, where they are not there, and says so.

    Raises:
        ConfigError: when a source cannot be read, or is too small.
        LauncherError: when they cannot be written.
    """
    config = plan.config
    if config.data.source is None or is_elsewhere(config, is_here=is_here):
        return
    missing = [each for each in sources_tokens(config) if needs_preparing(config.data, each, config.run.root)]
    if not missing:
        return
    num_bytes = sum(file.size for each in missing for file in each.files)
    output.say(f"preparing {format_bytes(num_bytes)} of data, once, for this run and later ones")
    run_command(plan, [each.setting for each in missing], output, sources)
    if faults := text_faults(config, plan.batch):
        raise ConfigError(with_sources(faults, sources))


def prepare_all(plan: Plan, output: Output, sources: Mapping[str, Source]) -> None:
    """Makes the tokens of every source where they are not there or damaged, and says how many they are.

    Raises:
        LauncherError: as `prepare_data`.
    """
    run_command(plan, [*_sources(plan)], output, sources)
    output.say("\n".join(data_rows(plan)))
    output.say(f"tokens: {cache_folder(plan.config.data, plan.config.run.root)}")


def show_data(plan: Plan, output: Output, sources: Mapping[str, Source]) -> None:
    """Makes the tokens where they are not there, and says what is in them.

    Raises:
        LauncherError: as `prepare_data`.
    """
    asked = {
        "vocab_size": plan.config.model.vocab_size,
        "seq_length": plan.batch.seq_length,
        "global_size": plan.batch.global_size,
    }
    run_command(plan, [*_sources(plan)], output, sources, show=asked)


def _sources(plan: Plan) -> Mapping[str, str]:
    """The sources that are prepared.

    Raises:
        ConfigError: when the data are a user's own dataset, or a package that reads them is missing.
    """
    data = plan.config.data
    if data.target is not None:
        rule = "is a dataset of your own, which reads its data itself: there is nothing to prepare"
        raise ConfigError([Fault("data.target", data.target, rule, "Name a recipe with data.source.")])
    sources_tokens(plan.config)
    return data.all_sources


def run_command(
    plan: Plan,
    settings: Sequence[str],
    output: Output,
    sources: Mapping[str, Source],
    show: Mapping[str, Any] | None = None,
) -> None:
    """Has the tokens of some sources made by a process, and says what it says."""
    data, root = plain(plan.config.data), plan.config.run.root
    request = json.dumps({"data": data, "root": root, "settings": [*settings], "show": show})
    last: Any = None
    with subprocess.Popen(  # noqa: S603 (our own module, no shell)
        [sys.executable, "-m", _MODULE],
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None, "it was asked for"
        assert process.stdout is not None, "it was asked for"
        try:
            process.stdin.write(request)
            process.stdin.close()
            for line in process.stdout:
                last = json.loads(line)
                if isinstance(last, dict):
                    output.say(last["say"])
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # with those that work for it
            raise
    if process.returncode == 0:
        return
    if isinstance(last, list):
        faults = [Fault(**fault | {"ways": tuple(fault["ways"])}) for fault in last]
        raise ConfigError(with_sources(faults, sources))
    why = last if isinstance(last, str) else f"its process ended with status {process.returncode}"
    raise LauncherError(f"the data could not be prepared: {why}")


def data_rows(plan: Plan) -> Iterator[str]:
    """What a plan says of each source, as far as this machine has it: its tokens, and how often they are
    seen."""
    config = plan.config
    if config.data.source is None or is_elsewhere(config, is_here=False):
        return
    try:
        found = {each.setting: each for each in sources_tokens(config)}
    except ConfigError:  # told where it is started
        return
    blend = Blend(config.data.weights or [1.0])
    num_samples = (config.train.num_steps - first_step(config.train)) * plan.batch.global_size
    for number, (setting, source) in enumerate(config.data.sources.items()):
        num_tokens = found[setting].num_tokens
        if num_tokens is None:
            files = counted(len(found[setting].files), "file")
            yield f"{source}: {files}, not prepared yet (trireme data prepare)"
            continue
        seen = blend.num_samples(number, num_samples) * plan.batch.seq_length
        trained = training_tokens(config.data, num_tokens)
        part = blend.num_samples(number, NUM_PARTS) / NUM_PARTS
        share = f", {part:.2%} of the samples" if config.data.weights else ""
        epochs = f"{seen / trained:.3g} epochs" if trained else "nothing to train on"
        yield f"{source}: {format_count(trained)} tokens{share}, {format_count(seen)} seen: {epochs}"
