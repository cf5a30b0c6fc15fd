"""What a lab has becomes a trained model, by the commands of the page on recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launcher.app.trust import store
from launcher.cli.main import main
from tests.docs.pages import PAGES, files
from tests.docs.test_pages import write_documents
from tests.helpers.pretrained_folders import GPT_2
from tests.helpers.their_models import saved_by_them, their_logits

PAGE = PAGES["recipes"].read_text()


def test_documents_a_tokenizer_and_a_model_end_in_a_model_in_the_same_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    write_documents(tmp_path)
    saved_by_them(tmp_path / "base", GPT_2 | {"n_positions": 128, "vocab_size": 320}, std=0.02)
    (tmp_path / "afternoon.yaml").write_text(dict(files(PAGE))["afternoon.yaml"])
    store.remember([tmp_path.resolve()], [])
    lines = [line.strip() for line in PAGE.splitlines() if " afternoon.yaml" in line]
    shown = [line.split()[1:] for line in lines if line.startswith("trireme ") and "submit" not in line]
    assert [words[0] for words in shown] == ["data", "plan", "run"]
    for words in shown:
        extra = ["run.dir=trained"] if words[0] == "run" else []
        assert main([*words, *extra]) == 0, capsys.readouterr().err
    assert main(["export", "trained", "came-of-it"]) == 0, capsys.readouterr().err
    tokens = torch.arange(20).reshape(1, 20)
    before, after = (their_logits(tmp_path / name, tokens) for name in ("base", "came-of-it"))
    assert before.shape == after.shape
    assert not torch.allclose(before, after)
