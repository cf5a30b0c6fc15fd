"""What torch.compile needs of a machine: a C++ compiler and Python's headers; on a GPU also Triton."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

_NAMES = ("g++", "c++", "clang++")


def cxx_compiler(environ: Mapping[str, str]) -> str | None:
    """Path of the C++ compiler: what ``CXX`` names, or the first one that is found."""
    named = environ.get("CXX")
    return next(filter(None, map(shutil.which, (named,) if named else _NAMES)), None)


def missing_for_compile(environ: Mapping[str, str], device_kind: str) -> str:
    """What this machine lacks for torch.compile, with the way to mend it; empty: nothing."""
    if cxx_compiler(environ) is None:
        named = environ.get("CXX")
        if named:
            return f"no C++ compiler {named}, which CXX names: correct or unset it"
        return "no C++ compiler (g++, c++ or clang++): install g++, or name one in CXX"
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        return f"no Python.h in {headers}: install Python's headers (python3-dev)"
    if device_kind == "cuda" and find_spec("triton") is None:
        return "no Triton, which makes the kernels of a GPU: install triton"
    return ""
