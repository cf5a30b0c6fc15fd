"""Keeps the values of secret variables out of all files of a run: what is to be written is checked before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.base.errors import JobError
from launcher.base.redaction import holds_login, is_secret_variable

_MIN_LENGTH = 8
"""A shorter value cannot be distinguished from ordinary text."""
_PIECE_BYTES = 1 << 20


def secret_values(environment: Mapping[str, str], names: Sequence[str]) -> dict[str, bytes]:
    """The values that may be in no file: of ``names``, and of every variable that is named like a secret or
    holds a password in a URL.

    Raises:
        JobError: when a variable of ``names`` is not set.
    """
    missing = [name for name in names if not environment.get(name)]
    if missing:
        listed = ", ".join(missing)
        raise JobError(
            f"site.secrets names {listed}, not set here. Set it where you submit: export {missing[0]}=..."
        )
    return {
        name: value.encode(errors="surrogateescape")
        for name, value in environment.items()
        if len(value) >= _MIN_LENGTH and (name in names or is_secret_variable(name) or holds_login(value))
    }


def check_text(text: str, what: str, secrets: Mapping[str, bytes]) -> None:
    """Refuses a text that holds a secret.

    Raises:
        JobError: with the name of the variable, and ``what`` the text is.
    """
    for name, value in secrets.items():
        if value in text.encode(errors="surrogateescape"):
            raise JobError(_message(what, name))


def check_file(path: Path, what: str, secrets: Mapping[str, bytes]) -> None:
    """Refuses a file that holds a secret; a large one is read piece by piece.

    Raises:
        JobError: as `check_text`.
    """
    if not secrets:
        return
    overlap = max(map(len, secrets.values()))
    with path.open("rb") as file:
        piece = b""
        while new := file.read(_PIECE_BYTES):
            piece = piece[-overlap:] + new
            for name, value in secrets.items():
                if value in piece:
                    raise JobError(_message(what, name))


def _message(what: str, name: str) -> str:
    return (
        f"{what} would hold the value of {name}. Read the variable on the ranks instead; "
        f"site.secrets=[{name}] passes it to them."
    )
