"""The vocabulary of a tokenizer is read from its file, without its library, before anything is planned."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as Library

from launcher.app.planning import make_plan
from launcher.base.errors import ConfigError
from launcher.contract.data import files, tokenizer
from launcher.contract.data.samples import sources_tokens
from launcher.contract.data.tokenizer import read_tokenizer
from launcher.plan.rules.checks import config_faults
from launcher.typed.read import NO_SOURCES
from tests.helpers.contexts import make_config
from tests.helpers.tokenizers import END, write_hugging_face, write_sentencepiece


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hugging_face(tmp_path_factory.mktemp("hf") / "tokenizer.json")


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentencepiece(tmp_path_factory.mktemp("sp") / "sp.model")


def found(path: object, **settings: Any) -> Any:
    return read_tokenizer(make_config(data={"tokenizer": str(path), **settings}).data)


def test_a_tokenizer_json_has_the_ids_that_its_library_has(hugging_face: Path) -> None:
    library = Library.from_file(str(hugging_face))
    assert found(hugging_face).num_ids == library.get_vocab_size()
    assert found(hugging_face).end_id == library.token_to_id(END)


def test_a_sentencepiece_model_has_the_ids_that_its_library_has(sentencepiece: Path) -> None:
    library = SentencePieceProcessor(model_file=str(sentencepiece))
    assert found(sentencepiece).num_ids == library.vocab_size()
    assert found(sentencepiece).end_id == library.eos_id()


def test_a_vocabulary_in_order_and_added_tokens_count(tmp_path: Path) -> None:
    content = {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": [{"content": "</s>", "id": 7}]}
    (tmp_path / "t.json").write_text(json.dumps(content))
    assert (found(tmp_path / "t.json").num_ids, found(tmp_path / "t.json").end_id) == (8, 7)


def test_another_end_of_a_document_may_be_named_or_none(hugging_face: Path) -> None:
    library = Library.from_file(str(hugging_face))
    assert found(hugging_face, end_of_document="!").end_id == library.token_to_id("!")
    assert found(hugging_face, end_of_document=None).end_id is None


def test_another_content_has_another_digest(hugging_face: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer.json"
    other.write_bytes(hugging_face.read_bytes() + b"\n")
    assert found(other).sha256 != found(hugging_face).sha256
    assert replace(found(other), sha256="") == replace(found(hugging_face), sha256="")


WRONG = {
    "a.json": (b"{}", "it holds no model.vocab"),
    "b.json": (b"[" * 100_000, "it holds no model.vocab"),
    "c.json": (b'{"model": {"vocab": {"a": -1}}}', "the ids of its vocabulary are not whole numbers"),
    "d.json": (b'{"model": {"vocab": {}}}', "it has no vocabulary"),
    "e.model": (b"\xff" * 20, "it is no SentencePiece model"),
    "f.model": (b"\x0a\x7f", "it is no SentencePiece model"),
    "g.model": (b"\x0b", "it is no SentencePiece model"),
    "h.model": (b"\x10\x05\x1d1234\x1912345678", "it has no vocabulary"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_no_tokenizer_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(WRONG[name][0])
    expected = re.escape(f"cannot be read as the file of a tokenizer: {WRONG[name][1]}. Give bytes, a tok")
    with pytest.raises(ConfigError, match=expected):
        found(tmp_path / name)


def test_a_file_too_large_to_be_one_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_bytes(b" " * 11)
    monkeypatch.setattr(tokenizer, "_MAX_BYTES", 10)
    with pytest.raises(ConfigError, match=r"it has 11 bytes, and 10 is the most that is read"):
        found(tmp_path / "a.json")


def test_an_end_of_documents_that_is_not_there_is_refused(hugging_face: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"end_of_document=<x>: .*tokenizer\.json has no such token\. Give"):
        found(hugging_face, end_of_document="<x>")
    (tmp_path / "t.json").write_text('{"model": {"vocab": {"a": 0}}}')
    with pytest.raises(ConfigError, match=r"=auto: .* none of the tokens that usually end a document\. Give"):
        found(tmp_path / "t.json")
    with pytest.raises(
        ConfigError, match=r"end_of_document=x: data\.tokenizer=bytes has no token but the 256"
    ):
        found("bytes", end_of_document="x")


# In a plan


def test_a_model_with_fewer_rows_than_the_tokenizer_has_ids_is_refused(hugging_face: Path) -> None:
    number = Library.from_file(str(hugging_face)).get_vocab_size()
    words = ["data=text", "data.source=no/file", f"data.tokenizer={hugging_face}"]
    expected = rf"vocab_size=256: data\.tokenizer has {number} different .*Set model\.vocab_size={number}\."
    with pytest.raises(ConfigError, match=expected):
        make_plan("quickstart", words)
    planned = make_plan("quickstart", [*words, f"model.vocab_size={number}"])
    assert planned.plan.config.data.tokenizer == str(hugging_face)


def test_a_tokenizer_that_is_on_another_machine_can_be_planned_with() -> None:
    make_plan("quickstart", ["data.tokenizer=/of/another/machine/tokenizer.json"])


def test_weights_are_those_of_a_list_of_sources() -> None:
    def faults(**data: Any) -> list[str]:
        config = make_config(data=data, model={"vocab_size": 256})
        return [str(fault) for fault in config_faults(config, NO_SOURCES)]

    assert faults(source=("a", "b"), weights=(1.0, 2.0)) == []
    assert faults(source="a", weights=(1.0,)) == [
        "data.weights=[1.0]: is about a list of sources. Remove data.weights."
    ]
    assert faults(source=("a", "b"), weights=(1.0,)) == [
        "data.weights=[1.0]: a blend of 2 sources has as many weights. Set 'data.weights=[1,1]'."
    ]
    assert faults(source=()) == ["data.source=[]: names no source. Name at least one."]
    assert faults(source=("a", "b"), weights=(1.0, 1e-5)) == [
        "data.weights=[1.0, 1e-05]: one of them is below 1/10,000 of their sum, to which they are kept. "
        "Leave its source out, or give it more."
    ]


# As files are looked at


def refused(source: Path, **data: Any) -> str:
    settings = {"source": str(source), "cache_dir": str(source.parent / "cache"), **data}
    with pytest.raises(ConfigError) as caught:
        sources_tokens(make_config(data=settings))
    return str(caught.value)


def test_what_the_tokenizer_does_not_read_is_refused(tmp_path: Path, hugging_face: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.bin").write_bytes(b"\0\0")
    assert refused(tmp_path / "a.txt", tokenizer=None).endswith(
        "a.txt holds no token ids (.bin, .npy), and data.tokenizer=null reads nothing else. "
        "Set data.tokenizer to bytes or to the file of a tokenizer."
    )
    assert refused(tmp_path / "a.bin").endswith(
        "a.bin holds token ids, and data.tokenizer=bytes makes them of text. "
        "Set data.tokenizer=null, or to the file of the tokenizer that they are from."
    )
    found = sources_tokens(make_config(data={"source": f"{tmp_path}/a.*", "tokenizer": str(hugging_face)}))
    assert found[0].num_tokens is None


def test_settings_that_no_file_needs_are_refused(tmp_path: Path, hugging_face: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    np.save(tmp_path / "a.npy", np.array([0], dtype=np.uint16))
    expected = "no file of the sources is .jsonl or .parquet. Set data.text_field=text."
    assert refused(tmp_path / "a.txt", text_field="body").endswith(expected)
    expected = "the sources hold token ids already. Set data.end_of_document=auto."
    settings = {"tokenizer": str(hugging_face), "end_of_document": "!"}
    assert refused(tmp_path / "a.npy", **settings).endswith(expected)
    expected = "no file of the sources is a .bin without .idx. Set data.bin_format=uint16."
    assert refused(tmp_path / "a.npy", tokenizer=None, bin_format="uint32").endswith(expected)


@pytest.mark.parametrize("package", ["tokenizers", "sentencepiece", "zstandard", "pyarrow"])
def test_a_library_that_is_missing_is_named_with_the_command(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hugging_face: Path, sentencepiece: Path
) -> None:
    name = {"zstandard": "a.jsonl.zst", "pyarrow": "a.parquet"}.get(package, "a.jsonl")
    (tmp_path / name).write_text('{"text": "x"}\n')
    chosen = {"tokenizers": str(hugging_face), "sentencepiece": str(sentencepiece)}.get(package, "bytes")
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    expected = f"needs the package {package}, which is not installed here. Run `pip install {package}`."
    assert expected in refused(tmp_path / name, tokenizer=chosen)


def test_ids_above_the_vocabulary_of_the_model_are_refused_once_they_were_looked_at(tmp_path: Path) -> None:
    from launcher.contract.data.samples import text_faults
    from launcher.runtime.tokens.prepare import prepare
    from tests.helpers.plans import staged_plan

    (tmp_path / "a.bin").write_bytes(bytes(2 * 5000) + b"\x2c\x01")
    data = {"source": str(tmp_path / "a.bin"), "tokenizer": None, "cache_dir": str(tmp_path / "cache")}
    config = make_config(data=data, model={"vocab_size": 256})
    plan = staged_plan(config)
    assert text_faults(config, plan.batch) == []
    prepare(config.data, "data.source", "runs", print)
    (fault,) = text_faults(config, plan.batch)
    assert str(fault) == (
        f"model.vocab_size=256: {tmp_path}/a.bin holds the id 300, and ids are 0 to 255. "
        "Set model.vocab_size=301."
    )


def test_a_damaged_token_file_is_told_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"odd")
    expected = "no whole number of ids of 2 bytes. Name files that hold what their names say."
    assert refused(tmp_path / "a.bin", tokenizer=None).endswith(expected)
