"""``trireme completion``: prints the script that makes a shell complete, and answers what it asks."""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import redirect_stdout

from launcher.base.errors import LauncherError, did_you_mean
from launcher.cli.completion.answers import answers
from launcher.cli.completion.bash_line import read_line, replies

# The scripts only hand words over and answers back: no text of either is ever evaluated by the shell.
_SCRIPTS = {
    "bash": """\
# trireme completion for bash
_trireme() {
  local reply
  COMPREPLY=()
  while IFS= read -r reply; do
    COMPREPLY+=("$reply")
  done < <(trireme __complete bash "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null)
  [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=./] ]] && compopt -o nospace 2>/dev/null
  return 0
}
complete -F _trireme trireme
""",
    "zsh": """\
#compdef trireme
# trireme completion for zsh
_trireme() {
  local reply tab=$'\\t' typed=${(Q)PREFIX} home=
  local -a whole begun whole_lines begun_lines
  [[ $PREFIX == '~/'* ]] && compset -P '\\~/' && home='~/'
  while IFS= read -r reply; do
    local word=${${reply%%$tab*}#$home} line=${reply/$tab/  -- }
    if [[ $word == *[=./] ]]; then
      begun+=("$word") begun_lines+=("${line%  -- }")
    else
      whole+=("$word") whole_lines+=("${line%  -- }")
    fi
  done < <(trireme __complete zsh "${(@Q)words[2,CURRENT-1]}" "$typed" 2>/dev/null)
  (( $#begun )) && compadd -l -S '' -d begun_lines -a begun
  (( $#whole )) && compadd -l -d whole_lines -a whole
  return $(( $#begun + $#whole == 0 ))
}
if [[ ${funcstack[1]} == _trireme ]]; then
  _trireme "$@"
else
  compdef _trireme trireme
fi
""",
    "fish": """\
# trireme completion for fish
function __trireme_complete
  set -l words (commandline -opc) (commandline -ct)
  trireme __complete fish $words[2..] 2>/dev/null
end
complete -c trireme -f -k -a '(__trireme_complete)'
""",
}


def completion(given: Namespace) -> int:
    """Prints a script that makes the shell complete verbs, flags, recipes, runs, settings and their values
    on TAB.

    Examples:
      trireme completion bash > ~/.local/share/bash-completion/completions/trireme
      trireme completion zsh > "${fpath[1]}/_trireme"       with compinit in ~/.zshrc
      trireme completion fish > ~/.config/fish/completions/trireme.fish
      source <(trireme completion bash)                     for this shell alone
    """
    names = given.names
    if len(names) != 1:
        raise LauncherError(f"trireme completion takes one shell: {', '.join(_SCRIPTS)}.")
    if names[0] not in _SCRIPTS:
        raise LauncherError(f"completion {names[0]}: no such shell. {did_you_mean(names[0], _SCRIPTS)}")
    print(_SCRIPTS[names[0]], end="")
    return 0


def answer(words: list[str]) -> int:
    """Prints what may stand at the cursor, one a line; returns the exit code.

    The first word names the shell. Behind it stand the words behind ``trireme`` up to the cursor, of which
    fish gives the last with its quotes; or for bash the line, and at which characters a new word begins.

    Raises:
        LauncherError: without words.
    """
    shell, *typed = words or [""]
    if not typed:
        raise LauncherError(f"this is asked by the scripts of trireme completion: {', '.join(_SCRIPTS)}.")
    if shell == "bash":
        line = read_line(*typed)
        typed = line.words[1:]
    elif shell == "fish":
        typed[-1] = read_line(typed[-1]).words[-1]
    with redirect_stdout(sys.stderr):  # what a plugin prints while it is imported is no answer
        found = answers(typed)
    if shell == "bash":
        lines = list(replies(line, (word for word, _ in found)))
    else:
        lines = [f"{word}\t{told}" for word, told in found]
    print("".join(f"{text}\n" for text in lines), end="")
    return 0
