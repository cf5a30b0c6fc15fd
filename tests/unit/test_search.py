"""What a refusal offers works: every way is tried, and some are pasted into the command line."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

import pytest

from launcher.app.planning import make_plan
from launcher.base.errors import Fault, LauncherError, PlanError
from launcher.config.load import load
from launcher.config.paths import changed, value_at
from launcher.plan.build import build
from launcher.plan.rules.search import MAX_OFFERS, together, with_fixes
from tests.helpers.configs import compose_sound, launch_config

LLAMA3_8B, LLAMA3_70B = "llama3_8b_tp4_dp2_8xh100", "llama3_70b_tp8_pp4_64xh100"
LLAMA3_405B = "llama3_405b_16384xh100"
REFUSED = [
    "quickstart parallel.pp=3",
    "quickstart parallel.tp=3 parallel.pp=3",
    "quickstart parallel.num_chunks=2",
    "quickstart parallel.schedule=interleaved_1f1b",
    "quickstart parallel.num_chunks=1000000000 parallel.schedule=interleaved_1f1b",
    "quickstart parallel.layers_per_stage=[]",
    "quickstart parallel.layers_per_stage=[3,2]",
    "quickstart parallel.pp=8 parallel.layers_per_stage=auto",
    "quickstart model.num_layers=4 parallel.pp=8 'parallel.layers_per_stage=[1,1,1,1,1,1,1,1]'",
    "quickstart batch.micro_size=3",
    "quickstart batch.num_microbatches=3",
    "quickstart model.num_heads=3",
    "quickstart parallel.sequence_parallel=true",
    "quickstart parallel.rank_order=dp-tp parallel.dp=2",
    "quickstart parallel.schedule=gpipe batch.global_size=4096 batch.micro_size=16 parallel.pp=4",
    "quickstart parallel.pp=4 parallel.schedule=interleaved_1f1b parallel.num_chunks=2 batch.micro_size=8",
    f"{LLAMA3_8B} parallel.pp=3",
    f"{LLAMA3_8B} parallel.dp=7",
    f"{LLAMA3_8B} parallel.tp=1 parallel.dp=8 parallel.sequence_parallel=false",
    f"{LLAMA3_8B} parallel.recompute=none parallel.tp=8 parallel.dp=1 batch.micro_size=16",
    f"{LLAMA3_70B} batch.global_size=10",
    f"{LLAMA3_70B} cluster.nodes=7",
    f"{LLAMA3_70B} parallel.pp=6",
    f"{LLAMA3_70B} parallel.tp=3",
    f"{LLAMA3_70B} parallel.tp=4",
    f"{LLAMA3_70B} parallel.schedule=1f1b",
    f"{LLAMA3_405B} parallel.layers_per_stage=even",
]
"""Command lines that `trireme plan` refuses."""
_SET = re.compile(r" Set (.+?)\.(?= |$)")
_WAY = re.compile(r"[\w.]+=\S+(?: [\w.]+=\S+)*")
_UNSAFE = re.compile(r"[*{\[]")


PASTED = [REFUSED[0], f"{LLAMA3_70B} batch.global_size=10", f"{LLAMA3_405B} parallel.layers_per_stage=even"]


def refusal(words):
    """The faults of a command line; none when it can be planned."""
    recipe, *overrides = words
    try:
        make_plan(recipe, overrides)
    except PlanError as error:
        return error.faults
    return ()


def paths_left(config, sources):
    """The settings that are still at fault."""
    try:
        build(config, sources)
    except PlanError as error:
        return {fault.path for fault in error.faults}
    return set()


def _whole(path, other):
    """An override of which only the value is repeated, unless it stands in quotes."""
    return other if other[0] == "'" else f"{path}={other}"


def printed_ways(fault):
    """Every change that the text of a fault offers, as words to type."""
    ways = []
    for offers in _SET.findall(str(fault)):
        for offer in offers.split(", or "):
            first, *others = offer.split(" or ")
            path = shlex.split(first)[0].partition("=")[0]
            ways += [shlex.split(first), *(shlex.split(_whole(path, other)) for other in others)]
            assert not _UNSAFE.search(offer) or offer[0] == "'", f"a shell would expand {offer}"
    assert all(_WAY.fullmatch(" ".join(way)) for way in ways), f"no words to type: {ways}"
    return ways


@pytest.mark.parametrize("command", REFUSED)
def test_every_way_that_is_offered_mends_its_fault_and_brings_no_other(command):
    recipe, *overrides = shlex.split(command)
    composed = compose_sound(recipe, overrides)
    config = load(composed.values, composed.sources)
    with pytest.raises(PlanError) as refused:
        build(config, composed.sources)
    faults = refused.value.faults
    before = {fault.path for fault in faults}
    for fault in faults:
        assert 1 <= len(fault.ways) <= MAX_OFFERS, str(fault)
        assert len(printed_ways(fault)) == len(fault.ways)
    for way in {str(way): way for fault in faults for way in fault.ways}.values():
        mends = {fault.path for fault in faults if way in fault.ways}
        left = paths_left(changed(config, way), composed.sources)
        assert not mends & left, f"{way} does not mend {mends & left}"
        assert left <= before, f"{way} breaks {left - before}"


@pytest.mark.parametrize("command", PASTED)
def test_what_is_printed_works_when_it_is_pasted(command):
    words = shlex.split(command)
    (fault,) = refusal(words)
    for way in printed_ways(fault):
        assert refusal([*words, *way]) == ()


def test_ways_of_faults_that_hang_together_mend_them_all():
    """A pp of 3 neither divides the layers nor fills the devices; mending one alone helps nobody."""
    faults = refusal([LLAMA3_8B, "parallel.pp=3"])
    assert len(faults) == 2
    for fault in faults:
        for way in printed_ways(fault):
            assert refusal([LLAMA3_8B, "parallel.pp=3", *way]) == ()


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (f"{LLAMA3_70B} batch.global_size=10", "batch.global_size=10: num_microbatches = "),
        (
            f"{LLAMA3_70B} batch.global_size=10",
            "Set batch.global_size=8 or 16, or parallel.schedule_options.uneven_groups=true. "
            "[override batch.global_size=10]",
        ),
        ("quickstart batch.micro_size=3", "batch.micro_size=3: global_size = 16 must be a multiple of "),
        (
            f"{LLAMA3_70B} cluster.nodes=7",
            "cluster.nodes=7: dp = devices / (tp * pp) = 56 / (8 * 4) is not whole",
        ),
        (
            f"{LLAMA3_70B} parallel.schedule=1f1b",
            "parallel.schedule=1f1b: num_chunks = 5; this schedule runs one model",
        ),
        (f"{LLAMA3_8B} precision=bf16 device=v100_32gb", "Set precision=fp16."),
        (
            "gpt2_124m_dp8_8xa100 precision.compute=bf16 device=v100_32gb",
            "Set precision.compute=fp16 or fp32.",
        ),
    ],
)
def test_a_fault_names_the_setting_that_was_typed(command, text):
    assert any(text in str(fault) for fault in refusal(command.split()))


@pytest.mark.parametrize("words", [["batch.global_size=4000000"], ["batch.global_size=250002"]])
def test_a_schedule_too_long_to_plan_is_refused_with_its_arithmetic(words):
    (fault,) = refusal(["quickstart", *words])
    total = words[0].partition("=")[2]
    assert str(fault).startswith(f"batch.global_size={total}: num_microbatches = ")
    assert "forwards are more than the 250000 that can be planned; global_size counts samples" in str(fault)
    assert "Set batch.global_size=" in str(fault)


def judged(*rules):
    """A judge of some rules: (path, whether a configuration keeps it, ways)."""
    return lambda config: [
        Fault(path, "given", "rule", ways=tuple(ways)) for path, is_kept, ways in rules if not is_kept(config)
    ]


def content(_config):
    """A last judge with nothing to add."""
    return ()


PP, TP = "parallel.pp", "parallel.tp"


def test_a_way_that_another_rule_refuses_is_joined_with_what_that_rule_proposes():
    judge = judged(
        (PP, lambda config: config.parallel.pp == 4, [{PP: 4}]),
        (TP, lambda config: config.parallel.tp == config.parallel.pp, [{TP: 4}]),
    )
    config = launch_config()
    (fault,) = with_fixes(config, judge(config), judge, content)
    assert fault.ways == ({PP: 4, TP: 4},)


@pytest.mark.parametrize("num_faults", [1, 2, 4, 5])
def test_one_way_is_told_out_of_all_faults_however_many_there_are(num_faults):
    wanted = {PP: 4, TP: 8, "batch.micro_size": 5, "batch.global_size": 35, "seed": 7}
    rules = [
        (path, lambda config, path=path: value_at(config, path) == wanted[path], [{path: wanted[path]}])
        for path in [*wanted][:num_faults]
    ]
    judge = judged(*rules)
    way = together(launch_config(), judge(launch_config()), judge, content)
    assert way == (dict([*wanted.items()][:num_faults]) if num_faults > 1 else {})
    hopeless = judged(*rules, ("name", lambda _: False, [{"name": "other"}]))
    assert together(launch_config(), hopeless(launch_config()), hopeless, content) == {}


def test_a_way_that_only_adds_to_another_is_left_out():
    judge = judged((PP, lambda config: config.parallel.pp == 4, [{PP: 4}, {PP: 4, TP: 2}, {PP: 3}]))
    (fault,) = with_fixes(launch_config(), judge(launch_config()), judge, content)
    assert fault.ways == ({PP: 4},)


def test_a_fault_without_a_way_out_says_so():
    judge = judged((PP, lambda _: False, [{PP: 4}]))
    (fault,) = judge(launch_config())
    (told,) = with_fixes(launch_config(), [fault], judge, content)
    assert told.ways == ()
    assert told.fix == "No change of up to 3 settings was found that every rule accepts."


def test_a_fault_that_has_its_words_keeps_them_and_what_they_say():
    judge = judged((PP, lambda _: False, [{PP: 4}]))
    (fault,) = judge(launch_config())
    worded = replace(fault, fix="Ask elsewhere.")
    assert with_fixes(launch_config(), [worded], judge, content) == (worded,)


@pytest.mark.parametrize("way", [{"parallel.nothing": 1}, {"nothing.at.all": 1}])
def test_a_way_that_sets_what_does_not_exist_is_not_offered(way):
    judge = judged((PP, lambda config: config.parallel.pp == 4, [way, {PP: 4}]))
    (fault,) = with_fixes(launch_config(), judge(launch_config()), judge, content)
    assert fault.ways == ({PP: 4},)


def test_an_option_of_a_plugin_can_be_part_of_a_way():
    judge = judged(
        (PP, lambda config: config.architecture.options.get("servers") == 2, [{"architecture.servers": 2}])
    )
    (fault,) = with_fixes(launch_config(), judge(launch_config()), judge, content)
    assert fault.ways == ({"architecture.servers": 2},)


def test_a_way_that_cannot_be_judged_is_not_offered():
    def judge(config):
        if config.parallel.pp == 2:
            raise LauncherError("unknown")
        return judged((PP, lambda config: config.parallel.pp == 4, [{PP: 2}, {PP: 4}]))(config)

    (fault,) = with_fixes(launch_config(), judge(launch_config()), judge, content)
    assert fault.ways == ({PP: 4},)


def test_the_last_judge_is_asked_only_about_what_breaks_no_rule_and_is_heeded():
    asked = []

    def last(config):
        asked.append(config.parallel.pp)
        return judged((TP, lambda config: config.parallel.pp != 2, [{TP: 8}]))(config)

    judge = judged((PP, lambda config: config.parallel.pp in (2, 4), [{PP: 3}, {PP: 2}, {PP: 4}]))
    (fault,) = with_fixes(launch_config(), judge(launch_config()), judge, last)
    assert fault.ways == ({PP: 4},)
    assert set(asked) == {2, 4}
