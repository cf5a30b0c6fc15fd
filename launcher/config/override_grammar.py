"""Overrides parsed with Hydra's grammar, their plain scalars kept as text.

Hydra's own settings and plugins are not loaded: that takes half of the time, and nothing here uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from itertools import islice
from typing import Any

from antlr4 import CommonTokenStream, InputStream
from hydra.core.override_parser.overrides_parser import create_functions
from hydra.core.override_parser.overrides_visitor import HydraErrorListener, HydraOverrideVisitor
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, QuotedString, RangeSweep
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser

from launcher.base.errors import Fault, LauncherError, did_you_mean, quoted
from launcher.config import overrides
from launcher.typed.read import Source

_MAX_WORDS = 1000
_UNCOUNTABLE = "cannot be enumerated: a sweep takes A,B,... or choice(A,B,...) or range(FROM,TO,STEP)"
Parsed = tuple[Override, Mapping[str, Source]]
"""An override with typed values, and the source of each by its path inside the value."""


def parse_all(words: Sequence[str], swept: Container[str] = ()) -> tuple[list[Parsed], list[Fault]]:
    """The overrides that can be parsed, and the faults of the others. Those ``swept`` take precedence.

    Raises:
        LauncherError: when there are more than any run has settings.
    """
    if len(words) > _MAX_WORDS:
        raise LauncherError(
            f"{len(words)} overrides: at most {_MAX_WORDS} can be given. Write the settings into a recipe."
        )
    results = [_parse(word.rstrip("\r\n"), overrides.LAYER + (word in swept)) for word in words]
    faults = [result for result in results if isinstance(result, Fault)]
    return [result for result in results if not isinstance(result, Fault)], faults


class _TextVisitor(HydraOverrideVisitor):
    """Parses an override without deciding what its plain scalars mean."""

    def visitPrimitive(self, ctx: Any) -> Any:  # noqa: N802 - the name that the parser calls
        value = self._createPrimitive(ctx)
        if isinstance(value, QuotedString):
            return value
        return overrides.PlainText(value if isinstance(value, str) else ctx.getText().strip())

    def visitDictKey(self, ctx: Any) -> str:  # noqa: N802 - the name that the parser calls
        return str(ctx.getText().strip())


class _VerbatimVisitor(HydraOverrideVisitor):
    """Keeps every value of a choice as it is written; the arguments of other functions are parsed."""

    def visitElement(self, ctx: Any) -> Any:  # noqa: N802 - the name that the parser calls
        return self.visitFunction(ctx.function()) if ctx.function() else ctx.getText().strip()

    def visitFunction(self, ctx: Any) -> Any:  # noqa: N802 - the name that the parser calls
        if ctx.ID().getText() == "choice":
            return super().visitFunction(ctx)
        return HydraOverrideVisitor(create_functions()).visitFunction(ctx)


def alternatives(word: str, files_of: Callable[[str], Sequence[str]], most: int) -> list[str] | Fault | None:
    """The values of a sweep override, each as text to write after the =; at most ``most``.

    None: it gives one value. ``files_of`` a group are what a ``glob`` selects from.
    """
    if word.startswith("~"):
        return None
    if fault := overrides.word_fault(word):
        return fault
    path, text = overrides.split(word)
    uncountable = Fault(path, text, _UNCOUNTABLE, "Give the values one by one.")
    unusable = uncountable if overrides.calls_sweep(word) else None
    try:
        override = _visited(word, _VerbatimVisitor(create_functions()))
        value = override._value
        if isinstance(value, ChoiceSweep | RangeSweep) and not value.shuffle:
            found = value.list if isinstance(value, ChoiceSweep) else value.range()
            # Hydra may pass the end of a range of floats by rounding.
            end = value.stop if isinstance(value, RangeSweep) else None
            texts = [
                text for text in map(_written, islice(found, most)) if end is None or text != _written(end)
            ]
            return texts or uncountable
    except (HydraException, ArithmeticError, ValueError):
        return unusable or overrides.unreadable_fault(word)
    if isinstance(value, Glob):
        files = files_of(override.key_or_group)
        rule = f"no file of the group {override.key_or_group} matches"
        return value.filter(files) or Fault(path, text, rule, did_you_mean(text, files))
    if isinstance(value, ChoiceSweep | RangeSweep):
        return Fault(path, text, "a sweep runs in the order that is written", "Leave out shuffle.")
    return unusable


def _written(value: Any) -> str:
    """A value of a sweep as text; floats without rounding errors in their last digits."""
    if isinstance(value, float):
        return f"{value:.12g}"
    return value if isinstance(value, str) else str(Override._get_value_element_as_str(value))


def _visited(word: str, visitor: HydraOverrideVisitor) -> Override:
    """The override that a word is parsed to.

    Raises:
        HydraException: when it does not parse.
    """
    listener = HydraErrorListener()
    lexer = OverrideLexer(InputStream(word))
    parser: Any = OverrideParser(CommonTokenStream(lexer))
    for part in (lexer, parser):
        part.removeErrorListeners()
        part.addErrorListener(listener)
    override: Override = visitor.visit(parser.override())
    return override


def _parse(typed: str, layer: int) -> Parsed | Fault:
    word = typed
    if fault := overrides.word_fault(word):
        return fault
    if overrides.calls_sweep(word):
        return overrides.sweep_fault(word)
    key, equals, value = word.partition("=")
    if value.startswith("~"):  # a path below a home folder, which its readers expand
        word = key + equals + quoted(value)
    try:
        override = _visited(word, _TextVisitor(create_functions()))
    except HydraException:
        return overrides.unreadable_fault(word)
    except ValueError:
        return Fault(*overrides.split(word), "is a number with thousands of digits", "Give fewer.")
    if override.is_sweep_override():
        return overrides.sweep_fault(word)
    marks: dict[str, Source] = {}
    source = Source(where=f"override {typed}", is_given=True, layer=layer)
    override._value = overrides.typed(override._value, "", source, marks)
    override.input_line = typed
    return override, marks
