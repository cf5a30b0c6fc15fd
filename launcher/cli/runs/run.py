"""``trireme run``: plan, start the ranks on this machine, follow them, report the speedup."""

from __future__ import annotations

from launcher.cli.arguments import parse, request

HELP = """\
Plans the recipe, starts its ranks on this machine, shows the training live, and ends with the
speedup against one device. Everything is kept in the run directory: run.dir, or a new one under
run.root. Ctrl-C ends all ranks; with train.checkpoint_interval they save first, which is waited for
at most executor.save_wait_s, and a second Ctrl-C ends them at once. SIGTERM and SIGUSR1 do the same.

The exit code is 0 when every rank succeeded, 1 when one failed, 2 when nothing could be started,
and 130 after Ctrl-C.
"""
EXAMPLES = """\
  trireme run quickstart
  trireme run quickstart parallel.pp=1 parallel.dp=2
  trireme run quickstart run.dir=runs/mine train.checkpoint_interval=20
  trireme run quickstart run.dir=runs/mine train.checkpoint_interval=20 --resume
"""


def run(words: list[str]) -> int:
    """Runs a recipe; returns the exit code.

    Raises:
        LauncherError: when nothing could be started.
    """
    given = parse("run", words)
    from launcher.app.launch import launch  # imports hydra, which the help does not need

    return launch(request(given)).exit_code
