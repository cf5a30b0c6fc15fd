"""``trireme submit``: plan, freeze the code, and hand the job to a scheduler."""

from __future__ import annotations

from launcher.cli.arguments import parse, request

HELP = """\
Plans the recipe and submits it as one job to Slurm, or to the scheduler that executor= names. What
belongs to the cluster is given by site=. The job runs a copy of the code that is made now, in the
run directory: later changes do not reach it. The training on one device that the run is measured
against is found among the stored runs, or submitted as a job of its own.

The exit code is 0 when the job was submitted, and 2 when not.
"""
EXAMPLES = """\
  trireme submit quickstart site=box cluster.devices_per_node=2
  trireme submit quickstart site=box cluster.devices_per_node=2 --dry-run
  trireme submit llama3_8b_tp4_dp2_8xh100 site=none site.account=physics site.time_limit=12:00:00
"""


def run(words: list[str]) -> int:
    """Submits a recipe; returns the exit code.

    Raises:
        LauncherError: when it cannot be submitted.
    """
    given = parse("submit", words)
    from launcher.app.launch import submit  # imports hydra, which the help does not need

    submit(request(given))
    return 0
