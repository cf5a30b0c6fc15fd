"""The table of what goes together in plugins/README.md, every cell of it planned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.base.errors import PlanError
from launcher.contract.config import PrecisionConfig
from launcher.contract.job import ReportConfig
from launcher.plan.build import build
from tests.helpers.configs import launch_config, with_settings

ROOT = Path(__file__).resolve().parents[2]
SECTION = (
    (ROOT / "plugins" / "README.md").read_text().partition("## What goes together")[2].partition("\n## ")[0]
)
COLUMNS = ("parallel.zero_stage=1", "parallel.zero_stage=2", "parallel.zero_stage=3", "fusion.compile=block")
PEAKS = {"fp32": 1e12, "tf32": 2e12, "bf16": 4e12, "fp16": 4e12}
REASONS = {
    "a": "accumulates them over all of its microbatches",
    "b": "reduce-scatters gradients during the backward, and zb_h1 computes them after it",
    "c": "torch.compile cannot split a layer's backward, which zb_h1 needs",
    "d": "DeepSpeed keeps fp32 weights in the optimizer",
    "e": "DeepSpeed has no fp16 on the CPU",
    "f": "is a format of GPUs",
    "g": "has an effect only where DeepSpeed makes the update",
    "h": "is in the memory of the CPU already",
    "i": "from hooks that cannot be compiled",
    "j": "frees the norm's weights before selective recomputation needs them",
    "k": "lets the compiler decide what a layer computes again",
}
"""What the refusals that the table sums up really say."""
NEEDED = {
    "parallel.sequence_parallel": ("parallel.tp=2",),
    "parallel.num_chunks": ("parallel.pp=2", "parallel.schedule=interleaved_1f1b"),
}
"""What a row's setting has no meaning without."""


def rows() -> list[tuple[str, list[str]]]:
    """Settings and verdicts of every row."""
    lines = SECTION.partition("compile=block\n")[2].partition("\n\n")[0].splitlines()
    found = [line.split() for line in lines]
    return [(" ".join(words[:-4]), words[-4:]) for words in found]


CELLS = [
    (given, column, verdict)
    for given, verdicts in rows()
    for column, verdict in zip(COLUMNS, verdicts, strict=True)
]


def config_of(words: list[str]) -> Any:
    config = launch_config(
        parallel={"dp": 2}, device={"peak_flops": PEAKS}, report=ReportConfig(baseline="none", warmup_steps=1)
    )
    for word in words:
        path, _, value = word.partition("=")
        group, _, name = path.partition(".")
        if path == "precision":
            file = yaml.safe_load((ROOT / f"conf/precision/{value}.yaml").read_text())
            config = with_settings(config, {"precision": vars(PrecisionConfig(**file))})
        elif path == "device":
            config = with_settings(config, {"device": {"kind": value}})
        else:
            config = with_settings(config, {group: {name: yaml.safe_load(value)}})
    return config


def test_the_table_is_read() -> None:
    assert len(CELLS) == 4 * len(rows()) > 40
    assert {verdict for *_, verdict in CELLS} == {"yes", *REASONS}


def test_every_reason_is_explained() -> None:
    explained = re.findall(r"^    ([a-z])  \S", SECTION, re.MULTILINE)
    assert explained == sorted(REASONS)


@pytest.mark.parametrize(("given", "column", "verdict"), CELLS)
def test_every_cell_is_what_a_plan_says(given: str, column: str, verdict: str) -> None:
    words = given.split()
    needed = [word for setting in words for word in NEEDED.get(setting.partition("=")[0], ())]
    config = config_of([*needed, *words, column])
    if verdict == "yes":
        assert build(config).world_size >= 2
        return
    with pytest.raises(PlanError) as caught:
        build(config)
    assert any(REASONS[verdict] in str(fault) for fault in caught.value.faults)
