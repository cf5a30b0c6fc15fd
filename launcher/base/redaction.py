"""Text for display: secrets and control characters removed, long values shortened."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
"""Shown in place of a secret."""
_WIDTH, _TAIL = 100, 30
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET = re.compile("secrets?|passwords?|passwd|pwd|passphrase|credentials?")
_SECRET_KEY = re.compile(
    "access|account|admin|api|auth|deploy|encryption|license|master|private|secret|service|signing|ssh"
)
"""Words before ``key`` that make it a secret."""
_OTHER_KEY = re.compile("cache|dict|foreign|group|map|partition|primary|public|query|sort")
"""Words before ``KEY`` with which also a variable holds none."""
_TEXT_TOKEN = re.compile(
    "added|begin|blank|[be]o[st]|class|cls|cont|end|extra|fim|first|image|infix|input|last|mask|max|middle|min"
    "|new|newline|next|num|of|output|pad|prefix|prompt|role|sep|special|start|stop|suffix|target|text|total"
    "|train|unk|vocab"
)
"""Words before ``token`` that name one of a text."""
_SECRET_TOKENS = re.compile("access|api|auth|bearer|github|gitlab|hf|hub|refresh|secret|session|wandb")
"""Words before ``tokens`` that make them secrets: else they are counts, or the data themselves."""
_TOKEN_LIST = re.compile(r"(?<![\w-])tokens\[", re.I)
_LOGIN = re.compile(r"(?<=://)([^\s/:@]*):[^\s/@]+(?=@)")
"""User and password in a URL."""
_KEY = re.compile(r"(?<![\w.-])([\w.-]*\w)['\"]?\s*[:=]\s*")
_VALUE = re.compile(r"(?!['\"]?\*\*\*|\.\.\.)(?:\"[^\"]*\"|'[^']*'|\[[^]]*]|\{[^}]*}|[^\s,{}\[\]'\"])+")


def is_secret_variable(name: str) -> bool:
    """Whether a variable of this name is expected to hold a secret.

    >>> [is_secret_variable(name) for name in ("OPENAI_KEY", "HF_TOKEN", "NCCL_IB_PKEY", "PWD", "EOS_TOKEN")]
    [True, True, False, False, False]
    """
    *_, before, last = ("", "", *_words(name))
    is_key = last == "key" and not _OTHER_KEY.fullmatch(before)
    return name != "PWD" and (is_key or names_secret(name))


def names_secret(key: str) -> bool:
    """Whether a setting of this name is expected to hold a secret: by its last words, whole ones.

    >>> [names_secret(key) for key in ("api-key", "apiKey", "my-token", "hf_tokens", "secret_key", "pwd")]
    [True, True, True, True, True, True]
    >>> [names_secret(key) for key in ("eos_token", "max_tokens", "TURKEY", "sort_key", "secrets_file")]
    [False, False, False, False, False]
    """
    *_, before, last = ("", "", *_words(key))
    is_token = last == "token" and not _TEXT_TOKEN.fullmatch(before)
    is_token |= last == "tokens" and bool(_SECRET_TOKENS.fullmatch(before))
    is_key = last in ("key", "keys") and bool(_SECRET_KEY.fullmatch(before))
    return is_token or is_key or bool(_SECRET.fullmatch(last))


def is_secret_path(path: str) -> bool:
    """Whether a setting is expected to hold a secret: by its own name or that of a group around it.

    >>> [is_secret_path(path) for path in ("data.tokens[0]", "hub.credentials.user", "site.secrets[0]")]
    [True, True, False]
    """
    if path.startswith("site.secrets"):  # names of variables
        return False
    return bool(_TOKEN_LIST.search(path)) or any(map(names_secret, re.split(r"[.\[\]]+", path)))


def holds_login(text: str) -> bool:
    """Whether a text has a password in a URL.

    >>> holds_login("https://me:abc@host/x"), holds_login("https://host:80/a@b")
    (True, False)
    """
    return bool(_LOGIN.search(text))


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


def without_secrets(value: Any, path: str = "") -> Any:
    """A value with the settings that name a secret hidden.

    >>> without_secrets({"api_key": "abc", "rate": 1}), without_secrets("abc", "env.HF_TOKEN")
    ({'api_key': '***', 'rate': 1}, '***')
    """
    if is_secret_path(path):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    return hide_secrets(value) if isinstance(value, str) else value


def hide_secrets(text: str) -> str:
    """A text with the value after each name of a secret hidden, and each password in a URL.

    >>> hide_secrets("+env.WANDB_API_KEY=abc123 model.options={token: abc, rate: 1} http://me:abc@host")
    '+env.WANDB_API_KEY=*** model.options={token: ***, rate: 1} http://me:***@host'
    """
    text = _LOGIN.sub(rf"\1:{HIDDEN}", text)
    shown, end = [], 0
    for key in _KEY.finditer(text):
        value = _VALUE.match(text, key.end()) if key.start() >= end else None
        if value is not None and is_secret_path(f"{key[1]}[0]" if value[0].startswith("[") else key[1]):
            shown += [text[end : key.end()], HIDDEN]
            end = value.start() + len(value[0].rstrip(".,;:"))
    return "".join([*shown, text[end:]])


def escaped(text: str) -> str:
    r"""A text with control characters escaped, except line breaks and tabs.

    >>> escaped("a\x1b[31m\r")
    'a\\x1b[31m\\r'
    """
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode()
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
