"""A timeline as a picture, as a trace and as a table."""

import csv
import io
import json
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from launcher.base import registry
from launcher.contract.actions import SB, SF, PipelineShape
from launcher.contract.strategy import Schedule
from launcher.schedule.drawing.svg import COLORS, svg_text
from launcher.schedule.drawing.timeline_files import COLUMNS, csv_text, trace_text
from launcher.schedule.passes import lower
from launcher.schedule.simulate import Costs, Timeline, simulate

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = 'it\'s <b>"bold"</b> & naïve ]]> 船'


def shape_of(p: int, v: int, m: int) -> PipelineShape:
    return PipelineShape(num_pp_ranks=p, num_chunks=v, num_microbatches=m)


def timeline_of(name: str, shape: PipelineShape, *, weight_s: float = 1.0) -> Timeline:
    """Uneven stages, so that no two sizes agree by chance."""
    schedule = registry.load(Schedule, name)
    forward = tuple(1.0 + 0.1 * stage for stage in range(shape.num_stages))
    weights = (weight_s,) * shape.num_stages if schedule.splits_backward else ()
    costs = Costs(forward_s=forward, backward_s=(1.5,) * len(forward), weight_s=weights, transfer_s=0.25)
    return simulate(lower(schedule, shape), shape, costs)


def boxes(picture: ElementTree.Element) -> list[tuple[float, float, float]]:
    """Left, top and right of every box."""
    paths = [path.get("d", "") for path in picture.iter(f"{SVG}path") if path.get("stroke") == "#fff"]
    found = [re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)v22H\1z", path) for path in paths]
    return [(float(left), float(top), float(right)) for path in found for left, top, right in path]


def texts(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


def test_a_box_for_every_action_is_to_scale() -> None:
    shape = shape_of(3, 1, 4)
    timeline = timeline_of("zb_h1", shape)
    drawn = sorted(
        boxes(ElementTree.fromstring(svg_text(timeline, shape, title="t"))), key=lambda b: b[1::-1]
    )
    spans = [(rank, start, end) for rank, row in enumerate(timeline.spans) for _, start, end in row]
    assert len(drawn) == len(spans) == 3 * 3 * 4
    pixels_per_s = (max(right for _, _, right in drawn) - 84) / timeline.makespan_s
    for (left, top, right), (rank, start, end) in zip(drawn, spans, strict=True):
        assert top == 92 + 34 * rank
        assert left == pytest.approx(84 + start * pixels_per_s, abs=0.02)
        assert right == pytest.approx(84 + end * pixels_per_s, abs=0.02)


def test_every_box_that_has_room_shows_its_microbatch() -> None:
    shape = shape_of(2, 1, 4)
    shown = texts(ElementTree.fromstring(svg_text(timeline_of("1f1b", shape), shape, title="t")))
    assert sorted(text for text in shown if re.fullmatch(r"\d", text)) == sorted("01" + "0123" * 4)


def test_chunks_are_letters_and_shades() -> None:
    shape = shape_of(2, 2, 2)
    picture = svg_text(timeline_of("interleaved_1f1b", shape), shape, title="t")
    assert {"0a", "0b", "1a", "1b", "forward, chunks a to b"} <= set(texts(ElementTree.fromstring(picture)))
    assert len(set(re.findall(r'<path fill="(rgb.*?)" stroke="#fff"', picture))) == 4


def test_the_legend_names_what_is_there() -> None:
    shape = shape_of(2, 1, 3)
    split = set(texts(ElementTree.fromstring(svg_text(timeline_of("zb_h1", shape), shape, title="t"))))
    whole = set(texts(ElementTree.fromstring(svg_text(timeline_of("1f1b", shape), shape, title="t"))))
    assert {"forward", "input gradient", "weight gradients", "idle", "steady phase"} <= split
    assert {"forward", "backward", "idle", "warm-up, cool-down"} <= whole
    assert not {"input gradient", "weight gradients"} & whole


def test_the_summary_gives_sizes_length_and_idle_share() -> None:
    shape = shape_of(1, 1, 1)
    shown = texts(ElementTree.fromstring(svg_text(timeline_of("1f1b", shape), shape, title="t")))
    assert "1 pipeline rank, 1 microbatch · 2.5 s · 0.0% idle" in shown


def test_phases_are_strips_below_the_boxes() -> None:
    shape = shape_of(3, 1, 4)
    picture = ElementTree.fromstring(svg_text(timeline_of("1f1b", shape), shape, title="t"))
    strips = [rect for rect in picture.iter(f"{SVG}rect") if rect.get("height") == "3"]
    # Ranks 0 and 1 have all three phases, the last rank only the steady one; and two in the legend.
    assert len(strips) == 3 + 3 + 1 + 2


def test_a_title_is_escaped_in_a_picture() -> None:
    shape = shape_of(2, 1, 2)
    picture = svg_text(timeline_of("gpipe", shape), shape, title=HOSTILE)
    assert texts(ElementTree.fromstring(picture))[0] == HOSTILE


def test_actions_of_no_length_are_left_out_of_a_picture() -> None:
    shape = shape_of(2, 1, 2)
    picture = svg_text(timeline_of("zb_h1", shape, weight_s=0.0), shape, title="t")
    assert len(boxes(ElementTree.fromstring(picture))) == 2 * 2 * 2


def test_a_large_picture_stays_small() -> None:
    shape = shape_of(16, 2, 64)
    picture = svg_text(timeline_of("interleaved_1f1b", shape), shape, title="t")
    assert len(picture) < 60 * 2 * shape.num_stages * 64
    assert ElementTree.fromstring(picture).get("width") == str(84 + 3000 + 32)


def test_colors_differ_in_lightness() -> None:
    lightness = sorted(0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in COLORS.values())
    assert min(b - a for a, b in pairwise(lightness)) > 30


def events_of(name: str, shape: PipelineShape, title: str = "t") -> list[dict]:
    return json.loads(trace_text(timeline_of(name, shape), shape, title=title))["traceEvents"]


def test_a_trace_has_a_named_thread_per_rank_and_a_slice_per_action() -> None:
    shape = shape_of(2, 2, 2)
    events, timeline = events_of("interleaved_1f1b", shape), timeline_of("interleaved_1f1b", shape)
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {0: "pp_rank 0", 1: "pp_rank 1"}
    slices = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert slices == [
        (rank, str(action), round(start * 1e6, 3), round((end - start) * 1e6, 3))
        for rank, spans in enumerate(timeline.spans)
        for action, start, end in spans
    ]
    chunks = {e["args"]["stage"]: e["args"]["chunk"] for e in events if e["ph"] == "X"}
    assert chunks == {0: 0, 1: 0, 2: 1, 3: 1}


@pytest.mark.parametrize(
    ("name", "sizes"), [("1f1b", (3, 1, 4)), ("zb_h1", (3, 1, 4)), ("interleaved_1f1b", (2, 2, 4))]
)
def test_a_trace_has_an_arrow_per_message_from_inside_its_slice_to_the_start_of_another(
    name: str, sizes: tuple[int, int, int]
) -> None:
    shape = shape_of(*sizes)
    events = events_of(name, shape)
    slices = [event for event in events if event["ph"] == "X"]
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    starts = [event for event in events if event["ph"] == "s"]
    lists = lower(registry.load(Schedule, name), shape)
    assert len(starts) == len(ends) == sum(action.kind in (SF, SB) for each in lists for action in each)
    for start in starts:
        end = ends[start["id"]]
        (source,) = [
            s for s in slices if s["tid"] == start["tid"] and s["ts"] <= start["ts"] < s["ts"] + s["dur"]
        ]
        (target,) = [s for s in slices if s["tid"] == end["tid"] and s["ts"] == end["ts"]]
        assert source["args"]["microbatch"] == target["args"]["microbatch"]
        step = 1 if start["name"] == "activation" else -1
        assert target["args"]["stage"] == source["args"]["stage"] + step
        assert end["ts"] - start["ts"] >= 0.25e6
        assert end["bp"] == "e"


def test_stages_of_one_rank_have_no_arrows() -> None:
    assert not [e for e in events_of("interleaved_1f1b", shape_of(1, 2, 2)) if e["ph"] in "sf"]


def test_a_title_is_the_name_of_the_traced_process() -> None:
    first = events_of("gpipe", shape_of(2, 1, 2), HOSTILE)[0]
    assert (first["name"], first["args"]["name"]) == ("process_name", HOSTILE)


def test_a_table_has_the_spans_to_the_last_digit() -> None:
    shape = shape_of(3, 1, 4)
    timeline = timeline_of("zb_h1", shape)
    header, *rows = csv.reader(io.StringIO(csv_text(timeline)))
    assert tuple(header) == COLUMNS == ("stage", "kind", "microbatch", "pp_rank", "start_s", "end_s")
    read = [
        (int(stage), kind, int(microbatch), int(rank), float(start_s), float(end_s))
        for stage, kind, microbatch, rank, start_s, end_s in rows
    ]
    assert read == [
        (*action, rank, start, end)
        for rank, spans in enumerate(timeline.spans)
        for action, start, end in spans
    ]
