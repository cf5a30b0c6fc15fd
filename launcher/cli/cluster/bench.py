"""``trireme bench``: measures what plans assume, and writes it to tables and files."""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from launcher.app.output import shown
from launcher.base import resources
from launcher.base.errors import LauncherError
from launcher.base.files import check_new, write_new
from launcher.bench.link_file import cluster_text
from launcher.bench.plot import svg_text
from launcher.bench.tables import json_text, not_measured_lines, result_text
from launcher.contract.bench import BenchResult
from launcher.contract.config import LaunchConfig

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([KMG])(I?)B?|B)?", re.IGNORECASE)
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


def bench(given: Namespace) -> int:
    """Starts ranks, checks that every collective operation gives the right value, and times it: broadcast,
    scatter, reduce, all-reduce, gather, all-gather, reduce-scatter, all-to-all, send and receive. Bandwidths
    are those of nccl-tests; to the times a latency and a bandwidth are fitted, with their error.

    key=value sets what belongs to cluster, device, executor, site or run: gloo is measured on
    device.kind=cpu, NCCL on cuda. With several nodes, which executor=slurm reserves, the link
    between them is measured, too.

    The exit code is 0 when everything was right, and 1 when a value was wrong or a rank failed.

    Examples:
      trireme bench collectives
      trireme bench collectives --ranks 2,4 --sizes 4KB,64KB,1MB,16MB --plot links.svg
      trireme bench collectives --save this_machine
      trireme plan quickstart cluster=this_machine
    """
    from launcher.app.bench import measure_collectives  # imports hydra, which the help does not need

    outputs = _outputs(given)
    measured = measure_collectives(
        (*given.names, *given.overrides),
        sizes=parsed_sizes(given.sizes) if given.sizes else None,
        ranks=parsed_ranks(given.ranks) if given.ranks else None,
        tells_bandwidth="save" in outputs,
    )
    result = measured.result
    if result is None:
        return measured.run.exit_code
    print("\n" + result_text(result), end="")
    _write(outputs, result, measured.config)
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


def _outputs(given: Namespace) -> dict[str, Path]:
    """The files to write by flag, none of which is there yet."""
    paths = {flag: Path(vars(given)[flag]) for flag in ("json", "plot") if vars(given)[flag]}
    if "plot" in paths and paths["plot"].suffix != ".svg":
        raise LauncherError(
            f"--plot {paths['plot']}: the plot is an SVG picture. Give a name ending in .svg."
        )
    for flag, path in paths.items():
        check_new(path, flag)
        if not path.absolute().parent.is_dir():
            raise LauncherError(f"--{flag} {path}: there is no folder {path.parent}. Make it first.")
    if given.save:
        paths["save"] = _saved_path(given.save)
        check_new(paths["save"], "save")
    return paths


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


def _write(outputs: Mapping[str, Path], result: BenchResult, config: LaunchConfig) -> None:
    for flag, path in outputs.items():
        if flag == "save":
            path.parent.mkdir(parents=True, exist_ok=True)
            text = cluster_text(path.stem, config.cluster, result, date.today().isoformat())
        else:
            text = json_text(result) if flag == "json" else svg_text(result)
        write_new(path, text, flag)
        print(f"wrote {shown(path)}")
    if "save" in outputs:
        print(f"  trireme plan quickstart cluster={outputs['save'].stem}")
