import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.contract.records import REPORT_KINDS
from launcher.report.ledger import (
    LEDGER_KINDS,
    Work,
    amdahl_speedup,
    device_shares,
    efficiency,
    karp_flatt,
    lost_devices,
    scaling,
    serial_fraction,
    speedup,
)

SECOND = 10**9


def work(kinds_ns: dict[str, int], **changes: int) -> Work:
    values = {"num_devices": 1, "num_ranks": 1, "num_steps": 10, "num_tokens": 1600, "num_samples": 160}
    return Work(kinds_ns=kinds_ns, **(values | changes))


@st.composite
def works(draw: st.DrawFn, max_ranks: int) -> Work:
    num_ranks = draw(st.integers(1, max_ranks))
    kinds = {kind: draw(st.integers(0, 10**12)) for kind in REPORT_KINDS}
    return Work(
        num_devices=num_ranks + draw(st.integers(0, 3)),
        num_ranks=num_ranks,
        num_steps=draw(st.integers(1, 100)),
        num_tokens=draw(st.integers(1, 10**9)),
        num_samples=draw(st.integers(1, 10**6)),
        kinds_ns=kinds | {"compute": kinds["compute"] + 1},
    )


@settings(deadline=None)
@given(run=works(16), base=works(1))
def test_lost_devices_sum_to_devices_times_lost_efficiency(run, base):
    lost = lost_devices(run, base)
    expected = run.num_devices * (1 - efficiency(run, base))
    # S may be huge where the run is absurdly faster than its base: scale the tolerance with it.
    assert sum(lost.values()) == pytest.approx(expected, abs=1e-9 * (run.num_devices + speedup(run, base)))


@settings(deadline=None)
@given(run=works(16), base=works(4))
def test_lost_devices_sum_to_devices_minus_speedup_for_a_base_of_several_ranks(run, base):
    gap = run.num_devices - speedup(run, base)
    assert sum(lost_devices(run, base).values()) == pytest.approx(
        gap, abs=1e-9 * (1 + abs(gap) + run.num_devices)
    )


@settings(deadline=None)
@given(run=works(16))
def test_occupied_devices_sum_to_the_devices(run):
    assert sum(device_shares(run).values()) == pytest.approx(run.num_devices)


def test_a_run_against_itself_loses_nothing():
    one = work({"compute": 90, "replicated": 10})
    assert speedup(one, one) == 1
    assert lost_devices(one, one) == dict.fromkeys(LEDGER_KINDS, 0.0)


def test_throughput_and_step_time_are_means_over_the_ranks():
    run = work({"compute": 39 * SECOND, "peer_wait": SECOND}, num_ranks=4, num_devices=4)
    assert (run.step_s, run.tokens_per_s) == (1.0, 160.0)


def test_ledger_of_a_hand_computed_case():
    # Base: 1 s per step. Run: 2 ranks, 0.625 s per step, so S = 1.6 and 0.4 devices are lost.
    base = work({"compute": 9 * SECOND, "replicated": SECOND})
    run = work(
        {"compute": int(9.2 * SECOND), "replicated": 2 * SECOND, "peer_wait": int(1.3 * SECOND)},
        num_ranks=2,
        num_devices=2,
    )
    lost = {kind: value for kind, value in lost_devices(run, base).items() if value}
    assert speedup(run, base) == pytest.approx(1.6)
    assert lost == pytest.approx({"compute": 0.032, "replicated": 0.16, "peer_wait": 0.208})


def test_a_speedup_above_the_devices_is_a_negative_loss():
    base = work({"compute": 10 * SECOND})
    run = work({"compute": 8 * SECOND}, num_ranks=2, num_devices=2)
    assert efficiency(run, base) == 1.25
    assert lost_devices(run, base)["compute"] == pytest.approx(-0.5)


def test_allocated_but_idle_devices_count_against_the_efficiency():
    base = work({"compute": 10 * SECOND})
    run = work({"compute": 10 * SECOND}, num_ranks=4, num_devices=8)
    assert (speedup(run, base), efficiency(run, base)) == (4.0, 0.5)
    assert lost_devices(run, base)["not_training"] == 4


def test_doubled_batch_at_half_the_steps_per_second_is_weak_scaling_without_speedup():
    # Batch 40 at 5 steps per second on one device, batch 80 at 2.5 on two: the same samples per second.
    one = work({"compute": 10 * SECOND}, num_steps=50, num_samples=2000, num_tokens=20_000)
    two = work(
        {"compute": 20 * SECOND},
        num_steps=25,
        num_samples=2000,
        num_tokens=20_000,
        num_ranks=2,
        num_devices=2,
    )
    assert speedup(two, one) == 1.0
    assert scaling(two, one) == "weak"


@pytest.mark.parametrize(
    ("num_samples", "expected"), [(160, "strong"), (640, "weak"), (320, "neither"), (80, "neither")]
)
def test_scaling_follows_from_the_batches(num_samples, expected):
    four = work({}, num_devices=4, num_ranks=4, num_samples=num_samples)
    assert scaling(four, work({})) == expected


def test_idle_devices_count_in_the_batch_per_device():
    assert scaling(work({}, num_devices=8, num_ranks=4, num_samples=640), work({})) == "neither"


def test_replicated_work_is_serial_on_data_parallel_ranks_only():
    base = work({"compute": 90, "replicated": 10})
    assert serial_fraction(base, 4, 4) == 0.1
    assert serial_fraction(base, 1, 4) == 0.0


@pytest.mark.parametrize(("num_copies", "num_ranks"), [(2, 4), (2, 8), (4, 8), (1, 8), (8, 8)])
def test_serial_fraction_gives_the_time_of_replicated_work(num_copies, num_ranks):
    # Split over ranks/copies ranks, the 10 of 100 take 10 * copies / ranks; the 90 are divided fully.
    base = work({"compute": 90, "replicated": 10})
    step = 90 / num_ranks + 10 * num_copies / num_ranks
    serial = serial_fraction(base, num_copies, num_ranks)
    assert amdahl_speedup(serial, num_ranks) == pytest.approx(100 / step)


def test_one_rank_work_is_serial_under_every_layout():
    assert serial_fraction(work({"compute": 90, "single_rank": 10}), 1, 4) == 0.1


def test_all_work_is_serial_on_one_rank():
    assert serial_fraction(work({"compute": 90, "replicated": 10}), 1, 1) == 0.1


@given(serial=st.floats(0, 1), num_devices=st.integers(2, 10_000))
def test_karp_flatt_inverts_amdahl(serial, num_devices):
    measured = amdahl_speedup(serial, num_devices)
    assert karp_flatt(measured, num_devices) == pytest.approx(serial, abs=1e-9)


def test_karp_flatt_is_undefined_on_one_device():
    assert karp_flatt(1.0, 1) is None
