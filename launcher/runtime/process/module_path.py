"""Where a user's own modules are found: after the standard library and what is installed.

    standard library    site-packages    frozen copies    editable installations    live folders

A file of the user's folders, which others may have put there, is never imported in place of a module that
torch or this program means. A frozen copy comes before the folder that it was made of, where that is
installed in editable form. PYTHONPATH, which the user has set, keeps its place before all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from launcher.contract.inputs.user_code import OF_INSTALLED
from launcher.contract.job import FROZEN_ROOTS


def add_source_roots(roots: Sequence[str]) -> None:
    """Adds the folders of a plan, all frozen or none, to the module path of this process and of those that
    it forks or spawns."""
    if all(Path(root).parent.match(FROZEN_ROOTS) for root in roots):
        installed = [number for number, entry in enumerate(sys.path) if Path(entry).name in OF_INSTALLED]
        place = installed[-1] + 1 if installed else len(sys.path)
        sys.path[place:place] = roots
    else:
        sys.meta_path.insert(sys.meta_path.index(PathFinder), _InstalledFirst(roots))
        sys.path += roots


class _InstalledFirst(MetaPathFinder):
    """Finds what is installed before what is in the user's folders. What is installed in editable form may
    have a finder of its own, which comes after that of the module path."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = frozenset(roots)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module of that name that is installed, unless it is inside of a package, or only a folder."""
        if path is not None:
            return None
        others = [entry for entry in sys.path if entry not in self._roots]
        found = [PathFinder.find_spec(fullname, others, target)]
        for finder in sys.meta_path[sys.meta_path.index(PathFinder) + 1 :]:
            found.append(finder.find_spec(fullname, None, target))
        return next((spec for spec in found if spec and spec.loader), None)
