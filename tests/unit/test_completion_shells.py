"""Completes real lines in real shells: what is typed, then TAB, then what the shell makes of the line."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time

import pytest

PROMPT = "READY> "
TIMEOUT_S = 30
SHOW = "printf '<%s>' \"$@\"; echo"
START = {
    "bash": (
        ["bash", "--norc", "--noprofile", "-i"],
        f"""bind 'set enable-bracketed-paste off'
trireme() {{ if [ "$1" = __complete ]; then {{python}} -m launcher "$@"; else {SHOW}; fi; }}
source <(trireme_script)
PS1='{PROMPT}'
""",
    ),
    "zsh": (
        ["zsh", "-f", "-i"],
        f"""unset zle_bracketed_paste; setopt no_auto_remove_slash no_list_ambiguous; unsetopt prompt_sp
autoload -U compinit; compinit -u -D
trireme() {{ if [ "$1" = __complete ]; then {{python}} -m launcher "$@"; else {SHOW}; fi; }}
source {{script}}
PROMPT='{PROMPT}'
""",
    ),
    "fish": (
        ["fish", "--no-config", "-i"],
        f"""set -g fish_autosuggestion_enabled 0
function fish_title; end
function trireme; if test "$argv[1]" = __complete; {{python}} -m launcher $argv; else; printf '<%s>' $argv; echo; end; end
source {{script}}
function fish_prompt; printf '{PROMPT}'; end
""",
    ),
}
