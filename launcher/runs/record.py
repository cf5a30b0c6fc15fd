"""Writes the description of a run into its directory, before its first process starts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from launcher.base.files import read_json
from launcher.config.save import dump
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


def write_job(directory: RunDirectory, plan: Plan, script: JobScript, origin: Origin) -> None:
    """Writes plan, settings, command, environment and git state."""
    text = write_plan(directory, plan)
    directory.write("config.yaml", dump(plan.config))
    for name, content in plan.documents.items():
        directory.write(name, json.dumps(content, indent=1) + "\n")
    directory.write("job.sh", shell_text(script))
    for number, checkout in enumerate(origin.checkouts):
        if checkout.patch:
            directory.write(_patch_name(number), checkout.patch)
    directory.handle.unlink(missing_ok=True)  # of an earlier start, whose job no longer stands for the run
    job = {
        "version": VERSION,
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "recipe": origin.recipe,
        "overrides": list(origin.overrides),
        "executor": plan.config.executor.name,
        "argv": list(script.argv),
        "environment": dict(script.environment),
        "plan_sha256": sha256(text),
        "world_size": plan.world_size,
        "fingerprint": fingerprint(plan, origin.facts),
        "baseline": read_json(directory.job).get("baseline"),  # of the start that is resumed
        "facts": dict(origin.facts),
        "checkouts": [
            asdict(checkout) | {"patch": _patch_name(number) if checkout.patch else None}
            for number, checkout in enumerate(origin.checkouts)
        ],
    }
    _write_job(directory, job)
    directory.write_status("prepared")


def write_plan(directory: RunDirectory, plan: Plan) -> str:
    """Writes the plan and its hash; its text."""
    text = plan.to_json()
    directory.write("plan.json", text)
    directory.write("plan.sha256", f"{sha256(text)}  plan.json\n")
    return text


def write_baseline(directory: RunDirectory, baseline: Path) -> None:
    """Records the baseline of this run, relative to its directory."""
    job = read_json(directory.job)
    _write_job(directory, job | {"baseline": os.path.relpath(baseline, directory.path)})


def _write_job(directory: RunDirectory, job: Mapping[str, Any]) -> None:
    directory.write(directory.job.name, json.dumps(job, indent=1) + "\n")


def _patch_name(number: int) -> str:
    return f"checkout-{number}.patch"
