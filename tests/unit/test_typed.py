from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from launcher.base.errors import ConfigError
from launcher.base.redaction import shortened
from launcher.typed.read import REST, Reading, Source, plain, read, read_fields, read_or_raise
from launcher.typed.scalars import Filled, Range, scalar


@dataclass(frozen=True, kw_only=True)
class Inner:
    ratio: Annotated[float, Range(above=0, maximum=1)]


@dataclass(frozen=True, kw_only=True)
class Plugin:
    name: str
    options: Mapping[str, Any] = field(metadata=REST)


@dataclass(frozen=True, kw_only=True)
class Sample:
    count: Annotated[int, Range(minimum=1)] = 1
    auto_count: Annotated[int, Range(minimum=1)] | Literal["auto"] = "auto"
    rate: float = 0.0
    flag: bool = False
    label: str = "x"
    note: str | None = None
    limit: Annotated[int, Range(minimum=1)] | None = None
    choice: Literal["fp32", "bf16"] = "fp32"
    pair: tuple[float, float] = (0.0, 0.0)
    layers: tuple[int, ...] | Literal["even"] = "even"
    few: Annotated[int, Range(minimum=1, maximum=8)] = 1
    path: Annotated[str, Filled()] = "x"
    inner: Inner | None = None
    peaks: Mapping[str, float] = field(default_factory=dict)


def read_texts(**texts: str) -> tuple[Sample | None, Reading]:
    """Reads fields as if each text had been written without quotes."""
    sources = {
        name: Source(where=f"recipe.yaml:{line}", text=text)
        for line, (name, text) in enumerate(texts.items(), 1)
    }
    reading = Reading(sources)
    return read(Sample, {name: scalar(text) for name, text in texts.items()}, reading), reading


def fault_of(**texts: str) -> str:
    sample, reading = read_texts(**texts)
    assert sample is None
    (fault,) = reading.faults
    return str(fault)


@pytest.mark.parametrize(
    ("name", "text", "meaning"),
    [
        ("rate", "1e-5", 0.00001),
        ("rate", "1.0e-05", 0.00001),
        ("rate", "3", 3.0),
        ("rate", ".5", 0.5),
        ("count", "+4", 4),
        ("auto_count", "auto", "auto"),
        ("auto_count", "8", 8),
        ("flag", "true", True),
        ("flag", "False", False),
        ("label", "no", "no"),
        ("label", "010", "010"),
        ("label", "1e5", "1e5"),
        ("label", "12:30:00", "12:30:00"),
        ("label", "true", "true"),
        ("label", "None", "None"),
        ("note", "null", None),
        ("note", "~", None),
        ("limit", "null", None),
        ("choice", "bf16", "bf16"),
    ],
)
def test_text_decides_the_value(name: str, text: str, meaning: Any) -> None:
    sample, _ = read_texts(**{name: text})
    assert getattr(sample, name) == meaning
    assert type(getattr(sample, name)) is type(meaning)


@pytest.mark.parametrize(
    ("name", "text", "allowed", "fix"),
    [
        ("count", "010", "must be a whole number of at least 1", "Write 10, without leading zeros."),
        ("count", "08", "must be a whole number of at least 1", "Write 8, without leading zeros."),
        ("count", "4.0", "must be a whole number of at least 1", "Write 4."),
        ("count", "1e1", "must be a whole number of at least 1", "Write 10."),
        ("count", "1_000", "must be a whole number of at least 1", "Write 1000."),
        ("count", "true", "must be a whole number of at least 1", ""),
        ("count", "0", "must be a whole number of at least 1", "Write 1."),
        ("count", "-1", "must be a whole number of at least 1", "Write 1."),
        ("count", "1:30", "must be a whole number of at least 1", ""),
        ("count", "9" * 20, "must be a whole number of at least 1", "A whole number has at most 19 digits."),
        ("count", "1e19", "must be a whole number of at least 1", "A whole number has at most 19 digits."),
        (
            "count",
            "1e999999999",
            "must be a whole number of at least 1",
            "A whole number has at most 19 digits.",
        ),
        ("count", "00", "must be a whole number of at least 1", "Write 1."),
        ("count", "9007199254740993.0", "must be a whole number of at least 1", "Write 9007199254740993."),
        ("count", "2.5", "must be a whole number of at least 1", ""),
        ("few", "-3", "must be a whole number from 1 to 8", "Write 1."),
        ("few", "1e30", "must be a whole number from 1 to 8", "Write 8."),
        ("few", "1" * 5000, "must be a whole number from 1 to 8", "Write 8."),
        (
            "note",
            "None",
            "must be text or null, and None is a text only in quotes",
            "Write null for no value.",
        ),
        (
            "note",
            "none",
            "must be text or null, and none is a text only in quotes",
            "Write null for no value.",
        ),
        ("path", "None", "must be text that is neither empty nor None", "Leave it out for its default."),
        ("choice", "BF16", "must be fp32 or bf16", "Did you mean bf16?"),
        ("choice", "int8", "must be fp32 or bf16", ""),
        ("auto_count", "0", "must be a whole number of at least 1 or auto", "Write auto."),
        ("limit", "None", "must be a whole number of at least 1 or null", "Write null for no value."),
        ("rate", "nan", "must be a finite number", ""),
        ("rate", "inf", "must be a finite number", ""),
        ("rate", "1e999", "must be a finite number", ""),
        ("flag", "2", "must be true or false", ""),
        ("flag", "on", "must be true or false", "Write true."),
        ("flag", "No", "must be true or false", "Write false."),
        ("flag", "1", "must be true or false", "Write true."),
        ("label", "null", "must be text", 'Give text; for an empty one write "".'),
        ("choice", "bf61", "must be fp32 or bf16", "Did you mean bf16?"),
        ("pair", "0.5", "must be a list of finite numbers", "Write it in [ ]."),
        ("inner", "3", "must be a group of settings or null", ""),
        ("peaks", "3", "must be a group of settings", "Write it as key: value lines."),
    ],
)
def test_wrong_text_is_refused_with_rule_and_fix(name: str, text: str, allowed: str, fix: str) -> None:
    expected = f"{name}={shortened(text)}: {allowed}.{' ' if fix else ''}{fix} [recipe.yaml:1]"
    assert fault_of(**{name: text}) == expected


def test_empty_text_is_no_value_and_no_text() -> None:
    assert read_values(Sample, {"note": "", "path": " "})[1] == [
        'note="": must be text or null, and this one is empty. Write null for no value.',
        "path= : must be text that is neither empty nor None. Leave it out for its default.",
    ]


def test_quoted_none_is_a_text() -> None:
    assert read_values(Sample, {"note": "None"})[0].note == "None"


def test_a_whole_dataclass_is_read_or_every_fault_is_raised() -> None:
    assert read_or_raise(Sample, {"count": 3}).count == 3
    with pytest.raises(ConfigError) as raised:
        read_or_raise(Sample, {"count": 0, "flag": 1}, "sample")
    assert [fault.path for fault in raised.value.faults] == ["sample.count", "sample.flag"]


def test_what_can_be_read_is_read_beside_what_cannot() -> None:
    reading = Reading()
    values = read_fields(Sample, {"count": 0, "rate": 2, "inner": {"ratio": 3}}, reading)
    assert [fault.path for fault in reading.faults] == ["count", "inner.ratio"]
    assert (values["rate"], values["flag"]) == (2.0, False)
    assert not {"count", "inner"} & set(values)


def test_every_fault_is_reported_at_once() -> None:
    _, reading = read_texts(count="0", flag="on", choice="int8")
    assert [fault.path for fault in reading.faults] == ["count", "flag", "choice"]
    assert [fault.where for fault in reading.faults] == ["recipe.yaml:1", "recipe.yaml:2", "recipe.yaml:3"]


def read_values(cls: type, values: Any) -> tuple[Any, list[str]]:
    reading = Reading()
    return read(cls, values, reading), [str(fault) for fault in reading.faults]


def test_quoted_number_is_refused_for_a_number() -> None:
    assert read_values(Sample, {"count": "4"})[1] == [
        "count=4: must be a whole number of at least 1. Remove the quotes."
    ]


def test_quoted_null_is_text() -> None:
    assert read_values(Sample, {"note": "null"})[0].note == "null"


def test_interpolated_text_is_not_taken_literally() -> None:
    reading = Reading({"count": Source(where="a.yaml:1")})
    sample = read(Sample, {"count": 8}, reading)
    assert sample is not None
    assert sample.count == 8


def test_unknown_key_names_the_nearest() -> None:
    assert read_values(Sample, {"cuont": 1})[1] == ["cuont=1: not a setting here. Did you mean count?"]


def test_missing_key_is_required() -> None:
    assert read_values(Inner, {})[1] == ["ratio=(missing): this setting is required. Give ratio=NUMBER."]


def test_fault_inside_an_optional_group_is_its_own() -> None:
    assert read_values(Sample, {"inner": {"ratio": 2.0}})[1] == [
        "inner.ratio=2.0: must be a finite number above 0 and of at most 1. Write 1."
    ]


def test_fault_inside_a_list_names_its_place() -> None:
    reading = Reading({"layers[1]": Source(where="a.yaml:7", text="02")})
    assert read(Sample, {"layers": [1, "02"]}, reading) is None
    assert [str(fault) for fault in reading.faults] == [
        "layers[1]=02: must be a whole number. Write 2, without leading zeros. [a.yaml:7]"
    ]


def test_list_of_a_wrong_length_is_refused() -> None:
    assert read_values(Sample, {"pair": [0.9]})[1] == [
        "pair=[0.9]: must have 2 items, not 1. Give 2 items in [ ]."
    ]


def test_group_in_place_of_a_scalar_and_the_reverse_are_refused() -> None:
    _, faults = read_values(Sample, {"count": {"a": 1}, "inner": [1]})
    assert faults == [
        "count={'a': 1}: must be a whole number of at least 1.",
        "inner=[1]: must be a group of settings or null.",
    ]


def test_rest_field_takes_every_other_key() -> None:
    plugin, _ = read_values(Plugin, {"name": "slurm", "time": "1:30", "options": 3})
    assert plugin == Plugin(name="slurm", options={"time": "1:30", "options": 3})


def test_rest_field_may_be_empty() -> None:
    assert read_values(Plugin, {"name": "slurm"})[0] == Plugin(name="slurm", options={})


def test_plain_is_the_inverse_of_read() -> None:
    sample = Sample(layers=(1, 2), inner=Inner(ratio=0.5), peaks={"fp32": 1e12}, pair=(0.9, 0.95), limit=3)
    assert read_values(Sample, plain(sample))[0] == sample
    plugin = Plugin(name="slurm", options={"time": "1:30"})
    assert plain(plugin) == {"name": "slurm", "time": "1:30"}
    assert read_values(Plugin, plain(plugin))[0] == plugin


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("", None), ("null", None), ("~", None), ("true", True), ("TRUE", True), ("yes", "yes"), ("on", "on"),
        ("0", 0), ("-3", -3), ("010", "010"), ("08", "08"), ("0x1F", "0x1F"), ("0o17", "0o17"),
        ("1_000", "1_000"), ("1:30", "1:30"), ("22:22", "22:22"), ("1e5", 1e5), ("1e-05", 1e-5), ("5e8", 5e8),
        (".5", 0.5), ("1.", 1.0), ("00.5", "00.5"), ("nan", "nan"), (".inf", ".inf"),
        ("2023-09-16", "2023-09-16"), ("=", "="),
    ],
)  # fmt: skip
def test_scalar_without_a_type(text: str, meaning: Any) -> None:
    assert scalar(text) == meaning
    assert type(scalar(text)) is type(meaning)
