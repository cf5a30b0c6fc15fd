"""Reads a user's own dataset in a process of its own.

The global random generators, which an item's code may draw from, are shared by all threads of a process. In a
process that does nothing else each item finds them as its seed has set them, and training finds its own
undisturbed; an item's code does not hold up the training by Python's lock, either.

The process is forked before the dataset is made, so that the two share no open file.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launcher.base.errors import ConfigError, JobError
from launcher.contract.config import LaunchConfig
from launcher.runtime.data.own_data import OwnData, Pick
from launcher.runtime.process.supervise import end_with

_FOR_THE_RANK = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that the whole group of processes gets; the rank may need data for a last step."""


class Reader:
    """The samples of ``data.target``. Any thread may ask for them."""

    def __init__(self, config: LaunchConfig) -> None:
        """Starts the process, which makes the dataset.

        Raises:
            ConfigError: when that fails.
        """
        self._target, self._lock = config.data.target, Lock()
        self._pipe, theirs = Pipe()
        parent = os.getpid()
        sys.stdout.flush()  # else both would write what waits there
        self._process = os.fork()
        if self._process == 0:
            self._pipe.close()
            _serve(config, theirs, parent)
        theirs.close()
        self._length: int = self._answer()

    def __len__(self) -> int:
        return self._length

    def read(self, picks: Sequence[Pick], *, inputs: bool, targets: bool) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some samples, each empty where it is not wanted.

        Raises:
            ConfigError: when an item cannot be read, or is not like the others.
        """
        first, second = self._ask("packed", picks, inputs, targets)
        return _unpacked(*first), _unpacked(*second)

    def fingerprints(self, indices: Sequence[int]) -> list[str]:
        """A hash of each of some items.

        Raises:
            ConfigError: as `read`.
        """
        return list(self._ask("fingerprints", indices))

    def close(self) -> None:
        """Ends the process."""
        if self._pipe.closed:
            return
        with suppress(ConnectionError):  # it has ended
            self._pipe.send(None)
        self._pipe.close()
        os.waitpid(self._process, 0)

    def _ask(self, *question: Any) -> Any:
        with self._lock:
            return self._answer(question)

    def _answer(self, question: Sequence[Any] | None = None) -> Any:
        try:
            if question is not None:
                self._pipe.send(question)
            answer, faults = pickle.loads(self._pipe.recv_bytes())  # noqa: S301 (our own process)
        except (EOFError, ConnectionError):
            self._pipe.close()
            code = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
            why = " (killed: it may have taken more memory than there is)" if code == -signal.SIGKILL else ""
            raise JobError(
                f"the process that reads data.target={self._target} ended with status {code}{why}; what it "
                "wrote is in the log of this rank"
            ) from None
        if faults:
            self.close()
            raise ConfigError(faults)
        return answer


def _serve(config: LaunchConfig, pipe: Connection, parent: int) -> NoReturn:
    """Answers the rank until it asks for nothing more, or ends."""
    try:
        end_with(parent)
        for number in _FOR_THE_RANK:
            signal.signal(number, lambda *_: None)  # one that is ignored would be so in what an item starts
        if torch.get_num_threads() > 1:  # OpenMP's threads do not outlive a fork
            torch.set_num_threads(1)
        faulthandler.register(signal.SIGALRM, file=2)
        is_language_model = config.model.family != "custom"
        seq_length = config.batch.seq_length if is_language_model else None
        with _stacks_when_slow(config.run.start_timeout_s):
            data = OwnData(config.data, seed=config.seed, seq_length=seq_length)
        answer: Any = len(data)
        while True:
            pipe.send_bytes(pickle.dumps((answer, ()), protocol=5))
            if (question := pipe.recv()) is None:
                break
            name, *arguments = question
            with _stacks_when_slow(config.run.timeout_s):
                answer = getattr(data, name)(*arguments)
    except ConfigError as error:
        traceback.print_exc()
        pipe.send_bytes(pickle.dumps((None, error.faults)))
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


@contextmanager
def _stacks_when_slow(timeout_s: float) -> Iterator[None]:
    """Halfway to the timeout of the rank, which then only tells that it waits for data, writes what the
    dataset is doing."""
    signal.setitimer(signal.ITIMER_REAL, timeout_s / 2)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)


def _unpacked(dtype: torch.dtype, shape: Sequence[int], elements: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(elements).view(dtype).reshape(shape)
