"""The arithmetic of a speedup: where every device that is missing from it went.

With N tokens in a step of T seconds, throughput is X = N/T. Against a base on one device the
speedup is S = X_P/X_1 and the efficiency E = S/P. Let t_k be the time that all ranks together spend
in kind k during a step; the t_k sum to P*T. The device time per token that kind k costs more than
on one device, in units of the run's own time per token, is a number of devices:

    lost_k = (t_k,P / N_P - t_k,1 / N_1) / (T_P / N_P)

and these sum to (P*T_P/N_P - T_1/N_1) / (T_P/N_P) = P - S = P(1 - E): nothing is left over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from launcher.contract.records import REPLICATED, REPORT_KINDS, SINGLE_RANK

NOT_TRAINING = "not_training"
"""Devices that were allocated but drive no trainer rank: idle ones, and those of other roles."""
LEDGER_KINDS = (*REPORT_KINDS, NOT_TRAINING)
"""Every kind that a lost device can be booked under."""
Scaling = Literal["strong", "weak", "neither"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the measured steps of one run did, and what they took."""

    num_devices: int
    """Devices allocated, used or not."""
    num_ranks: int
    """Trainer ranks, one device each."""
    num_steps: int
    num_tokens: int
    """Over all measured steps; samples, where they are no sequences."""
    num_samples: int
    """Over all measured steps."""
    kinds_ns: Mapping[str, int]
    """Time by `REPORT_KINDS`, summed over the trainer ranks and the measured steps."""

    @property
    def rank_ns(self) -> float:
        """Time of all measured steps: the mean over the ranks of their summed durations.

        Ranks begin and end a step at slightly different moments; with their mean the kinds, summed
        over the ranks, give exactly ranks x time, so the ledger closes.
        """
        return sum(self.kinds_ns.values()) / self.num_ranks

    @property
    def step_s(self) -> float:
        """Mean time of a step (T)."""
        return self.rank_ns / self.num_steps / 1e9

    @property
    def tokens_per_s(self) -> float:
        """Throughput (X)."""
        return self.num_tokens / self.rank_ns * 1e9

    @property
    def samples_per_step(self) -> float:
        """Global batch."""
        return self.num_samples / self.num_steps


def speedup(run: Work, base: Work) -> float:
    """S = P_1 * X_P / X_1, for a base on P_1 ranks (normally 1; more count as that many ideal ones).

    >>> ms = 1_000_000
    >>> one = Work(num_devices=1, num_ranks=1, num_steps=1, num_tokens=8, num_samples=8,
    ...            kinds_ns={"compute": 90 * ms, "replicated": 10 * ms})
    >>> two = Work(num_devices=2, num_ranks=2, num_steps=1, num_tokens=8, num_samples=8,
    ...            kinds_ns={"compute": 92 * ms, "replicated": 20 * ms, "peer_wait": 13 * ms})
    >>> speedup(two, one), efficiency(two, one)
    (1.6, 0.8)
    >>> {kind: round(lost, 3) for kind, lost in lost_devices(two, one).items() if lost}
    {'compute': 0.032, 'replicated': 0.16, 'peer_wait': 0.208}
    """
    return base.num_ranks * run.tokens_per_s / base.tokens_per_s


def efficiency(run: Work, base: Work) -> float:
    """E = S/P, over the devices that were allocated."""
    return speedup(run, base) / run.num_devices


def lost_devices(run: Work, base: Work) -> dict[str, float]:
    """Devices lost by kind; they sum to P - S. Negative where the run spends less than the base."""
    time_per_token = run.rank_ns / run.num_tokens
    lost = {
        kind: (run.kinds_ns.get(kind, 0) / run.num_tokens - base.kinds_ns.get(kind, 0) / base.num_tokens)
        / time_per_token
        for kind in REPORT_KINDS
    }
    return lost | {NOT_TRAINING: float(run.num_devices - run.num_ranks)}


def device_shares(run: Work) -> dict[str, float]:
    """Devices occupied by kind, without a base; they sum to P."""
    shares = {kind: run.kinds_ns.get(kind, 0) / run.rank_ns for kind in REPORT_KINDS}
    return shares | {NOT_TRAINING: float(run.num_devices - run.num_ranks)}


def scaling(run: Work, base: Work) -> Scaling:
    """``strong``: the same global batch; ``weak``: the same batch per device.

    >>> one = Work(num_devices=1, num_ranks=1, num_steps=5, num_tokens=200, num_samples=200, kinds_ns={})
    >>> two = Work(num_devices=2, num_ranks=2, num_steps=5, num_tokens=400, num_samples=400, kinds_ns={})
    >>> scaling(two, one)
    'weak'
    """
    if run.samples_per_step == base.samples_per_step:
        return "strong"
    if run.samples_per_step * base.num_ranks == base.samples_per_step * run.num_devices:
        return "weak"
    return "neither"


def serial_fraction(base: Work, num_copies: int, num_ranks: int) -> float:
    """Share of the base's step that a layout does not divide.

    One-rank work is not divided at all. Replicated work (optimizer, clipping) is divided over the
    ranks that split the model, and repeated on its ``num_copies`` data-parallel copies. Of R ranks
    with c copies it takes c/R of its time; f + (1 - f)/R = c/R gives f = (c - 1)/(R - 1).

    >>> base = Work(num_devices=1, num_ranks=1, num_steps=1, num_tokens=1, num_samples=1,
    ...             kinds_ns={"compute": 90, "replicated": 8, "single_rank": 2})
    >>> serial_fraction(base, 4, 4), serial_fraction(base, 1, 4)
    (0.1, 0.02)
    """
    undivided = (num_copies - 1) / (num_ranks - 1) if num_ranks > 1 else 1.0
    serial_ns = base.kinds_ns.get(SINGLE_RANK, 0) + undivided * base.kinds_ns.get(REPLICATED, 0)
    return serial_ns / sum(base.kinds_ns.values())


def amdahl_speedup(serial: float, num_devices: int) -> float:
    """The largest speedup that a serial fraction allows: S = 1 / (f + (1 - f)/P).

    Source: G. Amdahl, "Validity of the single processor approach to achieving large scale computing
    capabilities", AFIPS 1967.

    >>> round(amdahl_speedup(0.1, 4), 4)
    3.0769
    """
    return 1 / (serial + (1 - serial) / num_devices)


def karp_flatt(measured_speedup: float, num_devices: int) -> float | None:
    """The serial fraction that would explain a measured speedup: e = (1/S - 1/P) / (1 - 1/P).

    It counts every loss, communication and waiting too. None on one device. Inverse of
    `amdahl_speedup`. Source: A. Karp, H. Flatt, "Measuring parallel processor performance",
    Communications of the ACM 33(5), 1990, equation 2.

    >>> round(karp_flatt(amdahl_speedup(0.1, 4), 4), 9)
    0.1
    """
    if num_devices == 1:
        return None
    return (1 / measured_speedup - 1 / num_devices) / (1 - 1 / num_devices)
