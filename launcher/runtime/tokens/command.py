"""Makes and shows tokens: `python -m launcher.runtime.tokens.command < request.json`.

The request holds ``data`` and the ``root`` of runs, as in the configuration, the ``settings`` that name the
sources, and ``show``: `launcher.runtime.tokens.show.Asked`, or null where nothing is shown. The answer is
lines of JSON, ``{"say": text}`` for what happens; with exit code 1 the last one is a list of faults.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from launcher.base.errors import ConfigError, LauncherError
from launcher.contract.data.config import DataConfig
from launcher.runtime.process.supervise import end_with
from launcher.runtime.tokens.prepare import prepare
from launcher.runtime.tokens.show import Asked, shown
from launcher.typed.read import read_or_raise


def main() -> int:
    """Does what one request asks. Returns the exit code."""
    request = json.load(sys.stdin)
    data = read_or_raise(DataConfig, request["data"], "data")
    asked = None if request["show"] is None else read_or_raise(Asked, request["show"])
    try:
        for setting in request["settings"]:
            found = prepare(data, setting, request["root"], _say)
            if asked is not None:
                _say("\n".join(shown(data, setting, request["root"], found, asked)))
    except ConfigError as error:
        _answer([vars(fault) for fault in error.faults])
        return 1
    except LauncherError as error:
        _answer(str(error))
        return 1
    return 0


def _say(text: str) -> None:
    _answer({"say": text})


def _answer(value: Any) -> None:
    print(json.dumps(value, default=str), flush=True)


if __name__ == "__main__":
    end_with(os.getppid())
    sys.exit(main())
