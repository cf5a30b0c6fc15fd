"""A strict reader of Prometheus' text format, as node_exporter's textfile collector takes it.

Source: https://prometheus.io/docs/instrumenting/exposition_formats, version 0.0.4.
"""

from __future__ import annotations

import re

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"'
_HELP = re.compile(rf"# HELP ({_NAME}) ((?:[^\\\n]|\\[\\n])+)")
_TYPE = re.compile(rf"# TYPE ({_NAME}) (gauge|counter)")
_SAMPLE = re.compile(
    rf"({_NAME})\{{((?:{_LABEL})(?:,{_LABEL})*)\}} (-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?|NaN|[+-]Inf)"
)
_ESCAPES = {r"\\": "\\", r"\n": "\n", r"\"": '"'}

Sample = tuple[str, tuple[tuple[str, str], ...]]


def samples_of(text: str) -> dict[Sample, float]:
    """The value of every sample by its name and labels; whatever breaks a rule is refused.

    Each family is whole: its help, its type, then its samples, none of them twice.
    """
    assert text.endswith("\n"), "the last line has to end"
    found: dict[Sample, float] = {}
    families: set[str] = set()
    lines = text.removesuffix("\n").split("\n")
    family = kind = ""
    for number, line in enumerate(lines):
        if told := _HELP.fullmatch(line):
            family, kind = told[1], ""
            assert family not in families, f"{family} comes twice"
            families.add(family)
            assert number + 2 < len(lines), f"{family} has no samples"
        elif told := _TYPE.fullmatch(line):
            assert (told[1], kind) == (family, ""), f"a type of {told[1]} after {family}"
            kind = told[2]
            assert (kind == "counter") == family.endswith("_total"), f"the name of the {kind} {family}"
        else:
            told = _SAMPLE.fullmatch(line)
            assert told is not None, f"no line of the format: {line!r}"
            assert told[1] == (family if kind else ""), f"a sample of {told[1]} in {family}"
            labels = tuple((name, _plain(value)) for name, value in re.findall(_LABEL, told[2]))
            assert len(dict(labels)) == len(labels), f"a label twice: {line}"
            assert (family, labels) not in found, f"a sample twice: {line}"
            found[family, labels] = float(told[7])
    return found


def _plain(value: str) -> str:
    return re.sub(r"\\.", lambda match: _ESCAPES[match[0]], value)
