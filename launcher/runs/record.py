"""Writes the description of a run into its directory, before its first process starts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from launcher.base.files import read_json
from launcher.base.secrets import check_text
from launcher.config.save import dump
from launcher.contract.inputs.lineage import LINEAGE, lineage_of
from launcher.contract.job import JobScript
from launcher.contract.plan import Plan, sha256
from launcher.runs.facts import Checkout
from launcher.runs.fingerprint import fingerprint
from launcher.runs.render import shell_text
from launcher.runs.store import RunDirectory

VERSION = 1
"""Version of job.json; incremented when a field changes its meaning."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a plan comes from."""

    recipe: str
    """As it was typed."""
    overrides: tuple[str, ...]
    facts: Mapping[str, Any]
    """Of `environment_facts`."""
    checkouts: tuple[Checkout, ...]
    secrets: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Values of variables that may be in no file."""


def write_job(directory: RunDirectory, plan: Plan, script: JobScript, origin: Origin) -> None:
    """Writes plan, settings, command, environment and git state.

    Raises:
        JobError: when one of them would hold a secret; nothing is written.
    """
    plan_text = plan.to_json()
    texts = {
        "config.yaml": dump(plan.config),
        **{name: json.dumps(content, indent=1) + "\n" for name, content in plan.documents.items()},
        "job.sh": shell_text(script),
        **{_patch_name(number): tree.patch for number, tree in enumerate(origin.checkouts) if tree.patch},
    }
    for name, text in {"plan.json": plan_text, **texts, "job.json": " ".join(origin.overrides)}.items():
        check_text(text, name, origin.secrets)
    write_plan(directory, plan_text)
    for name, text in texts.items():
        directory.write(name, text)
    directory.handle.unlink(missing_ok=True)  # of an earlier start, whose job no longer stands for the run
    job = {
        "version": VERSION,
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "recipe": origin.recipe,
        "overrides": list(origin.overrides),
        "executor": plan.config.executor.name,
        "argv": list(script.argv),
        "environment": dict(script.environment),
        "plan_sha256": sha256(plan_text),
        "world_size": plan.world_size,
        "fingerprint": fingerprint(plan, origin.facts),
        # Of the start that is resumed, to which what it began with may be gone.
        "baseline": read_json(directory.job).get("baseline"),
        LINEAGE: read_json(directory.job).get(LINEAGE) or [*map(asdict, lineage_of(plan.config.train))],
        "facts": dict(origin.facts),
        "checkouts": [
            asdict(checkout) | {"patch": _patch_name(number) if checkout.patch else None}
            for number, checkout in enumerate(origin.checkouts)
        ],
    }
    _write_job(directory, job)
    directory.write_status("prepared")


def write_plan(directory: RunDirectory, text: str) -> None:
    """Writes the text of the plan, and its hash."""
    directory.write("plan.json", text)
    directory.write("plan.sha256", f"{sha256(text)}  plan.json\n")


def write_baseline(directory: RunDirectory, baseline: Path) -> None:
    """Records the baseline of this run, relative to its directory."""
    job = read_json(directory.job)
    _write_job(directory, job | {"baseline": os.path.relpath(baseline, directory.path)})


def _write_job(directory: RunDirectory, job: Mapping[str, Any]) -> None:
    directory.write(directory.job.name, json.dumps(job, indent=1) + "\n")


def _patch_name(number: int) -> str:
    return f"checkout-{number}.patch"
