import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.base.errors import LauncherError
from launcher.cli.main import run_verb
from launcher.contract.mesh import Mesh
from launcher.report.tables import ASCII, UNICODE, bar, speedup_text
from tests.helpers.fake_runs import CUDA, MS, FakeRun

PP2 = FakeRun(
    mesh=Mesh(pp=2, dp=1, tp=1),
    kinds_ms={
        0: {"compute": 40, "replicated": 4, "pipeline": 15, "model": 3, "other": 1},
        1: {"compute": 48, "replicated": 4, "pipeline": 9, "model": 1, "single_rank": 1},
    },
    header={"p2p_latency_ns": MS // 2},
    eval_loss=2.3101,
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    kinds = {0: {"compute": 90, "replicated": 8, "single_rank": 1, "other": 1}}
    return FakeRun(kinds_ms=kinds, eval_loss=2.31).write(tmp_path / "one")


@pytest.fixture
def run(tmp_path: Path, base: Path) -> Path:
    return PP2.write(tmp_path / "two", baseline=base)


REPORT = """\
Speedup of dp=1 tp=1 pp=2 1f1b against dp=1 tp=1 pp=1

  base      one (dp=1 tp=1 pp=1): 4 steps measured, 2 dropped (warm-up)
  run       two (dp=1 tp=1 pp=2 1f1b): 4 steps measured, 2 dropped (warm-up)
  constant  model tiny (1.00M parameters), data corpus, global batch 8, sequence length 16,
            precision fp32, device cpu
  repeats   1 run: no spread known
  scaling   strong: the same global batch of 8 on more devices

                       devices    step  tokens/s  speedup S  efficiency E
  -----------------------------------------------------------------------
  dp=1 tp=1 pp=1             1  100 ms     1.28K       1.00         100 %
  dp=1 tp=1 pp=2 1f1b        2   63 ms     2.03K       1.59          79 %

Where the missing devices went: 2 - 1.587 = 0.413 lost
  extra compute    -0.032  --                  forward and backward; less than in the base
  replicated        0.000                      optimizer and clipping, repeated by every replica
  single rank       0.000                      evaluation, checkpoint, log
  transfer          0.095  #####               data in flight
  peer wait         0.032  ##                  waiting for the slowest rank of a collective
  pipeline wait     0.317  ##################  waiting for another stage (the bubble, uneven stages)
  input wait        0.000                      waiting for the next batch
  other             0.000                      the rest of the step
  sum               0.413  = P - S = P (1 - E)

  serial fraction of the base's step (measured): 1.0 %; undivided, it limits S to 1.98 (Amdahl)
  serial fraction that would explain S alone (Karp-Flatt): 26.0 %
  bubble, idle / (idle + compute) of the pipeline: measured 20.0 %
    17.0 % by simulation with the measured time of every action
    predicted before the run: 20.0 % by formula, 25.0 % by simulation
  step: measured 63 ms; predicted 123 ms

  evaluation loss 2.3100 after 6 steps of one
  evaluation loss 2.3101 after 6 steps of two
"""


def test_report_reads_as_a_whole(run):
    assert speedup_text([run], None, width=100, ascii_only=True) == REPORT


def test_memory_of_the_fullest_rank_stands_beside_what_was_predicted(run):
    for rank, states in enumerate((700_000, 900_000)):
        with (run / "metrics" / f"rank-{rank:05d}.jsonl").open("a") as file:
            file.write(f'{{"type":"memory","step":6,"states_bytes":{states},"peak_bytes":5000000}}\n')
    text = speedup_text([run], None, width=100, ascii_only=True)
    assert (
        "  held by rank 1 at the update: measured 900 KB; "
        "predicted 16.0 MB of weights, gradients and optimizer\n"
        "  memory of rank 1 at most: measured 5.00 MB (growth of the whole process); predicted 20.5 MB\n"
    ) in text


def test_bars_are_drawn_in_eighths_where_the_encoding_allows(run):
    assert "transfer          0.095  █████▍  " in speedup_text([run], None, width=100, ascii_only=False)


def test_report_without_a_base_shows_where_the_device_time_went(base):
    text = speedup_text([base], None, width=100, ascii_only=True)
    assert text.startswith("Throughput of dp=1 tp=1 pp=1 (no speedup)\n")
    assert "names no baseline; give one with --base" in " ".join(text.split())
    assert "  compute           0.900  ##################  forward and backward\n" in text
    assert "  sum               1.000  = P\n" in text
    assert "speedup S" not in text
    assert "Amdahl" not in text


def test_idle_devices_have_their_own_row(tmp_path):
    base = FakeRun(config=CUDA).write(tmp_path / "base")
    run = FakeRun(mesh=PP2.mesh, kinds_ms=PP2.kinds_ms, num_devices=4, config=CUDA).write(tmp_path / "idle")
    text = speedup_text([run], base, width=100, ascii_only=True)
    assert "  not training      2.000  ##################  allocated, but no trainer rank\n" in text


def test_repeats_show_the_spread_over_runs(tmp_path, base):
    paths = [
        FakeRun(mesh=Mesh(pp=1, dp=2, tp=1), kinds_ms={rank: {"compute": ms} for rank in (0, 1)}).write(
            tmp_path / f"r{ms}"
        )
        for ms in (50, 80, 62)
    ]
    text = speedup_text(paths, base, width=100, ascii_only=True)
    assert "repeats   dp=2 tp=1 pp=1: the median of 3 runs is shown, S from 1.25 to 2.00\n" in text
    assert "Where the missing devices (median run r62) went: 2 - 1.613 = 0.387 lost" in text


def test_samples_without_a_sequence_are_counted_as_samples(tmp_path):
    images = {"batch": {"seq_length": 1}}
    paths = [
        FakeRun(kinds_ms={0: {"compute": ms}}, config=images).write(tmp_path / f"r{ms}") for ms in (50, 80)
    ]
    text = speedup_text(paths, None, width=100, ascii_only=True)
    assert "samples/s" in text
    assert "token" not in text
    assert "sequence length" not in text


def test_repeats_without_a_base_show_the_spread_of_the_throughput(tmp_path):
    paths = [FakeRun(kinds_ms={0: {"compute": ms}}).write(tmp_path / f"r{ms}") for ms in (50, 80)]
    text = speedup_text(paths, None, width=100, ascii_only=True)
    assert "the median of 2 runs is shown, 1.60K to 2.56K tokens/s\n" in text


def test_run_slower_than_its_base_has_no_serial_fraction(tmp_path):
    base = FakeRun(kinds_ms={0: {"compute": 50}}).write(tmp_path / "base")
    run = FakeRun(mesh=PP2.mesh, kinds_ms=PP2.kinds_ms).write(tmp_path / "run")
    text = speedup_text([run], base, width=100, ascii_only=True)
    assert "  slower than the base: no serial fraction explains that (Karp-Flatt above 100 %)\n" in text


def test_every_layout_has_its_own_ledger(tmp_path, base, run):
    tp2 = FakeRun(mesh=Mesh(pp=1, dp=1, tp=2), kinds_ms={0: {"compute": 60}, 1: {"compute": 60}})
    text = speedup_text([run, tp2.write(tmp_path / "tp")], base, width=100, ascii_only=True)
    assert re.findall(r"Where the missing devices of (.*) went", text) == [
        "dp=1 tp=1 pp=2 1f1b",
        "dp=1 tp=2 pp=1",
    ]


@pytest.mark.parametrize(
    ("global_size", "text"),
    [
        (16, "weak: the same batch per device (8 -> 16 samples per step); S is per token, not per step"),
        (12, "neither strong nor weak (8 -> 12 samples per step): a comparison per token"),
    ],
)
def test_scaling_other_than_strong_is_labelled(tmp_path, base, global_size, text):
    run = FakeRun(mesh=PP2.mesh, kinds_ms=PP2.kinds_ms, global_size=global_size).write(tmp_path / "run")
    report = speedup_text([run], base, width=100, ascii_only=True)
    assert f"  scaling   {text}\n" in report
    assert "global batch" not in report
    assert "Amdahl" not in report


def test_report_fits_a_hundred_columns(tmp_path, base):
    layout = {"schedule": "interleaved_1f1b", "num_chunks": 2}
    run = FakeRun(
        mesh=PP2.mesh,
        kinds_ms=PP2.kinds_ms,
        config={"parallel": layout},
        header={"num_cores": 1, "torch_version": "2.7"},
        exact=False,
    ).write(tmp_path / "a-rather-long-name-of-a-run-20260101-120000")
    text = speedup_text([run], base, width=100, ascii_only=True)
    assert "Notes\n" in text
    assert max(map(len, text.splitlines())) <= 100


def test_names_cannot_write_to_the_terminal(tmp_path):
    run = FakeRun().write(tmp_path / "evil\x1b[31m\nname")
    text = speedup_text([run], None, width=100, ascii_only=True)
    assert "  run       evil?[31m?name (dp=1" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("value", "style", "drawn"),
    [
        (1.0, UNICODE, "█" * 18),
        (0.01, UNICODE, "▏"),
        (0.5, ASCII, "#" * 9),
        (-0.5, UNICODE, "░" * 9),
        (0.0, UNICODE, ""),
    ],
)
def test_bars_are_proportional(value, style, drawn):
    assert bar(value, 1.0, style) == drawn


def test_bars_of_nothing_are_empty():
    assert bar(0.0, 0.0, UNICODE) == ""


@pytest.mark.parametrize(("encoding", "rule"), [("utf-8", "──"), ("ascii", "--"), ("latin-1", "--")])
def test_characters_follow_the_encoding_of_stdout(monkeypatch, base, encoding, rule):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert f"  {rule}" in speedup_text([base], None, width=100)


def test_verb_prints_the_report(capsys, run):
    assert run_verb("report", [str(run)]) == 0
    assert capsys.readouterr().out.startswith("Speedup of dp=1 tp=1 pp=2 1f1b against dp=1 tp=1 pp=1\n")


def test_verb_takes_a_base(capsys, tmp_path, run, base):
    other = FakeRun(kinds_ms={0: {"compute": 126}}).write(tmp_path / "other")
    assert run_verb("report", [str(run), "--base", str(other)]) == 0
    assert "went: 2 - 2.000 = 0.000 lost" in capsys.readouterr().out


def test_verb_prints_json(capsys, run):
    assert run_verb("report", [str(run), "--json"]) == 0
    assert capsys.readouterr().out.startswith('{\n "bases": [')


def test_verb_without_a_run_says_what_to_give():
    with pytest.raises(
        LauncherError, match=r"no run given\. Give at least one run directory: trireme report RUN"
    ):
        run_verb("report", [])


def test_verb_names_the_nearest_flag():
    with pytest.raises(LauncherError, match=r"unknown flag --bas\. Did you mean --base\?"):
        run_verb("report", ["runs/a", "--bas", "runs/b"])


def loaded_by(module):
    """What importing a module brings in of torch, hydra, and the code that predicts."""
    code = (
        f"import sys, {module}\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'hydra', 'yaml', 'numpy')\n"
        "       or name.startswith('launcher.plan.')\n"
        "       or name == 'launcher.schedule.simulate'])"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_what_measures_does_not_import_what_predicts():
    assert loaded_by("launcher.metrics.read, launcher.metrics.blocked_time, launcher.report.ledger") == "[]\n"


def test_the_report_predicts_nothing_itself_but_replays_what_was_measured():
    assert loaded_by("launcher.cli.runs.results") == "['launcher.schedule.simulate']\n"


def test_a_base_of_several_devices_counts_as_that_many(tmp_path):
    two = FakeRun(mesh=Mesh(pp=1, dp=2, tp=1), kinds_ms={rank: {"compute": 50} for rank in range(2)})
    base, run = two.write(tmp_path / "base"), two.write(tmp_path / "run")
    rows = [line for line in speedup_text([run], base, width=100).splitlines() if line.startswith("  dp=2")]
    assert [row.split()[-3:] for row in rows] == [["2.00", "100", "%"]] * 2


def test_runs_and_their_base_are_found_by_their_names_below_runs(tmp_path, base, run, monkeypatch, capsys):
    (tmp_path / "runs").mkdir()
    base.rename(tmp_path / "runs" / "one")
    run.rename(tmp_path / "runs" / "two")
    monkeypatch.chdir(tmp_path)
    assert run_verb("report", ["two", "--base", "one"]) == 0
    assert "base      one (" in capsys.readouterr().out
