"""`trireme data` makes tokens once; `run`, `submit` and `plan` find them, and make those that are missing."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from launcher.app import data as data_module
from launcher.app.data import run_command
from launcher.app.launch import launch, submit
from launcher.app.output import Output
from launcher.app.planning import make_plan
from launcher.app.request import Request
from launcher.base.errors import ConfigError, LauncherError
from launcher.cli.main import run_verb
from launcher.contract.data.files import input_files
from launcher.contract.inputs.record import Inputs, write_inputs
from launcher.contract.inputs.text import blocks_per_file, file_digests
from launcher.runs.resume import changed_inputs
from tests.helpers.configs import SMALL_RUN
from tests.helpers.tokenizers import SENTENCES, write_hugging_face, write_sentencepiece
from tests.helpers.waiting import wait_until


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides of the quickstart: a folder of records and a tokenizer."""
    monkeypatch.chdir(tmp_path)
    tokenizer = write_hugging_face(tmp_path / "tokenizer.json", 280)
    texts = [sentence * (number % 5) for number, sentence in enumerate(SENTENCES * 20)]
    for number in range(2):
        some = texts[number::2]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in some)
        (tmp_path / f"{number}.jsonl").write_text(lines)
    return [
        *SMALL_RUN,
        *("data=text", f"data.source={tmp_path}/*.jsonl", f"data.tokenizer={tokenizer}"),
        *("model.vocab_size=280", f"data.cache_dir={tmp_path}/cache"),
    ]


def said(verb: str, words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run_verb(verb, words) == 0
    return capsys.readouterr().out


def planned(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a plan says, in one line."""
    return " ".join(said("plan", ["quickstart", *words], capsys).split())


def test_data_are_prepared_once_and_every_verb_finds_them(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "2 files, not prepared yet (trireme data prepare)" in planned(words, capsys)
    told = said("data", ["prepare", "quickstart", *words], capsys)
    assert re.search(
        r"\*\.jsonl: [\d.]+K tokens, [\d.]+K? seen: [\d.e-]+ epochs\ntokens: .*/cache/\.tokens-\d+\n", told
    )
    assert re.search(r"Data \S*\*\.jsonl: [\d.]+K tokens, ", planned(words, capsys))
    made = sorted(
        (path.name, path.stat().st_mtime_ns) for path in (tmp_path / "cache").glob(".tokens-*/*.bin")
    )
    said("data", ["prepare", "quickstart", *words], capsys)
    again = sorted(
        (path.name, path.stat().st_mtime_ns) for path in (tmp_path / "cache").glob(".tokens-*/*.bin")
    )
    assert made == again
    monkeypatch.setattr(data_module, "run_command", None)
    data_module.prepare_data(make_plan("quickstart", words).plan, Output())


def test_what_is_in_the_tokens_is_shown(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = said("data", ["show", "quickstart", *words], capsys)
    assert re.search(r"^data\.source: .*\*\.jsonl\n  2 files of [\d.]+ KB\n", told)
    assert re.search(r"\n  384 documents; [\d,]+ tokens, ids up to 2\d\d, as uint16\n", told)
    assert re.search(r"\n  0\.\d+ tokens per byte of its files\n", told)
    assert re.search(r"\n  an epoch: [\d,]+ tokens = [\d,]+ samples of 16 = [\d,.]+ steps of 4\n", told)
    assert "\n  wrong: 96 empty documents, left out\n" in told
    assert "\n  begins: '" in told
    assert "whether it is nobler" in told


def test_a_single_document_is_shown_as_one(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("to be")
    told = said("data", ["show", "quickstart", *words, f"data.source={tmp_path}/a.txt"], capsys)
    assert "\n  1 document; " in told


def test_what_is_wrong_with_ids_is_shown(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "ids.npy", np.arange(300, dtype=np.uint16))
    tokens = [*words, f"data.source={tmp_path}/ids.npy"]
    told = said("data", ["show", "quickstart", *tokens, "data.tokenizer=null"], capsys)
    assert "documents are not told apart; 300 tokens, ids up to 299, as uint16" in told
    assert "  wrong: the id 299, and ids of model.vocab_size are 0 to 279\n" in told
    assert "  begins: 0 1 2 3 4" in told
    told = said("data", ["show", "quickstart", *tokens], capsys)
    assert "  wrong: the id 299, and ids of data.tokenizer are 0 to 279\n" in told


def test_a_piece_of_every_tokenizer_is_decoded(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_sentencepiece(tmp_path / "sp.model")
    told = said("data", ["show", "quickstart", *words, f"data.tokenizer={model}"], capsys)
    assert "whether it is nobler" in told
    other = [f"data.eval_source={tmp_path}/0.jsonl", "data.tokenizer=bytes"]
    told = said("data", ["show", "quickstart", *words, *other], capsys)
    assert re.search(r"data\.eval_source: .*0\.jsonl\n", told)
    assert told.count("an epoch: ") == 1


def test_a_run_prepares_what_it_needs_and_says_so(words: list[str]) -> None:
    out = io.StringIO()
    more = ["train.num_steps=3", "train.eval_batches=1", "run.dir=run"]
    asked = Request(recipe="quickstart", overrides=(*words, *more), wants_baseline=False)
    ended = launch(asked, Output(out=out, err=out))
    assert ended.state.phase == "succeeded", out.getvalue()
    told = out.getvalue()
    assert re.search(r"^preparing [\d.]+ KB of data, once, for this run and later ones$", told, re.M)
    inputs = json.loads(Path("run/inputs.json").read_text())
    assert sorted(inputs["data"]) == ["0.jsonl", "1.jsonl", "tokenizer.json"]


def test_a_run_with_too_little_data_is_refused_once_it_is_prepared(words: list[str]) -> None:
    out = io.StringIO()
    asked = Request(recipe="quickstart", overrides=(*words, "batch.seq_length=60000", "run.dir=run"))
    with pytest.raises(
        ConfigError, match=r"batch\.global_size=4: needs as many samples, and the training part"
    ):
        launch(asked, Output(out=out, err=out))
    assert not Path("run").exists()


def test_a_tokenizer_that_has_changed_is_found_as_a_run_is_resumed(words: list[str], tmp_path: Path) -> None:
    plan, run = make_plan("quickstart", words).plan, tmp_path / "run"
    files = input_files(plan.config.data)
    digests = file_digests(files, blocks_per_file(files))
    run.mkdir()
    write_inputs(run, Inputs(data=digests, code={}, num_blocks=blocks_per_file(files)))
    assert changed_inputs(plan, run) == []
    write_hugging_face(tmp_path / "tokenizer.json", 270)
    (changed,) = changed_inputs(plan, run)
    assert changed.startswith("data tokenizer.json (")


def test_a_submission_prepares_too_but_not_what_is_in_a_container(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[str]] = []

    def noted(plan: object, settings: Sequence[str], *rest: object) -> None:
        asked.append(settings)
        raise LauncherError("as far as that")

    monkeypatch.setattr(data_module, "run_command", noted)
    out = Output(out=io.StringIO(), err=io.StringIO())
    overrides = (*words, "executor=slurm", "run.dir=run")
    with pytest.raises(LauncherError, match="as far as that"):
        submit(Request(recipe="quickstart", overrides=overrides, wants_baseline=False), out)
    assert asked == [["data.source"]]
    plan = make_plan("quickstart", [*overrides, "site.container_image=x"]).plan
    data_module.prepare_data(plan, out, is_here=False)
    assert asked == [["data.source"]]
    assert [*data_module.data_rows(plan)] == []


def test_a_sweep_prepares_before_its_first_point(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from launcher.app.sweep.run import run_sweep

    def refused(*given: object) -> None:
        raise LauncherError("as far as that")

    monkeypatch.setattr(data_module, "run_command", refused)
    out = Output(out=io.StringIO(), err=io.StringIO())
    asked = Request(recipe="quickstart", overrides=(*words, "parallel.pp=1", "optim.lr=1e-3,2e-3"))
    with pytest.raises(LauncherError, match="as far as that"):
        run_sweep(asked, out)
    assert not Path("runs").exists()


def test_data_of_a_users_own_are_not_prepared() -> None:
    plan = make_plan("quickstart", []).plan
    words = ["data=custom", "data.target=a.b:c", "site.container_image=x", "executor=slurm"]
    plan = make_plan("quickstart", words).plan
    with pytest.raises(
        ConfigError, match=r"data\.target=a\.b:c: is a dataset of your own, .*Name a recipe with"
    ):
        data_module.prepare_all(plan, Output(), {})


def test_a_source_that_cannot_be_read_is_a_fault_of_the_recipe(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "0.jsonl").write_text("no record\n")
    with pytest.raises(
        ConfigError, match=r"has at byte 0 a line that is no JSON object.*\[override data\.source"
    ):
        run_verb("data", ["prepare", "quickstart", *words])


def test_a_folder_that_cannot_be_written_is_told(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    blocked = [*words, f"data.cache_dir={tmp_path}/file"]
    with pytest.raises(
        LauncherError, match=r"could not be prepared: tokens cannot be written in .*Set data\.cac"
    ):
        run_verb("data", ["prepare", "quickstart", *blocked])


def test_a_process_that_ends_without_a_word_is_told(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_module, "_MODULE", "launcher.no_such_module")
    plan = make_plan("quickstart", words).plan
    with pytest.raises(LauncherError, match=r"could not be prepared: its process ended with status 1"):
        run_command(plan, ["data.source"], Output(), {})


def test_a_preparation_that_is_interrupted_leaves_no_process(words: list[str], tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": text * 500}) + "\n" for text in SENTENCES * 20)
    for number in range(12):
        (tmp_path / f"{number}.jsonl").write_text(lines)
    command = [sys.executable, "-m", "launcher", "data", "prepare", "quickstart", *words]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(lambda: any((tmp_path / "cache").glob(".tokens-*/*.tmp")), "a worker writes")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    wait_until(lambda: not working_in(tmp_path), "all processes have ended")
    assert not any((tmp_path / "cache").glob(".tokens-*/*.json"))


def working_in(folder: Path) -> list[str]:
    """The processes that have a file of the folder open."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith(str(folder)):
            found.append(target)
    return found
