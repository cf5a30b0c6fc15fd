"""Where the ranks of a run meet."""

import fcntl
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from launcher.contract.job import RENDEZVOUS_FILE
from launcher.runtime.process.environment import ProcessRank
from launcher.runtime.process.rendezvous import init_process_group
from launcher_plugins.executors.torchrun import _fresh_rendezvous
from tests.helpers.ranks import run_ranks

TIMEOUT = timedelta(seconds=4321)


def met(rank: int) -> tuple[float, int]:
    """The timeout of the store, and a sum over the ranks that met in the file."""
    dist.barrier()
    dist.destroy_process_group()  # that of the test
    init_process_group("gloo", ProcessRank(rank=rank, local_rank=rank, world_size=2), TIMEOUT)
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, rank)
    store: Any = _get_default_store()
    return store.timeout.total_seconds(), sum(ranks)


def test_ranks_meet_in_a_file_and_wait_there_as_long_as_the_run_is_set_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rendezvous").write_text("of an earlier start")
    monkeypatch.setenv(RENDEZVOUS_FILE, _fresh_rendezvous(str(tmp_path)))
    assert run_ranks(2, met) == [(TIMEOUT.total_seconds(), 1)] * 2


def test_where_files_cannot_be_locked_the_ranks_meet_in_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> None:
        raise OSError("Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    place = Path(_fresh_rendezvous(str(tmp_path)))
    assert place.parent == tmp_path
    assert place.name.startswith("trireme-")
    assert place.stat().st_mode & 0o777 == 0o600
    monkeypatch.undo()
    monkeypatch.setenv(RENDEZVOUS_FILE, str(place))
    assert run_ranks(2, met) == [(TIMEOUT.total_seconds(), 1)] * 2
