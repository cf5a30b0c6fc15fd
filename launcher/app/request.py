"""What is asked for when a recipe is run, submitted or swept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Request:
    """A recipe and how it is to be started."""

    recipe: str
    """Name or path of the recipe."""
    overrides: tuple[str, ...] = ()
    """``key=value``, ``+key=value`` and ``~key``, in their order."""
    resume: bool = False
    """Go on with the run in run.dir."""
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
    at_once: int | None = None
    """Points of a submitted sweep that may run at a time; None: as many as the scheduler lets."""
