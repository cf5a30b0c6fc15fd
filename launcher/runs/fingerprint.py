"""The fingerprint of a run: two runs are comparable when theirs are equal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launcher.base.registry import DISTRIBUTION, GROUPS, plugins
from launcher.config.baseline import of_baseline
from launcher.contract.config import Recompute
from launcher.contract.inputs.user_code import code_files
from launcher.contract.plan import Plan
from launcher.typed.read import plain

_WORK = ("model", "optim", "precision", "fusion", "train", "seed")
_ENVIRONMENT = ("python", "torch", "cpu_model", "num_cores")


def fingerprint(plan: Plan, facts: Mapping[str, Any]) -> str:
    """A hash of the work, the device, the code and the environment; not of how the work is distributed."""
    return _sha256(json.dumps(identity(plan, facts), sort_keys=True))


def identity(plan: Plan, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What `fingerprint` hashes, by name."""
    config = of_baseline(plan.config)  # what a baseline repeats: of longer trainings that is the same
    data = plain(config.data)
    del data["cache_dir"]
    device = plain(config.device)
    del device["measured_in"]
    return {
        **{name: plain(getattr(config, name)) for name in _WORK},
        "data": data,
        "batch": {
            "global_size": plan.batch.global_size,
            "micro_size": plan.batch.micro_size,
            "seq_length": plan.batch.seq_length,
        },
        "recompute": common_recompute(plan),
        "device": device,
        "code": code_sha256(plan),
        "environment": {name: facts.get(name) for name in _ENVIRONMENT},
    }


def common_recompute(plan: Plan) -> Recompute:
    """The recomputation of all stages: what a single device with all of them would use."""
    order: tuple[Recompute, ...] = ("none", "selective", "full")
    return min((stage.recompute for stage in plan.stages), key=order.index)


def code_sha256(plan: Plan) -> str:
    """A hash of every source file of this program and of the user's own model and data."""
    digest = hashlib.sha256()
    for name, path in _sources(plan):
        digest.update(f"{name}\0{_sha256(path.read_bytes())}\n".encode())
    return digest.hexdigest()


def _sources(plan: Plan) -> Iterator[tuple[str, Path]]:
    """Every source file with its name, in a fixed order."""
    for package in map(package_folder, own_packages()):
        yield from ((str(path.relative_to(package)), path) for path in sorted(package.rglob("*.py")))
    yield from code_files(plan.config, plan.source_roots, with_installed=True).items()


def own_packages() -> list[str]:
    """The package of this program, and those of the plugins that come with it."""
    records = [record for group in GROUPS for record in plugins(group).values()]
    return sorted({"launcher", *(_top_package(r.target) for r in records if r.distribution == DISTRIBUTION)})


def package_folder(name: str) -> Path:
    """Where a package's files are; it is not imported."""
    spec = find_spec(name)
    assert spec is not None, f"{name} is registered by {DISTRIBUTION} and not installed"
    assert spec.origin is not None, f"{name} has no __init__.py"
    return Path(spec.origin).parent


def _top_package(target: str) -> str:
    return target.partition(":")[0].partition(".")[0]


def _sha256(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()
