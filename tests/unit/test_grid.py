"""The drawn grid against goldens, and what is left out when the terminal is small."""

import re
from pathlib import Path

import pytest

from launcher.contract.actions import PipelineShape, from_text
from launcher.contract.strategy import Schedule
from launcher.schedule.drawing.grid import MAX_ROWS, draw, phases
from launcher.schedule.passes import lower
from launcher_plugins.schedules.gpipe import GPipe
from launcher_plugins.schedules.interleaved_1f1b import Interleaved1F1B
from launcher_plugins.schedules.one_f_one_b import OneFOneB
from launcher_plugins.schedules.zb_h1 import ZBH1

GOLDEN = Path(__file__).parents[1] / "golden" / "schedules"
CASES: dict[str, tuple[Schedule, tuple[int, int, int], int]] = {
    "gpipe_p4_m4": (GPipe(), (4, 1, 4), 80),
    "1f1b_p4_m8": (OneFOneB(), (4, 1, 8), 80),
    "1f1b_p4_m2": (OneFOneB(), (4, 1, 2), 80),
    "1f1b_p64_m100_cropped": (OneFOneB(), (64, 1, 100), 100),
    "zb_h1_p4_m8": (ZBH1(), (4, 1, 8), 100),
    "interleaved_1f1b_p4_v2_m8": (Interleaved1F1B(), (4, 2, 8), 200),
    "interleaved_1f1b_p4_v2_m8_cropped": (Interleaved1F1B(), (4, 2, 8), 80),
}


def drawn(schedule: Schedule, sizes: tuple[int, int, int], width: int, *, color: bool = False) -> str:
    p, v, m = sizes
    shape = PipelineShape(num_pp_ranks=p, num_chunks=v, num_microbatches=m)
    return draw(lower(schedule, shape), shape, width=width, color=color)


@pytest.mark.parametrize("case", CASES)
def test_grid_is_as_drawn(case: str) -> None:
    schedule, sizes, width = CASES[case]
    assert drawn(schedule, sizes, width) + "\n" == (GOLDEN / f"{case}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [40, 57, 80, 100, 133])
def test_rows_fit_the_width(width: int) -> None:
    for sizes in ((4, 2, 8), (8, 2, 16), (20, 2, 100)):
        lines = drawn(Interleaved1F1B(), sizes, width).splitlines()
        rows = [line for line in lines if re.match(r" *(\d+|pp_rank|⋮) ", line)]
        assert max(map(len, rows)) <= width


def test_rows_and_slots_left_out_are_counted() -> None:
    lines = drawn(OneFOneB(), (20, 1, 20), 60).splitlines()
    assert len([line for line in lines if re.match(r" *\d+  ", line)]) == MAX_ROWS - 1
    num_drawn = (60 - len("pp_rank  ")) // 3 - 1
    assert lines[-2:] == ["left out: 5 of 20 pp_ranks", f"left out: {117 - num_drawn} of 117 slots"]


def test_grid_that_fits_leaves_nothing_out() -> None:
    text = drawn(OneFOneB(), (4, 1, 4), 80)
    assert "…" not in text
    assert "left out" not in text


def test_color_adds_nothing_but_color_and_blank_bars() -> None:
    for case in CASES.values():
        plain = drawn(*case)
        colored = drawn(*case, color=True)
        stripped = re.sub(r"\x1b\[[0-9;]*m", "", colored)
        assert colored != stripped
        assert without_bars(stripped) == without_bars(plain)


def without_bars(text: str) -> list[str]:
    """The lines with blank bars; a legend, whose samples are as wide as their colour, with single blanks."""
    lines = [line.replace("━", " ").rstrip() for line in text.splitlines()]
    return [re.sub(" +", " ", line) if "forward" in line else line for line in lines]


def test_color_tells_forward_from_backward_and_chunk_from_chunk() -> None:
    row = drawn(Interleaved1F1B(), (2, 2, 2), 120, color=True).splitlines()[1]
    assert len(set(re.findall(r"48;5;(\d+)m", row))) == 4


def test_color_tells_input_gradient_from_weight_gradient() -> None:
    row = drawn(ZBH1(), (2, 1, 2), 120, color=True).splitlines()[1]
    assert len(set(re.findall(r"48;5;(\d+)m", row))) == 3


def test_every_color_is_switched_off_again() -> None:
    for line in drawn(Interleaved1F1B(), (4, 2, 8), 80, color=True).splitlines():
        assert line.count("\x1b[97;48;5;") == line.count("\x1b[0m")


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        ("0F0 0B0", (0, 2, 0)),
        ("0F0 0F1 0B0 0B1", (1, 2, 1)),
        ("0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", (2, 4, 2)),
        ("0F0 0B0 0F1 0B1", (0, 4, 0)),
        ("0F0 0F1", (0, 2, 0)),
        ("0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2", (1, 6, 2)),
        ("1F0 1B0 1F1 1B1 1W0 1W1", (0, 5, 1)),
        ("", (0, 0, 0)),
    ],
)
def test_phases_of_one_rank(actions: str, expected: tuple[int, int, int]) -> None:
    assert phases(from_text(actions)) == expected
