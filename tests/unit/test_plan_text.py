"""How a plan reads. `python -m tests.unit.test_plan_text` writes the golden files anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.contract.site import SiteConfig
from launcher.plan.build import build
from launcher.plan.text import WIDTH, plan_text
from tests.helpers.configs import MIXED, launch_config

GOLDEN = Path(__file__).parents[1] / "golden"

ONE_RANK = launch_config(name="one_rank")
HYBRID = launch_config(
    name="hybrid",
    model={"vocab_size": 257, "tied_embeddings": True, "dropout": 0.1, "num_layers": 7},
    batch={"global_size": 16, "micro_size": 2},
    parallel={
        "dp": 2,
        "tp": 2,
        "pp": 2,
        "num_chunks": 2,
        "schedule": "interleaved_1f1b",
        "layers_per_stage": (1, 2, 2, 2),
        "sequence_parallel": True,
    },
    precision=MIXED,
)
TRILLION = launch_config(
    name="trillion",
    model={"name": "gpt_1t", "hidden_size": 25600, "num_layers": 128, "num_heads": 160, "vocab_size": 51200},
    batch={"global_size": 768, "micro_size": 1, "seq_length": 2048},
    parallel={"tp": 8, "pp": 64, "dp": 6, "recompute": "full"},
    precision=MIXED,
    device={"peak_flops": {"bf16": 312e12}},
    cluster={"nodes": 384},
)
SPLIT = launch_config(name="split", batch={"global_size": 8}, parallel={"pp": 4, "schedule": "zb_h1"})
PLANS = {"one_rank": ONE_RANK, "hybrid": HYBRID, "trillion": TRILLION, "split": SPLIT}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_reads_as_its_golden_file(name):
    assert plan_text(build(PLANS[name])) == golden(name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_fits_in_its_width(name):
    assert max(map(len, plan_text(build(PLANS[name])).splitlines())) <= WIDTH


def test_what_the_job_asks_for_and_what_surrounds_its_ranks_is_told_where_it_is_set():
    site = SiteConfig(
        time_limit="12:00:00",
        modules=("gcc/12", "cuda"),
        env={"NCCL_DEBUG": "WARN"},
        node_env={"PATH": "/opt/x:$PATH"},
        scratch="/tmp/$USER",
        forward=("LANG",),
        secrets=("WANDB_API_KEY",),
        container_image="/images/torch.sqsh",
        container_mounts=("/data:/data:ro", "/scratch:/scratch"),
    )
    text = plan_text(replace(build(ONE_RANK), config=replace(ONE_RANK, site=site)))
    assert text.partition("\nJob\n")[2].partition("\n\n")[0] == (
        "  time limit: 12:00:00\n"
        "  modules: gcc/12, cuda\n"
        "  environment: NCCL_DEBUG=WARN, PATH=/opt/x:$PATH, TMPDIR=/tmp/$USER\n"
        "  copied from where it is submitted: LANG, WANDB_API_KEY (secret)\n"
        "  container: /images/torch.sqsh\n"
        "  mounts: /data:/data:ro, /scratch:/scratch"
    )


def test_a_step_of_short_layers_is_told_as_a_lower_bound():
    plan = build(ONE_RANK)
    text = " ".join(plan_text(plan).split())
    assert text.count("at least ") == 2, "of a step, and of all steps"
    assert "Not counted: the start of operations, which layers as short as these (" in text


def test_a_step_of_long_layers_is_told_as_predicted():
    text = plan_text(build(TRILLION))
    assert " predicted: " in text
    assert "Not counted" not in text


def test_the_compute_format_is_shown_with_the_name_of_its_group_where_that_is_another():
    config = launch_config(precision=replace(MIXED, name="mine"))
    assert plan_text(build(config)).splitlines()[0].endswith(" parameters, mine (bf16)")


def test_devices_that_a_cpu_does_not_use_are_not_counted_in_figures_per_device():
    on_cpu = build(launch_config(parallel={"dp": 2}, device={"kind": "cpu"}))
    on_gpu = build(launch_config(parallel={"dp": 2}))
    assert "1 x 8 box, 2 used" in plan_text(on_cpu)
    assert (on_cpu.num_devices, on_gpu.num_devices) == (2, 8)


def test_samples_without_a_sequence_are_no_tokens():
    images, rows = (plan_text(build(launch_config(batch={"seq_length": length}))) for length in (1, 64))
    assert " dp 1;  16 samples per step\n" in images
    assert " samples/s, " in images
    assert "token" not in images
    assert " dp 1;  1,024 tokens per step (64 each)\n" in rows
    assert " tokens/s, " in rows


def test_colours_are_asked_for():
    plan = build(HYBRID)
    assert "\x1b[" not in plan_text(plan)
    assert "\x1b[1mMesh\x1b[0m\n" in plan_text(plan, color=True)


def test_a_stored_plan_reads_the_same():
    plan = build(HYBRID)
    assert plan_text(type(plan).from_json(plan.to_json())) == plan_text(plan)


def golden(name: str) -> Path:
    return GOLDEN / f"plan_{name}.txt"


if __name__ == "__main__":
    for name, config in PLANS.items():
        golden(name).write_text(plan_text(build(config)), encoding="utf-8")
