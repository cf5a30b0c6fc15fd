"""What only a GPU can show: equality over NCCL, and a clock that reads CUDA events."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("cuda")
STEPS = "train.num_steps=4"
SMALL = ("device=h100", "batch.global_size=8", "batch.seq_length=64", "train.eval_batches=0", STEPS)


def num_gpus() -> int:
    import torch  # only where a GPU is: elsewhere the tests are skipped without this cost

    return torch.cuda.device_count()


def losses(tmp_path: Path, name: str, *overrides: str) -> list[float]:
    """Trains through the command line; the losses of every step."""
    run_dir = tmp_path / name
    words = ("run", "quickstart", *SMALL, f"run.dir={run_dir}", *overrides, "--no-baseline")
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *words], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for path in (run_dir / "metrics").glob("*.jsonl") for line in path.read_text().splitlines()]
    records = [json.loads(line) for line in lines]
    found = {r["step"]: r["loss"] for r in records if r["type"] == "step" and r["loss"] is not None}
    assert all(sum(r["kinds_ns"].values()) == r["duration_ns"] for r in records if r["type"] == "step")
    return [found[step] for step in sorted(found)]


@pytest.mark.parametrize(
    ("num", "layout"),
    [
        (2, ("parallel.dp=2", "parallel.pp=1")),
        (2, ("parallel.tp=2", "parallel.pp=1")),
        (2, ("parallel.tp=2", "parallel.pp=1", "parallel.sequence_parallel=true")),
        (2, ("parallel.pp=2",)),
        (2, ("parallel.pp=2", "parallel.num_chunks=2", "parallel.schedule=interleaved_1f1b")),
        (4, ("parallel.pp=4", "parallel.schedule=gpipe")),
        (1, ("parallel.pp=1", "parallel.schedule=zb_h1")),
        (2, ("parallel.pp=2", "parallel.schedule=zb_h1")),
        (2, ("parallel.pp=2", "parallel.schedule=zb_h1", "parallel.recompute=full")),
        (4, ("parallel.dp=2", "parallel.pp=2", "parallel.schedule=zb_h1")),
        (4, ("parallel.tp=2", "parallel.pp=2", "parallel.schedule=zb_h1")),
        *(
            (2, ("parallel.dp=2", "parallel.pp=1", f"parallel.zero_stage={stage}", *offload))
            for stage in (1, 2, 3)
            for offload in ((), ("parallel.zero_offload=true",))
        ),
        (4, ("parallel.dp=2", "parallel.pp=2", "parallel.zero_stage=1")),
        (8, ("parallel.dp=2", "parallel.tp=2", "parallel.pp=2")),
        *(
            (2, ("parallel.dp=2", "parallel.pp=1", "architecture=parameter_server", *options))
            for options in (
                (),
                ("optim.clip_norm=null",),
                ("architecture.servers=2", "architecture.overlap=false"),
            )
        ),
    ],
    ids=str,
)
def test_a_layout_over_nccl_has_the_losses_of_one_gpu(
    num: int, layout: tuple[str, ...], tmp_path: Path
) -> None:
    if num_gpus() < num:
        pytest.skip(f"{num} GPUs are needed")
    alone = losses(tmp_path, "alone", "parallel.pp=1")
    assert losses(tmp_path, "spread", *layout) == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("precision", ["tf32", "bf16", "bf16_pure", "fp16"])
def test_mixed_precision_stays_near_fp32(precision: str, tmp_path: Path) -> None:
    fp32 = losses(tmp_path, "fp32", "parallel.pp=1")
    assert losses(tmp_path, precision, "parallel.pp=1", f"precision={precision}") == pytest.approx(
        fp32, rel=2e-2
    )


@pytest.mark.parametrize(
    "fusion", ["optimizer=foreach", "optimizer=loop", "attention=plain", "compile=block"]
)
def test_every_choice_of_kernels_has_the_losses_of_the_default(fusion: str, tmp_path: Path) -> None:
    default = losses(tmp_path, "default", "parallel.pp=1")
    chosen = ("parallel.pp=1", f"fusion.{fusion}", "report.warmup_steps=1")  # of four steps, one compiles
    assert losses(tmp_path, "chosen", *chosen) == pytest.approx(default, rel=1e-4)


def test_fp32_products_are_rounded_only_where_tf32_is_asked_for() -> None:
    import torch

    from launcher.runtime.process.rank import set_tf32

    torch.manual_seed(0)
    one, other = (torch.randn(1024, 1024, device="cuda") for _ in range(2))
    exact = (one.double() @ other.double()).float()
    errors = {}
    for is_allowed in (False, True):
        set_tf32(is_allowed=is_allowed)
        errors[is_allowed] = float((one @ other - exact).abs().max() / exact.abs().max())
    set_tf32(is_allowed=False)
    assert errors[False] < 1e-5
    has_tf32 = torch.cuda.get_device_capability() >= (8, 0)
    assert errors[True] > 10 * errors[False] if has_tf32 else errors[True] == errors[False]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_mixed_precision_with_split_states_stays_near_fp32(
    precision: str, stage: int, tmp_path: Path
) -> None:
    if num_gpus() < 2:
        pytest.skip("2 GPUs are needed")
    fp32 = losses(tmp_path, "fp32", "parallel.pp=1")
    split = ("parallel.dp=2", "parallel.pp=1", f"parallel.zero_stage={stage}", f"precision={precision}")
    assert losses(tmp_path, precision, *split) == pytest.approx(fp32, rel=2e-2)


def test_the_clock_measures_the_device_and_not_the_host() -> None:
    import torch

    from launcher.contract.records import COMPUTE
    from launcher.runtime.measure.clock import Clock

    device = torch.device("cuda", 0)
    big = torch.randn(8192, 8192, device=device)
    clock = Clock(device)
    clock.start()
    for _ in range(2):  # the second step begins with the last event of the first
        with clock.action():
            for _ in range(20):
                big @ big  # returns at once; the device works on
        times = clock.lap()
    assert times["kinds_ns"][COMPUTE] > 20e6
    assert sum(times["kinds_ns"].values()) == times["duration_ns"]


def test_a_gpu_is_held_to_a_smaller_memory() -> None:
    import torch

    from launcher.runtime.measure.memory import limit_memory
    from launcher.runtime.process.main import is_out_of_memory

    device = torch.device("cuda", 0)
    limit_memory(device, torch.cuda.memory_reserved(device) + 2**30)
    try:
        torch.empty(2**29, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(2**31, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert is_out_of_memory(caught.value)
