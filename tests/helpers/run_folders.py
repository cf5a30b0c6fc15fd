"""The folders of a run directory, which its ranks do not make."""

from pathlib import Path

from launcher.runs.store import SUBFOLDERS


def make_folders(run_dir: Path) -> None:
    """Makes those that are not there."""
    for name in SUBFOLDERS:
        (run_dir / name).mkdir(parents=True, exist_ok=True)
