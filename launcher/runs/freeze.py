"""A copy of the code in the run directory, so that a queued job runs what was submitted.

RUN/source/lib      this program with its plugins, its settings and its entry points
RUN/source/roots/N  the folders that a user's own model and data are imported from
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from launcher.base import resources
from launcher.base.errors import JobError
from launcher.base.registry import DISTRIBUTION
from launcher.base.secrets import check_file
from launcher.base.units import format_bytes
from launcher.contract.job import CODE, FROZEN_ROOTS
from launcher.contract.plan import Plan
from launcher.runs.facts import filters_off, git
from launcher.runs.fingerprint import own_packages, package_folder
from launcher.runs.store import SWEEP_FILE, move_aside

_OF_RUNS = (("job.json", "plan.json", "logs"), (SWEEP_FILE, CODE))
"""What only the directory of a run holds, and that of a sweep with its code."""
_MAX_BYTES = 100_000_000
"""A folder with more than this is taken to hold data, not code."""
_METADATA = {"METADATA": ("METADATA", "PKG-INFO"), "entry_points.txt": ("entry_points.txt",)}
"""Files that tell of a distribution, each with its names: in a tree from which it was installed in place, a
folder ``.egg-info`` may be found first."""


def frozen_plan(plan: Plan, run_dir: Path) -> Plan:
    """The plan with the user's modules imported from the copies in the run directory."""
    roots = tuple(str(run_dir / FROZEN_ROOTS / str(number)) for number in range(len(plan.source_roots)))
    return replace(plan, source_roots=roots)


def freeze(
    source_roots: Sequence[str],
    run_dir: Path,
    untracked: Sequence[str] = (),
    secrets: Mapping[str, bytes] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Copies the code into the run directory; its files are read-only. Returns the untracked ones.

    From a git working tree, tracked files are copied as they are now; of the files that are neither tracked
    nor ignored, those in Python and those that match a pattern of ``untracked``. Of a run directory nothing
    is copied: it would hold copies of earlier ones.

    Raises:
        JobError: when a folder holds more than code, a file one of the ``secrets``, or a pattern matches
            nothing.
    """
    if (run_dir / "source").exists():
        move_aside(run_dir / "source")
    copied: dict[str, None] = {}
    for source, target, outside_git in _trees(source_roots, run_dir):
        tracked, others = _files(source, outside_git, untracked)
        _copy(source, target, [*tracked, *others], secrets)
        copied |= dict.fromkeys(str(source / path) for path in others)
    for pattern in untracked:
        if not any(fnmatch(path, f"*/{pattern}") for path in copied):
            raise JobError(
                f"--untracked {pattern}: no untracked file in {', '.join(source_roots) or 'the code'}"
            )
    _copy_metadata(run_dir / CODE)
    return tuple(copied)


def _trees(source_roots: Sequence[str], run_dir: Path) -> Iterator[tuple[Path, Path, str]]:
    """Each folder whose files are copied, where they go, and which of them are copied outside of git."""
    code = run_dir / CODE
    for name in own_packages():
        yield package_folder(name), code / name, "*"
    conf = resources.folder("conf")
    if not conf.is_relative_to(package_folder("launcher")):
        yield conf, code / "conf", "*"
    for number, root in enumerate(source_roots):
        yield Path(root), run_dir / FROZEN_ROOTS / str(number), "*.py"


def _files(source: Path, outside_git: str, untracked: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """The tracked and the untracked files to copy, relative to the folder."""
    filters = filters_off(str(source))
    tracked = _listed(source, filters, "--cached")
    if not tracked:  # not in a working tree, or ignored by git, as a virtual environment is
        return sorted(_outside_git(source, outside_git)), []
    others = [
        path
        for path in _listed(source, filters, "--others", "--exclude-standard")
        if path.suffix == ".py" or any(fnmatch(str(path), pattern) for pattern in untracked)
    ]
    return tracked, others


def _listed(folder: Path, filters: Mapping[str, str], *flags: str) -> list[Path]:
    listed = git(str(folder), ("ls-files", "-z", *flags), filters) or ""
    paths = [Path(name) for name in sorted(set(filter(None, listed.split("\0"))))]
    return [path for path in paths if (folder / path).is_file() or (folder / path).is_symlink()]


def _outside_git(source: Path, pattern: str) -> Iterator[Path]:
    for path in source.rglob(pattern):
        inner = path.relative_to(source)
        is_hidden = any(
            part.startswith(".") or part in ("__pycache__", "site-packages") for part in inner.parts
        )
        if path.is_file() and not is_hidden:
            yield inner


def _holds(folder: Path, names: Iterable[str]) -> bool:
    return all((folder / name).exists() for name in names)


def _copy(folder: Path, to: Path, paths: Iterable[Path], secrets: Mapping[str, bytes]) -> None:
    num_bytes = 0
    to.mkdir(parents=True)
    is_run = cache(lambda parent: any(_holds(folder / parent, names) for names in _OF_RUNS))
    for path in paths:
        if any(map(is_run, path.parents)):
            continue
        source, target = folder / path, to / path
        num_bytes += source.lstat().st_size
        if num_bytes > _MAX_BYTES:
            raise JobError(
                f"{folder} holds more than {format_bytes(_MAX_BYTES)} of files, which is not code. "
                "Keep data out of git, or start from a folder that holds only code."
            )
        if not source.is_symlink():
            check_file(source, str(source), secrets)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target, follow_symlinks=False)
        if not target.is_symlink():
            target.chmod(source.stat().st_mode & 0o555 | 0o400)


def _copy_metadata(code: Path) -> None:
    """The entry points, so that plugins are found even when the installation has changed."""
    distribution = metadata.distribution(DISTRIBUTION)
    folder = code / f"{DISTRIBUTION.replace('-', '_')}-{distribution.version}.dist-info"
    folder.mkdir()
    for name, sources in _METADATA.items():
        text = next(filter(None, map(distribution.read_text, sources)), "")
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o444)
