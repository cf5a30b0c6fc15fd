"""Override words read with Hydra's grammar, their plain scalars kept as text.

Hydra's own settings and its plugins are left out: loading them takes half of the time, and nothing
here uses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from antlr4 import CommonTokenStream, InputStream
from hydra.core.override_parser.overrides_parser import create_functions
from hydra.core.override_parser.overrides_visitor import HydraErrorListener, HydraOverrideVisitor
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser

from launcher.config import overrides
from launcher.errors import Fault
from launcher.typed import Source

Parsed = tuple[Override, Mapping[str, Source]]
"""An override with typed values, and the source of each by its path inside the value."""


def parse_all(words: Sequence[str]) -> tuple[list[Parsed], list[Fault]]:
    """The words that can be read, and the faults of the others."""
    results = [_parse(word.rstrip("\r\n")) for word in words]
    faults = [result for result in results if isinstance(result, Fault)]
    return [result for result in results if not isinstance(result, Fault)], faults


class _TextVisitor(HydraOverrideVisitor):
    """Reads an override without deciding what its plain scalars mean."""

    def visitPrimitive(self, ctx: Any) -> Any:  # noqa: N802 - the name that the parser calls
        value = self._createPrimitive(ctx)
        if isinstance(value, QuotedString):
            return value
        return overrides.PlainText(value if isinstance(value, str) else ctx.getText().strip())

    def visitDictKey(self, ctx: Any) -> str:  # noqa: N802 - the name that the parser calls
        return str(ctx.getText().strip())


def _parse(word: str) -> Parsed | Fault:
    if fault := overrides.word_fault(word):
        return fault
    listener = HydraErrorListener()
    lexer = OverrideLexer(InputStream(word))
    parser: Any = OverrideParser(CommonTokenStream(lexer))
    for part in (lexer, parser):
        part.removeErrorListeners()
        part.addErrorListener(listener)
    try:
        override = _TextVisitor(create_functions()).visit(parser.override())
    except HydraException:
        return overrides.unreadable_fault(word)
    if override.is_sweep_override():
        return overrides.sweep_fault(word)
    marks: dict[str, Source] = {}
    override._value = overrides.typed(override._value, "", f"override {word}", marks)
    override.input_line = word
    return override, marks
