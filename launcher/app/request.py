"""What is asked for when a recipe is run, submitted or swept."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.app.trust.question import Allow, never
from launcher.base.errors import LauncherError
from launcher.contract.config import LaunchConfig
from launcher.contract.inputs.record import ACCEPT


@dataclass(frozen=True, kw_only=True)
class Request:
    """A recipe and how it is to be started."""

    recipe: str
    """Name or path of the recipe."""
    overrides: tuple[str, ...] = ()
    """``key=value``, ``+key=value`` and ``~key``, in their order."""
    resume: bool = False
    """Resume the run in run.dir."""
    resume_step: int | None = None
    """The step of the checkpoint that it goes on from; None: the newest one's."""
    accepts_changed_inputs: bool = False
    """Resume although data or code are not what the run was started with."""
    overwrite: bool = False
    """Move aside what is in run.dir."""
    wants_baseline: bool = True
    """Find or make the run on one device that the speedup is measured against."""
    dry_run: bool = False
    """Print what would be started, and start nothing."""
    require_clean: bool = False
    """Submit no code that differs from its commit."""
    untracked: tuple[str, ...] = ()
    """Patterns of files that git does not track and that are copied into a submitted run."""
    allow: Allow = never
    """Decides whether what a recipe names may be run, where its folder is not trusted already."""
    at_once: int | None = None
    """Points of a submitted sweep that may run at a time; None: as many as the scheduler lets."""

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise LauncherError("--resume goes on with a run and --overwrite starts anew: give one of them")

    def check(self, config: LaunchConfig) -> None:
        """Refuses what contradicts the settings, or needs another one.

        Raises:
            LauncherError: naming the flag.
        """
        for flag, is_given in (("resume", self.resume), ("overwrite", self.overwrite)):
            if is_given and config.run.dir is None:
                raise LauncherError(f"--{flag} needs the directory it is about. Give run.dir=DIRECTORY.")
        if self.accepts_changed_inputs and not self.resume:
            raise LauncherError(f"{ACCEPT} is about a run that is resumed. Give --resume, too.")
        baseline = config.report.baseline
        if not self.wants_baseline and baseline not in ("auto", "none"):
            raise LauncherError(f"--no-baseline and report.baseline={baseline} exclude each other: give one.")
