"""Bandwidths by the definitions of nccl-tests, and lines through measured times."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from launcher.bench.model import (
    PLANNED,
    algorithm_bandwidth,
    bus_bandwidth,
    fit,
    link_fit,
    operation_fit,
)
from launcher.contract.bench import OPERATIONS
from tests.helpers.bench_results import BANDWIDTH, LATENCY_S, SIZES, measurement, result
from tests.helpers.objects import there


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("all_reduce", 2 * 3 / 4),
        ("all_gather", 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("all_to_all", 3 / 4),
        ("gather", 3 / 4),
        ("scatter", 3 / 4),
        ("broadcast", 1),
        ("reduce", 1),
        ("send_recv", 1),
    ],
)
def test_the_bus_carries_the_share_that_nccl_tests_says(operation, expected):
    measured = replace(measurement(operation, num_ranks=4), num_bytes=1000, times_s=(3.0, 1.0, 2.0))
    assert algorithm_bandwidth(measured) == 500
    assert bus_bandwidth(measured) == 500 * expected


def test_a_link_is_found_again_from_times_that_follow_it():
    found = link_fit(result().measurements, "intra_node")
    assert there(found).latency_s == pytest.approx(LATENCY_S)
    assert there(found).bandwidth == pytest.approx(BANDWIDTH)
    assert there(found).worst_misfit == pytest.approx(0, abs=1e-9)


def test_the_line_of_an_operation_is_over_its_own_size():
    found = operation_fit([measurement("all_reduce", 4, size) for size in SIZES])
    assert there(found).latency_s == pytest.approx(6 * LATENCY_S)
    assert there(found).bandwidth == pytest.approx(BANDWIDTH / 1.5)


def test_errors_are_half_the_range_over_the_rounds():
    found = link_fit(result(noise=(0.9, 1.0, 1.2)).measurements, "intra_node")
    assert there(found).latency_s == pytest.approx(LATENCY_S)
    assert there(found).latency_error_s == pytest.approx(LATENCY_S * 0.15)
    assert there(found).bandwidth_error == pytest.approx(BANDWIDTH * (1 / 0.9 - 1 / 1.2) / 2)


def test_the_misfit_is_a_share_of_the_time():
    found = fit([(1, 0, (1.0,)), (1, 100, (2.0,)), (1, 200, (4.0,))])
    distances = [
        abs((found.latency_s + size / found.bandwidth) / time - 1)
        for size, time in ((0, 1), (100, 2), (200, 4))
    ]
    assert (found.misfit, found.worst_misfit) == (sorted(distances)[1], max(distances))
    assert there(found).worst_misfit > 0


def test_a_line_has_no_negative_latency_and_no_negative_bandwidth():
    steep = fit([(1, 10, (1.0,)), (1, 100, (20.0,))])
    assert steep.latency_s == 0
    falling = fit([(1, 10, (2.0,)), (1, 100, (1.0,))])
    assert falling.bandwidth == inf
    assert falling.latency_s > 0


def test_one_size_makes_no_line():
    assert operation_fit([measurement()]) is None
    assert link_fit(result(sizes=(4096,)).measurements, "intra_node") is None


def test_a_link_that_was_not_measured_is_not_found():
    assert link_fit(result().measurements, "inter_node") is None


def test_operations_are_those_that_plans_count_with_and_more():
    assert set(PLANNED) < set(OPERATIONS)
