"""A rank in its run directory: its part in the lock, which process it is, and room for its report."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from launcher.base.files import naming, unfinished_path, write_whole
from launcher.base.lock import Lease, LostLockError
from launcher.base.processes import birth_of, system_id
from launcher.contract.job import error_name, process_name
from launcher.runtime.process.environment import lock_token

_REPORT_BYTES = 16_384
"""Room for the report of a rank that fails, taken at its start: the disk may be full when it is written."""


def joined(run_dir: Path, rank: int, console: int) -> Lease | None:
    """This rank's part in the lock that its starter holds; None where it was started without one. A rank that
    finds it lost ends at once, and writes no more. ``console``: where its starter reads why.

    Does not return where the lock is another's by now.
    """

    def end(loss: LostLockError) -> None:
        with suppress(OSError):
            print(loss, file=sys.stderr, flush=True)
        with suppress(OSError):
            os.write(console, f"rank {rank} ends: {loss}\n".encode())
        os._exit(1)

    if not (token := lock_token()):
        return None
    lease = Lease(run_dir, token, end)
    lease.check()
    return lease


class Presence:
    """The traces of a rank in its run directory, which are there until it has ended well."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._process = run_dir / process_name(rank)
        self._room = unfinished_path(run_dir / error_name(rank))
        known = {"rank": rank, "pid": os.getpid(), "birth": birth_of(os.getpid()), "system": system_id()}
        write_whole(self._process, json.dumps(known) + "\n")
        with naming(self._room):
            self._room.write_bytes(bytes(_REPORT_BYTES))

    def close(self) -> None:
        """Removes them."""
        for path in (self._process, self._room):
            path.unlink(missing_ok=True)
