"""The folders that the reader trusts, in a file beside their own sites that nobody else can write.

{"folders": {"/home/me/lab": ["other_package:Net"]}} allows what recipes at and below /home/me/lab name:
modules and files of that folder, files elsewhere, and of the code elsewhere what is in the list. Of a folder
that whatever is unpacked lands below, such as /home/me, it allows only the recipes directly in it.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from launcher.base import resources
from launcher.base.files import json_object, read_regular


def trust_file() -> Path:
    """The file, links resolved."""
    return (resources.user_folder() / "trusted.json").resolve()


def is_trusted(folders: Sequence[Path], targets: Sequence[str]) -> bool:
    """Whether all of the folders are trusted, with the code outside of them in ``targets``. What is
    remembered of a folder is not believed once others than the reader, and root, can change what is in it.
    """
    if shared_by_all(folders) or _owned_by_others(folders):
        return False
    known = _read()
    covering = [[name for name in known if _covers(Path(name), folder)] for folder in folders]
    allowed = {target for names in covering for name in names for target in known[name]}
    return all(covering) and allowed.issuperset(targets)


def remember(folders: Sequence[Path], targets: Sequence[str]) -> None:
    """Adds folders that the reader trusts.

    Raises:
        OSError: when the file cannot be written.
    """
    known = {name: list(found) for name, found in _read().items()}
    for folder in folders:
        known[str(folder)] = sorted({*known.get(str(folder), ()), *targets})
    path = trust_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # 0600
    try:
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(json.dumps({"folders": known}, indent=1) + "\n")
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished)
        raise


def memory_problem(folders: Sequence[Path]) -> str:
    """Why a yes for these folders is not remembered; empty where it is."""
    folder = _owned_by_others(folders)
    return store_problem() or (f"{folder} belongs to somebody else" if folder else "")


def store_problem() -> str:
    """Why the file is not believed; empty where it is, and where there is none."""
    path = trust_file()
    try:
        found = path.stat()
    except OSError:
        return ""
    if found.st_uid != os.geteuid():
        return f"{path} is not believed, as it belongs to somebody else: remove it"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} is not believed, as others can write to it: see what is in it, then chmod 600 it"
    return ""


def shared_by_all(folders: Sequence[Path]) -> Path | None:
    """The first of the folders that everybody can write to, so that trust in it would be in everybody."""
    return next((folder for folder in folders if folder.stat().st_mode & stat.S_IWOTH), None)


def is_wide(folder: Path) -> bool:
    """Whether what others have made lands below a folder: the home folder, one above it, or that of temporary
    files. Trust in it is in the files directly in it alone."""
    home = resources.home_folder().resolve()
    return folder in (home, *home.parents, Path(tempfile.gettempdir()).resolve())


def _covers(trusted: Path, folder: Path) -> bool:
    return folder == trusted or (folder.is_relative_to(trusted) and not is_wide(trusted))


def _owned_by_others(folders: Sequence[Path]) -> Path | None:
    """The first of the folders that is neither the reader's nor root's."""
    return next((folder for folder in folders if folder.stat().st_uid not in (os.geteuid(), 0)), None)


def _read() -> Mapping[str, Sequence[str]]:
    if store_problem():
        return {}
    content = None
    with suppress(OSError):
        content = json_object(read_regular(trust_file()))
    folders = (content or {}).get("folders")
    if not isinstance(folders, dict):
        return {}
    return {
        name: [target for target in targets if isinstance(target, str)]
        for name, targets in folders.items()
        if isinstance(targets, list) and os.path.isabs(name)
    }
