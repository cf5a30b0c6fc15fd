"""Runs a function on several ranks, forked from this process so that none of them imports torch again.

What a rank would import in its first step (torch's optimizers import dynamo, 1.1 s) is imported here, once.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives

TIMEOUT_S = 60.0
"""Longest wait for a peer, and for the whole function."""


class RankError(AssertionError):
    """A rank raised; the text is its own traceback."""


class Vanished(BaseException):
    """Raised by a rank whose process ends here, without a result and while its peers still work."""


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = TIMEOUT_S,
    before: Callable[[int], None] = lambda rank: None,
) -> list[Any]:
    """The results of ``function(rank, *args)`` by rank, inside a gloo process group. ``before``: called on
    each rank before it opens a connection.

    The parent must not have called torch.set_num_threads: children would abort now and then.

    Raises:
        RankError: with the traceback of the first rank that raised.
    """
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        pipes = [fork.Pipe(duplex=False) for _ in range(num_ranks)]
        all_answered = fork.Event()
        children = [
            fork.Process(
                target=_child,
                args=(
                    rank,
                    num_ranks,
                    store,
                    pipes[rank][1],
                    all_answered,
                    timeout_s,
                    before,
                    function,
                    args,
                ),
            )
            for rank in range(num_ranks)
        ]
        for child, (_, writer) in zip(children, pipes, strict=True):
            child.start()
            writer.close()
        try:
            answers = [_answer(reader, rank, timeout_s) for rank, (reader, _) in enumerate(pipes)]
        finally:
            all_answered.set()
            for child in children:
                child.join(timeout=1)
                child.kill()
                child.join()
    failures = [text for text, _ in answers if text]
    own = [text for text in failures if " by peer" not in text]  # closed or reset
    if failures:
        raise RankError((own or failures)[0])
    return [result for _, result in answers]


def _answer(reader: Connection, rank: int, timeout_s: float) -> tuple[str, Any]:
    """The error text (empty: none) and the result of one rank."""
    if not reader.poll(timeout_s):
        return f"rank {rank} did not answer within {timeout_s:g} s", None
    try:
        answer: tuple[str, Any] = pickle.loads(reader.recv_bytes())
    except EOFError:
        return f"rank {rank} died without an answer", None
    return answer


def _child(
    rank: int,
    num_ranks: int,
    store: Path,
    pipe: Connection,
    all_answered: Event,
    timeout_s: float,
    before: Callable[[int], None],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what the parent left behind is neither collected nor counted here
    stays = False
    try:
        before(rank)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        answer = ("", function(rank, *args))
        stays = True  # a peer may still be connecting to it
    except Vanished:
        answer = ("", None)
    except BaseException:
        answer = (f"rank {rank}:\n{traceback.format_exc()}", None)
    pipe.send_bytes(pickle.dumps(answer))
    if stays:
        all_answered.wait(timeout_s)
    os._exit(0)  # without the destructors of a group whose peers may be gone
