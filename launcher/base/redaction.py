"""Text for display: secrets and control characters removed, long values shortened."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
"""Shown in place of a secret."""
_WIDTH, _TAIL = 100, 30
_SECRET = re.compile(
    r"(api|access|auth|private)_?(key|token)"
    r"|^(\w+_)?(secret|password|passwd|passphrase|credentials?)$"
    r"|^((hf|hub|wandb|git\w*|bearer|refresh|session)_?)?token$",
    re.I,
)
_SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.I)
_KEY = re.compile(r"(?<![\w.-])([\w.-]*\w)['\"]?\s*[:=]\s*")
_VALUE = re.compile(r"(?!['\"]?\*\*\*|\.\.\.)(?:\"[^\"]*\"|'[^']*'|\[[^]]*]|\{[^}]*}|[^\s,{}\[\]'\"])+")


def is_secret_variable(name: str) -> bool:
    """Whether a variable of this name is expected to hold a secret.

    >>> is_secret_variable("WANDB_API_KEY"), is_secret_variable("TOKENIZERS_PARALLELISM")
    (True, False)
    """
    return bool(_SECRET_VARIABLE.search(name))


def names_secret(key: str) -> bool:
    """Whether a setting of this name is expected to hold a secret.

    >>> [names_secret(key) for key in ("api_key", "HF_TOKEN", "token", "eos_token", "num_kv_heads")]
    [True, True, True, False, False]
    """
    return bool(_SECRET.search(key)) or (key.isupper() and "_" in key and is_secret_variable(key))


def without_secrets(value: Any, path: str = "") -> Any:
    """A value with the settings that name a secret hidden.

    >>> without_secrets({"api_key": "abc", "rate": 1}), without_secrets("abc", "env.HF_TOKEN")
    ({'api_key': '***', 'rate': 1}, '***')
    """
    if _is_secret_path(path):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    return hide_secrets(value) if isinstance(value, str) else value


def hide_secrets(text: str) -> str:
    """A text with the value after each name of a secret hidden.

    >>> hide_secrets("+env.WANDB_API_KEY=abc123 model.options={token: abc, rate: 1}")
    '+env.WANDB_API_KEY=*** model.options={token: ***, rate: 1}'
    """
    shown, end = [], 0
    for key in _KEY.finditer(text):
        value = _VALUE.match(text, key.end()) if key.start() >= end and _is_secret_path(key[1]) else None
        if value is not None:
            shown += [text[end : key.end()], HIDDEN]
            end = value.start() + len(value[0].rstrip(".,;:"))
    return "".join([*shown, text[end:]])


def escaped(text: str) -> str:
    r"""A text with control characters escaped, except line breaks.

    >>> escaped("a\x1b[31m\r")
    'a\\x1b[31m\\r'
    """
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def shortened(text: str) -> str:
    """A text with its middle left out when it is long.

    >>> shortened("[" + "4,4,4,4," * 50 + "4]")
    '[4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,...4,4,4,4,4,4,4,4,4,4,4,4,4,4,4]'
    """
    if len(text) <= _WIDTH:
        return text
    return f"{text[: _WIDTH - _TAIL - 3]}...{text[-_TAIL:]}"


def _is_secret_path(path: str) -> bool:
    return any(map(names_secret, re.split(r"[.\[\]-]+", path)))
