"""Every kind of source becomes the tokens that the libraries themselves make of it."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer

from launcher.base.errors import ConfigError, LauncherError
from launcher.contract.data.config import DataConfig
from launcher.runtime.data.tokens import open_tokens
from launcher.runtime.tokens import prepare, shards
from launcher.runtime.tokens.indexed import PairWriter
from tests.helpers.contexts import make_config
from tests.helpers.tokenizers import END, write_hugging_face, write_sentencepiece

TEXTS = ["to be or not to be", "a line\nand an é", "", "that is the question " * 40]
FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return write_hugging_face(folder / "tokenizer.json"), write_sentencepiece(folder / "sp.model")


def data_of(source: object, **settings: Any) -> DataConfig:
    folder = Path(str(source)).parent
    return make_config(data={"source": str(source), "cache_dir": str(folder / "cache"), **settings}).data


def ids_of(source: object, **settings: Any) -> list[int]:
    tokens = open_tokens(data_of(source, **settings), "data.source", "runs")
    return [*map(int, tokens.read(0, len(tokens)))]


def records(texts: list[str], field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, field: text}).encode() + b"\n" for text in texts)


def write_parquet(path: Path, texts: list[str], field: str = "text") -> None:
    pq.write_table(pa.table({"id": [1] * len(texts), field: texts}), path, row_group_size=2)


# Text, records, columns


WRITERS: dict[str, Callable[[Path, list[str]], Any]] = {
    "a.jsonl": lambda path, texts: path.write_bytes(records(texts)),
    "a.jsonl.gz": lambda path, texts: path.write_bytes(gzip.compress(records(texts))),
    "a.jsonl.zst": lambda path, texts: path.write_bytes(
        b"".join(zstandard.compress(records(part)) for part in (texts[:2], texts[2:]))
    ),
    "a.parquet": write_parquet,
}


@pytest.mark.parametrize("name", WRITERS)
def test_documents_are_tokenised_as_by_the_library_each_with_its_end(
    name: str, tmp_path: Path, tokenizers: tuple[Path, Path]
) -> None:
    WRITERS[name](tmp_path / name, TEXTS)
    library = Tokenizer.from_file(str(tokenizers[0]))
    library.no_truncation()
    end = library.token_to_id(END)
    expected = [i for text in TEXTS if text for i in [*library.encode(text).ids, end]]
    assert ids_of(tmp_path / name, tokenizer=str(tokenizers[0])) == expected


def test_sentencepiece_tokenises_as_by_the_library(tmp_path: Path, tokenizers: tuple[Path, Path]) -> None:
    (tmp_path / "a.jsonl").write_bytes(records(TEXTS))
    library = SentencePieceProcessor(model_file=str(tokenizers[1]))
    expected = [i for text in TEXTS if text for i in [*library.encode(text), library.eos_id()]]
    assert ids_of(tmp_path / "a.jsonl", tokenizer=str(tokenizers[1])) == expected


def test_a_text_file_is_a_document(tmp_path: Path, tokenizers: tuple[Path, Path]) -> None:
    for name, text in (("a.txt", "to be\nor not"), ("b.txt", "that")):
        (tmp_path / name).write_text(text)
    library = Tokenizer.from_file(str(tokenizers[0]))
    library.no_truncation()
    end = library.token_to_id(END)
    expected = [*library.encode("to be\nor not").ids, end, *library.encode("that").ids, end]
    assert ids_of(tmp_path / "*.txt", tokenizer=str(tokenizers[0])) == expected


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1, 2 << 20])
def test_a_text_of_any_size_is_a_document_with_its_end(
    size: int, tmp_path: Path, tokenizers: tuple[Path, Path]
) -> None:
    """Such as the pieces that ``split --bytes=1M`` makes."""
    (tmp_path / "a.txt").write_bytes(b"a" * size)
    data = data_of(tmp_path / "a.txt", tokenizer=str(tokenizers[0]))
    (part,) = prepare.prepare(data, "data.source", "runs", print).parts
    assert (part.num_documents, part.num_empty, part.num_tokens) == (1, 0, size + 1)


@pytest.mark.parametrize("size", ["'a'", "4.0", "-1"])
def test_an_array_whose_size_is_no_number_is_refused(size: str, tmp_path: Path) -> None:
    header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': ({size},)}}".encode()
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    (tmp_path / "a.npy").write_bytes(content + bytes(8))
    expected = rf"a\.npy is an array of {size} ids, which is no size"
    with pytest.raises(ConfigError, match=expected):
        ids_of(tmp_path / "a.npy", tokenizer=None)


def test_a_file_of_no_row_holds_no_token(tmp_path: Path) -> None:
    pq.ParquetWriter(tmp_path / "a.parquet", pa.schema([("text", pa.string())])).close()
    found = prepare.prepare(data_of(tmp_path / "a.parquet"), "data.source", "runs", print)
    assert (found.num_tokens, found.highest) == (0, -1)


@pytest.mark.parametrize(
    ("name", "content", "package"),
    [
        ("a.json", b'{"model": {"vocab": {"a": 0, "</s>": 1}}}', "tokenizers"),
        ("a.model", b"\n\x06\n\x04</s>", "sentencepiece"),
    ],
)
def test_a_tokenizer_that_its_library_does_not_read_is_named(
    name: str, content: bytes, package: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("to be")
    (tmp_path / name).write_bytes(content)
    expected = rf"^data\.tokenizer=.*{name}: the package {package} cannot read it: .*Correct it, or install"
    with pytest.raises(ConfigError, match=expected):
        ids_of(tmp_path / "a.txt", tokenizer=str(tmp_path / name))


def test_bytes_of_records_end_with_zero_and_those_of_texts_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(records(["ab", "é"]))
    (tmp_path / "b.txt").write_bytes(b"c\xff")
    (tmp_path / "c.txt").write_bytes(b"d")
    assert bytes(ids_of(tmp_path / "*.*")) == "ab\0é\0".encode() + b"c\xffd"
    assert bytes(ids_of(tmp_path / "*.jsonl", end_of_document=None)) == "abé".encode()


def test_another_field_and_another_end_may_be_named(tmp_path: Path, tokenizers: tuple[Path, Path]) -> None:
    (tmp_path / "a.jsonl").write_bytes(records(["to be"], "content"))
    settings = {"tokenizer": str(tokenizers[0]), "text_field": "content"}
    library = Tokenizer.from_file(str(tokenizers[0]))
    library.no_truncation()
    ids = library.encode("to be").ids
    assert ids_of(tmp_path / "a.jsonl", **settings, end_of_document=None) == ids
    assert ids_of(tmp_path / "a.jsonl", **settings, end_of_document="!") == [*ids, library.token_to_id("!")]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet"])
def test_shards_of_many_cores_hold_what_one_holds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut at any byte, within lines and characters."""
    texts = [f"é{number}\n" * (number % 7) for number in range(40)]
    if name == "a.txt":
        (tmp_path / name).write_text("".join(texts))
    else:
        WRITERS[name](tmp_path / name, texts)
    whole = ids_of(tmp_path / name)
    made: list[str] = []
    for size in (17, 64):
        monkeypatch.setattr(shards, "_SMALLEST", size)
        monkeypatch.setattr(shards, "_NUM_SHARDS", 10**9)
        monkeypatch.setattr(prepare, "in_all_cores", lambda *given: _alone(made, *given))
        cache = {"cache_dir": str(tmp_path / f"cache-{size}")}
        assert ids_of(tmp_path / name, **cache) == whole
    assert len(made) > 20
    found = prepare.prepare(data_of(tmp_path / name, **cache), "data.source", "runs", print)
    if name != "a.parquet":  # of which the bytes are those of the columns, unpacked
        assert sum(part.num_source_bytes for part in found.parts) == (tmp_path / name).stat().st_size


def _alone(made: list[str], work: Callable[[Any], Any], items: Any) -> Any:
    for item in items:
        made.append(item.name)
        yield item, work(item)


def test_a_shard_that_leaves_out_a_range_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(records(TEXTS))
    whole = ids_of(tmp_path / "a.jsonl")
    monkeypatch.setattr(shards, "_SMALLEST", 100)
    cut = shards.shards_of
    monkeypatch.setattr(prepare, "shards_of", lambda *given: cut(*given)[1:])
    assert ids_of(tmp_path / "a.jsonl", cache_dir=str(tmp_path / "other")) != whole


def test_a_long_text_is_cut_between_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizers: tuple[Path, Path]
) -> None:
    from launcher.runtime.tokens import documents

    (tmp_path / "a.txt").write_text("é" * 1000)
    monkeypatch.setattr(documents, "_CHUNK", 101)
    library = Tokenizer.from_file(str(tokenizers[0]))
    found = ids_of(tmp_path / "a.txt", tokenizer=str(tokenizers[0]), end_of_document=None)
    assert library.decode(found) == "é" * 1000


def test_cores_share_the_work_and_it_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizers: tuple[Path, Path]
) -> None:
    monkeypatch.setattr(shards, "_SMALLEST", 400)
    monkeypatch.setattr(shards, "_NUM_SHARDS", 2)
    (tmp_path / "a.jsonl").write_bytes(records(TEXTS * 2))
    expected = ids_of(tmp_path / "a.jsonl", tokenizer=str(tokenizers[0]))
    folder = next((tmp_path / "cache").iterdir())
    assert len([*folder.glob("*.bin")]) > 1
    monkeypatch.setattr(prepare, "in_all_cores", None)  # nothing is made again
    assert ids_of(tmp_path / "a.jsonl", tokenizer=str(tokenizers[0])) == expected


def test_what_one_of_several_processes_cannot_read_is_told_as_by_one(tmp_path: Path) -> None:
    for name in ("a.npy", "b.npy"):
        np.save(tmp_path / name, np.array([1, -5]))
    with pytest.raises(ConfigError, match=r"^data\.source=.*/[ab]\.npy holds the id -5, and none is below 0"):
        ids_of(tmp_path / "*.npy", tokenizer=None)


def test_what_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_SMALLEST", 200)
    (tmp_path / "a.jsonl").write_bytes(records(TEXTS * 3))
    made: list[str] = []

    def interrupted(*given: Any) -> Any:
        for number, pair in enumerate(_alone(made, *given)):
            if number == 2:
                raise KeyboardInterrupt
            yield pair

    monkeypatch.setattr(prepare, "in_all_cores", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ids_of(tmp_path / "a.jsonl")
    before, told = set(made[:2]), list[str]()
    made.clear()
    monkeypatch.setattr(prepare, "in_all_cores", lambda *given: _alone(made, *given))
    data = data_of(tmp_path / "a.jsonl")
    prepare.prepare(data, "data.source", "runs", told.append)
    assert made
    assert not before & set(made)
    assert re.fullmatch(r"\d+ B of [\d.]+ KB are done already", told[0])
    found = ids_of(tmp_path / "a.jsonl")
    assert found == ids_of(tmp_path / "a.jsonl", cache_dir=str(tmp_path / "anew"))


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be")
    ids_of(tmp_path / "a.txt")
    left = next((tmp_path / "cache").iterdir()) / "name.abc.tmp"
    left.touch()
    (tmp_path / "a.txt").write_text("or not to be")
    ids_of(tmp_path / "a.txt")
    assert not left.exists()


def test_progress_is_told_with_the_time_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_TOLD_EVERY_S", 0.0)
    told: list[str] = []
    progress = prepare._Progress(4000, told.append)
    progress.add(500, 125)
    progress.add(500, 125)
    assert re.fullmatch(r"1\.00 KB of 4\.00 KB, 250 tokens, .*B/s, .*s to go", told[0])


WRONG = {
    "a.jsonl": (b'{"text": "x"}\nno\n', "has at byte 14 a line that is no JSON object. Correct it"),
    "b.jsonl": (b'{"body": "x"}\n', "has at byte 0 a record without a text in the field text. "
                "Set data.text_field to one of its fields: body."),
    "b2.jsonl": (b'{"text": null}\n', "has at byte 0 a record without a text in the field text. Correct"),
    "c.jsonl.gz": (b"no gzip", "cannot be read: Not a gzipped file"),
    "c2.jsonl.gz": (gzip.compress(b"")[:10] + b"\xff" * 9, "cannot be read: Error -3 while decompressing"),
    "d.jsonl.zst": (b"no zstd", "cannot be read: zstd decompress error"),
    "e.parquet": (b"no parquet", "cannot be read: Parquet magic bytes not found"),
    "f.npy": (b"no array of numpy", "is no array of one dimension"),
    "g.bin": (b"odd", "has 3 bytes, which is no whole number of ids of 2 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_not_what_its_name_says_is_named(name: str, tmp_path: Path) -> None:
    content, expected = WRONG[name]
    (tmp_path / name).write_bytes(content)
    tokenizer = {"tokenizer": None} if name[0] in "fg" else {}
    with pytest.raises(ConfigError, match=f"data.source=.*{name} .*{re.escape(expected)}"):
        ids_of(tmp_path / name, **tokenizer)
    assert [path.suffix for path in (tmp_path / "cache").glob(".tokens-*/*")] == [""]


def test_a_column_that_is_not_there_and_a_row_without_text_are_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["x"], "body")
    expected = (
        r"has no column of texts in the field text\. Set data\.text_field to one of its fields: id, body"
    )
    with pytest.raises(ConfigError, match=expected):
        ids_of(tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"has a row without a text in the field id"):
        ids_of(tmp_path / "a.parquet", text_field="id")


def test_a_record_longer_than_can_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from launcher.runtime.tokens import documents

    monkeypatch.setattr(documents, "_MAX_LINE", 64)
    (tmp_path / "a.jsonl").write_bytes(records(["x" * 100]))
    with pytest.raises(ConfigError, match=r"has at byte 0 a record of more than 0 MiB"):
        ids_of(tmp_path / "a.jsonl")


def test_a_text_that_is_not_utf8_is_refused_by_other_tokenizers(
    tmp_path: Path, tokenizers: tuple[Path, Path]
) -> None:
    (tmp_path / "a.txt").write_bytes(b"to be \xff")
    with pytest.raises(ConfigError, match=r"a\.txt cannot be read: 'utf-8' codec .* position 6"):
        ids_of(tmp_path / "a.txt", tokenizer=str(tokenizers[0]))


# Token ids


def megatron_pair(path: Path, documents: list[list[int]], code: int = 8, width: int = 2) -> None:
    """Written byte by byte from the published format (indexed_dataset.py of Megatron-LM)."""
    ids = [i for document in documents for i in document]
    path.with_suffix(".bin").write_bytes(b"".join(i.to_bytes(width, "little") for i in ids))
    lengths = [len(document) for document in documents]
    pointers = [sum(lengths[:number]) * width for number in range(len(lengths))]
    index = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([code])
    index += len(lengths).to_bytes(8, "little") + (len(lengths) + 1).to_bytes(8, "little")
    index += b"".join(length.to_bytes(4, "little") for length in lengths)
    index += b"".join(pointer.to_bytes(8, "little") for pointer in pointers)
    index += b"".join(number.to_bytes(8, "little") for number in range(len(lengths) + 1))
    path.with_suffix(".idx").write_bytes(index)


IDS = [5, 0, 65535, 7]
ID_FILES: dict[str, Callable[[Path], Any]] = {
    "uint16.bin": lambda path: path.write_bytes(struct.pack("<4H", *IDS)),
    "uint32.bin": lambda path: path.write_bytes(struct.pack("<4I", *IDS)),
    "int64.npy": lambda path: np.save(path, np.array(IDS)),
    "uint16.npy": lambda path: np.save(path, np.array(IDS, dtype=np.uint16)),
    "two.bin": lambda path: megatron_pair(path, [IDS[:1], IDS[1:]]),
    "wide.bin": lambda path: megatron_pair(path, [IDS], code=4, width=4),
}


@pytest.mark.parametrize("name", ID_FILES)
def test_ids_that_exist_already_are_read_where_they_are(name: str, tmp_path: Path) -> None:
    ID_FILES[name](tmp_path / name)
    settings = {"bin_format": "uint32"} if name == "uint32.bin" else {}
    assert ids_of(tmp_path / name, tokenizer=None, **settings) == IDS
    assert [*(tmp_path / "cache").glob(".tokens-*/*.bin")] == []


def test_a_pair_that_is_written_is_megatrons_byte_by_byte(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [4], [5, 6]]
    megatron_pair(tmp_path / "theirs", documents)
    writer = PairWriter(tmp_path / "ours", "<u2")
    for document in documents:
        writer.add(np.array(document))
    writer.close()
    for suffix in (".bin", ".idx"):
        ours, theirs = ((tmp_path / name).with_suffix(suffix) for name in ("ours", "theirs"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_an_array_of_objects_is_never_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "sprung",)

    content = pickle.dumps(np.array([Trap()], dtype=object))
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n"
    (tmp_path / "a.npy").write_bytes(
        b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content
    )
    with pytest.raises(ConfigError, match=r"holds \|O, and token ids are whole numbers"):
        ids_of(tmp_path / "a.npy", tokenizer=None)
    assert not (tmp_path / "sprung").exists()


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array(IDS))
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"bytes, which 4 ids do not fill: it is cut short"):
        ids_of(tmp_path / "a.npy", tokenizer=None)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda index: b"x" + index[1:], "is no index of Megatron"),
        (lambda index: index[:9] + b"\2" + index[10:], "has version 2 and ids of format 8"),
        (lambda index: index[:17] + b"\7" + index[18:], "has version 1 and ids of format 7"),
        (lambda index: index[:-1], "bytes, which 2 sequences do not fill: it is cut short"),
        (lambda index: index[:34] + b"\3" + index[35:], "is not of the sequences in it, one after the other"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(
    change: Callable[[bytes], bytes], expected: str, tmp_path: Path
) -> None:
    megatron_pair(tmp_path / "a", [IDS[:2], IDS[2:]])
    index = tmp_path / "a.idx"
    index.write_bytes(change(index.read_bytes()))
    with pytest.raises(ConfigError, match=re.escape(expected)):
        ids_of(tmp_path / "a.bin", tokenizer=None)


def test_an_id_below_zero_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, -5]))
    with pytest.raises(ConfigError, match=r"a\.npy holds the id -5, and none is below 0"):
        ids_of(tmp_path / "a.npy", tokenizer=None)


def test_what_is_made_again_touches_no_file_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(struct.pack("<4H", *IDS))
    write_hugging_face(tmp_path / "tokenizer.json")
    (tmp_path / "b.jsonl").write_bytes(records(["to be"]))
    (tmp_path / "a.bin.part").write_text("mine")
    settings = {"tokenizer": str(tmp_path / "tokenizer.json"), "cache_dir": str(tmp_path / "cache")}
    expected = ids_of(tmp_path / "[ab].*[nl]", **settings)
    (made,) = (tmp_path / "cache").glob(".tokens-*/*.bin")
    made.write_bytes(bytes(len(made.read_bytes())))
    assert ids_of(tmp_path / "[ab].*[nl]", **settings) == expected
    assert expected[-4:] == IDS
    assert (tmp_path / "a.bin.part").read_text() == "mine"


def test_a_thousand_files_are_opened_in_under_a_second(tmp_path: Path) -> None:
    import time

    for number in range(1000):
        (tmp_path / f"{number:04}.bin").write_bytes(struct.pack("<64H", *range(number, number + 64)))
    data = data_of(tmp_path / "*.bin", tokenizer=None)
    open_tokens(data, "data.source", "runs")
    taken_s = []
    for _ in range(3):
        began = time.perf_counter()
        tokens = open_tokens(data, "data.source", "runs")
        taken_s.append(time.perf_counter() - began)
    assert len(tokens) == 64_000
    assert tokens.read(62, 4).tolist() == [62, 63, 1, 2]
    assert min(taken_s) < 1


def test_a_process_that_is_killed_as_it_reads_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    with pytest.raises(LauncherError, match=r"process that reads the data was ended, as .*: try again$"):
        list(prepare.in_all_cores(os._exit, [1, 2]))
