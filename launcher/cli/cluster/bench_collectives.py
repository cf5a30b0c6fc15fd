"""``trireme bench collectives``: from the words of the command line to tables and files."""

from __future__ import annotations

import json
import os
import re
import sys
from argparse import Namespace
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from launcher.app.bench.job import start_and_wait
from launcher.app.ending import say, shown
from launcher.base import resources
from launcher.base.errors import ConfigError, Fault, LauncherError
from launcher.base.files import check_new, write_new
from launcher.base.machine import num_cores
from launcher.base.registry import load as load_plugin
from launcher.base.units import counted, format_bytes
from launcher.bench.link_file import NO_BANDWIDTH, cluster_text
from launcher.bench.model import has_range
from launcher.bench.placements import default_sizes, placements, world_size
from launcher.bench.plot import svg_text
from launcher.bench.tables import json_text, not_measured_lines, result_text
from launcher.cli.verbs import VERBS
from launcher.config.compose import Composed, draft
from launcher.config.load import load
from launcher.contract.bench import (
    OPERATIONS,
    REQUEST_FILE,
    RESULT_FILE,
    BenchRequest,
    BenchResult,
)
from launcher.contract.config import BatchConfig, LaunchConfig
from launcher.contract.executor import Executor
from launcher.contract.plan import Plan
from launcher.plan.build import build
from launcher.runs.store import RunDirectory
from launcher.typed.read import Reading, plain, read

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
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMG])(I?)B?|B)?", re.IGNORECASE)
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


@dataclass(frozen=True, kw_only=True)
class _Outputs:
    """Where what was found is written; None: nowhere."""

    json: Path | None
    plot: Path | None
    save: Path | None


def bench(given: Namespace) -> int:
    """Measures what was asked for after ``bench collectives``; returns the exit code.

    Raises:
        LauncherError: when nothing could be measured.
    """
    outputs = _outputs(given)
    composed = _compose(given)
    config = load(composed.values, composed.sources, composed.faults)
    request = _request(config, given)
    if outputs.save and not has_range(request.sizes):
        raise LauncherError(NO_BANDWIDTH)
    plan = _plan(config, request)
    sizes = dict.fromkeys(placement.num_ranks for placement in request.placements)
    say(
        f"{counted(len(request.operations), 'operation')}, {counted(len(request.sizes), 'size')} from "
        f"{format_bytes(min(request.sizes))} to {format_bytes(max(request.sizes))}, groups of "
        f"{' and '.join(map(str, sizes))}, on {counted(plan.world_size, 'rank')}"
    )
    directory, code = start_and_wait(plan, given.overrides, composed.sources)
    if code:
        return code
    result = _result(directory)
    print("\n" + result_text(result), end="")
    _write(outputs, result, config)
    for line in not_measured_lines(result):
        print(f"not measured: {line}", file=sys.stderr)
    return int(any(missing.is_wrong for missing in result.not_measured))


def parsed_sizes(text: str) -> tuple[int, ...]:
    """Bytes from what was typed after ``--sizes``.

    >>> parsed_sizes("512,4KB,1MiB")
    (512, 4000, 1048576)

    Raises:
        LauncherError: for what is no size.
    """
    sizes = []
    for word in text.split(","):
        match = _SIZE.fullmatch(word.strip())
        factor = 1024 if match and match[3] else 1000
        power = " KMG".index(match[2].upper()) if match and match[2] else 0
        size = float(match[1]) * factor**power if match else 0
        if size < 1 or size != int(size):
            raise LauncherError(f"--sizes {text}: {word!r} is no size. Write bytes, 64KB, 1MB or 1MiB.")
        sizes.append(int(size))
    return tuple(sorted(set(sizes)))


def parsed_ranks(text: str) -> tuple[int, ...]:
    """Group sizes from what was typed after ``--ranks``.

    >>> parsed_ranks("4,2")
    (2, 4)

    Raises:
        LauncherError: for what is no whole number of at least 2.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 1 for word in words):
        raise LauncherError(f"--ranks {text}: give whole numbers of at least 2, such as --ranks 2,4.")
    return tuple(sorted(set(map(int, words))))


def _compose(given: Namespace) -> Composed:
    if given.names:
        raise LauncherError(
            f"bench collectives takes no recipe, given {given.names[0]!r}: it trains nothing."
        )
    faults, groups = [], VERBS["bench"].groups
    for word in given.overrides:
        key = word.lstrip("+~").partition("=")[0]
        if key.partition(".")[0] not in groups:
            allowed = f"has no effect here: what is measured depends on {', '.join(groups)}"
            faults.append(Fault(key, word.partition("=")[2], allowed, "Leave it out.", f"override {word}"))
    if faults:
        raise ConfigError(faults)
    return draft(BASE_RECIPE, given.overrides)


def _request(config: LaunchConfig, given: Namespace) -> BenchRequest:
    is_here = load_plugin(Executor, config.executor.name).is_local
    shares_cores = config.device.kind == "cpu" and is_here
    ranks = (
        parsed_ranks(given.ranks)
        if given.ranks
        else default_sizes(config.cluster, num_cores() if shares_cores else None)
    )
    sizes = parsed_sizes(given.sizes) if given.sizes else _SIZES[config.device.kind]
    return BenchRequest(
        sizes=sizes,
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


def _result(directory: RunDirectory) -> BenchResult:
    text = (directory.path / RESULT_FILE).read_text(encoding="utf-8")
    reading = Reading()
    result = read(BenchResult, json.loads(text), reading)
    if result is None:
        raise ConfigError(reading.faults)
    return result


def _outputs(given: Namespace) -> _Outputs:
    """The files to write, none of which is there yet."""
    paths = {
        "json": Path(given.json) if given.json else None,
        "plot": Path(given.plot) if given.plot else None,
        "save": _saved_path(given.save) if given.save else None,
    }
    if paths["plot"] and paths["plot"].suffix != ".svg":
        raise LauncherError(
            f"--plot {paths['plot']}: the plot is an SVG picture. Give a name ending in .svg."
        )
    for flag, path in paths.items():
        if path is not None:
            check_new(path, flag)
            if flag != "save" and not path.absolute().parent.is_dir():
                raise LauncherError(f"--{flag} {path}: there is no folder {path.parent}. Make it first.")
    return _Outputs(**paths)


def _saved_path(given: str) -> Path:
    """Where ``--save`` writes: a name means the person's own folder."""
    is_path = os.sep in given or given.endswith(".yaml")
    path = Path(given) if is_path else resources.user_folder() / "cluster" / f"{given}.yaml"
    if path.suffix != ".yaml" or not _NAME.fullmatch(path.stem):
        raise LauncherError(
            f"--save {given}: give a name of small letters, digits, - and _, or such a path ending in .yaml."
        )
    if (resources.folder("conf") / "cluster" / path.name).exists():
        raise LauncherError(
            f"--save {given}: a cluster of this name ships with Trireme. Choose another name."
        )
    return path


def _write(outputs: _Outputs, result: BenchResult, config: LaunchConfig) -> None:
    if outputs.json:
        write_new(outputs.json, json_text(result), "json")
        say(f"wrote {shown(outputs.json)}")
    if outputs.plot:
        write_new(outputs.plot, svg_text(result), "plot")
        say(f"wrote {shown(outputs.plot)}")
    if outputs.save:
        name, day = outputs.save.stem, date.today().isoformat()
        text = cluster_text(name, config.cluster, result, day)
        outputs.save.parent.mkdir(parents=True, exist_ok=True)
        write_new(outputs.save, text, "save")
        say(f"wrote {shown(outputs.save)}\n  trireme plan quickstart cluster={name}")
