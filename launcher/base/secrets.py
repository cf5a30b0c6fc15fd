"""Keeps the values of secret variables out of all files of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.base.errors import JobError
from launcher.base.redaction import is_secret_variable

_MIN_LENGTH = 8
"""A shorter value cannot be distinguished from ordinary text."""


def secret_values(environment: Mapping[str, str], names: Sequence[str]) -> dict[str, bytes]:
    """The values that may be in no file: of ``names``, and of every variable named like a secret.

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
        if len(value) >= _MIN_LENGTH and (name in names or is_secret_variable(name))
    }


def check_text(text: str, what: str, secrets: Mapping[str, bytes]) -> None:
    """Refuses a text that holds a secret.

    Raises:
        JobError: with the name of the variable, and ``what`` the text is.
    """
    for name, value in secrets.items():
        if value in text.encode(errors="surrogateescape"):
            raise JobError(_message(what, name))


def check_folder(folder: Path, secrets: Mapping[str, bytes]) -> None:
    """Removes every file that holds a secret, and raises an error if there was one.

    Raises:
        JobError: with the name of the file and of the variable.
    """
    leaks = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        data = path.read_bytes()
        names = [name for name, value in secrets.items() if value in data]
        if names:
            path.unlink()
            shown = str(path.relative_to(folder))
            for value in secrets.values():
                shown = shown.replace(value.decode(errors="surrogateescape"), "***")
            leaks.append(_message(shown, names[0]))
    if leaks:
        raise JobError("\n".join(leaks))


def _message(what: str, name: str) -> str:
    return (
        f"{what} would hold the value of {name}. Read the variable on the ranks instead; "
        f"site.secrets=[{name}] passes it to them."
    )
