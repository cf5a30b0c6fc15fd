"""``trireme run`` and ``trireme submit``: plan, then start the ranks here or hand the job to a scheduler."""

from __future__ import annotations

from argparse import Namespace

from launcher.cli.arguments import request


def run(given: Namespace) -> int:
    """Plans the recipe, starts its ranks on this machine, shows the training live, and ends with the
    speedup against one device. Everything is kept in the run directory: run.dir, or a new one under
    run.root. Ctrl-C ends all ranks; with train.checkpoint_interval they save first, which is waited for
    at most executor.save_wait_s, and a second Ctrl-C ends them at once. SIGTERM and SIGUSR1 do the same,
    and so does a terminal that is closed, but not under nohup. The training goes on without output where
    its reader ends, as in `trireme run quickstart | grep -m1 step`.

    The exit code is 0 when every rank succeeded, 1 when one failed, 2 when nothing could be started,
    and 130 after Ctrl-C.

    Examples:
      trireme run quickstart
      trireme run quickstart parallel.pp=1 parallel.dp=2
      trireme run quickstart run.dir=runs/mine train.checkpoint_interval=20
      trireme run quickstart run.dir=runs/mine train.checkpoint_interval=20 --resume
      trireme run quickstart --from runs/mine@40 optim.lr=1e-4
    """
    from launcher.app import launch  # imports hydra, which the help does not need

    return launch.launch(request(given)).exit_code


def submit(given: Namespace) -> int:
    """Plans the recipe and submits it as one job to Slurm, or to the scheduler that executor= names. What
    belongs to the cluster is given by site=. The job runs a copy of the code that is made now, in the
    run directory: later changes do not reach it. The training on one device that the run is measured
    against is found among the stored runs, or submitted as a job of its own.

    The exit code is 0 when the job was submitted, and 2 when not.

    Examples:
      trireme submit quickstart site=box cluster.devices_per_node=2
      trireme submit quickstart site=box cluster.devices_per_node=2 --dry-run
      trireme submit llama3_8b_tp4_dp2_8xh100 site=none site.account=physics site.time_limit=12:00:00
    """
    from launcher.app import launch

    launch.submit(request(given))
    return 0
