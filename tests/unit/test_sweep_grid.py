"""Which points a sweep has."""

import pytest

from launcher.app.sweep.grid import MAX_POINTS, grid
from launcher.app.sweep.point import Point
from launcher.base.errors import ConfigError
from launcher.config.compose import group_files


def files_of(group):
    return group_files("quickstart", group)


def labels(*words, section=None):
    return [point.label for point in grid(words, section, files_of)[0]]


def test_every_combination_is_a_point_the_first_setting_changing_slowest():
    found, dims = grid(("parallel.pp=1,2", "parallel.schedule=gpipe,1f1b", "seed=3"), None, files_of)
    assert [point.overrides for point in found] == [
        ("seed=3", f"parallel.pp={pp}", f"parallel.schedule={schedule}")
        for pp in (1, 2)
        for schedule in ("gpipe", "1f1b")
    ]
    assert dims == "parallel.pp (2) x parallel.schedule (2)"


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("seed=range(1,9,2)", ["1", "3", "5", "7"]),
        ("seed=range(3)", ["0", "1", "2"]),
        ("optim.lr=range(0.1,0.4,0.1)", ["0.1", "0.2", "0.3"]),
        ("seed=choice(4,5)", ["4", "5"]),
        ("seed=sort(3,1,2)", ["1", "2", "3"]),
        ("optim.lr=1e-5,0.010", ["1e-5", "0.010"]),
        ("optim.betas=[0.9,0.95],[0.8,0.9]", ["[0.9,0.95]", "[0.8,0.9]"]),
        ("name='a,b','c d'", ["'a,b'", "'c d'"]),
        ("run.tag=/foo/a\\=10,b", ["/foo/a\\=10", "b"]),
        ("model=glob(gpt2*)", ["gpt2_124m"]),
        ("+site.env.A=x,null", ["x", "null"]),
    ],
)
def test_choices_and_ranges_are_hydras_and_each_value_stays_as_it_is_written(word, values):
    other = "train.num_steps=1,2"
    found = [point.overrides[0] for point in grid((word, other), None, files_of)[0][::2]]
    assert found == [f"{word.partition('=')[0]}={value}" for value in values]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("seed=1",), r"sweep=seed=1: gives no setting several values\. Write some as key=A,B"),
        ((), r"sweep=\(nothing\): gives no setting several values"),
        (("seed=1,2", "seed=3"), r"seed=1,2: is given the one value 3, too\. Give either\."),
        (("seed=1,2", "seed=3,4"), r"seed=1,2: is swept twice\. Give all of its values in one word\."),
        (("seed=1,2,1",), r"seed=1,2,1: gives 1 twice\. Give every value once\."),
        (("run.dir=a,b",), r"run\.dir=a,b: every run has a directory of its own inside of the sweep's\."),
        (("optim.lr=interval(0,1)",), r"optim\.lr=interval\(0,1\): cannot be enumerated"),
        (("seed=range(1,9,0)",), r"seed=range\(1,9,0\): cannot be enumerated: a sweep takes A,B,\.\.\. or"),
        (("seed=range(9,1)",), r"seed=range\(9,1\): cannot be enumerated"),
        (("seed=shuffle(1,2)",), r"a sweep runs in the order that is written\. Leave out shuffle\."),
        (("model=glob(zz*)",), r"model=glob\(zz\*\): no file of the group model matches"),
        (("seed=range(1,1e9)",), rf"a sweep has at most {MAX_POINTS} points\. Give fewer values\."),
        (("seed=1,",), r"cannot be parsed as an override"),
        (("a b=1,2",), r"is not a valid key"),
    ],
)
def test_words_that_make_no_sweep_are_refused_with_what_to_write(words, fault):
    with pytest.raises(ConfigError, match=fault):
        grid(words, None, files_of)


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError, match=r"2 faults:\n.*seed=1,1: .*\n.*run\.dir=a,b: "):
        grid(("seed=1,1", "run.dir=a,b"), None, files_of)


def test_a_recipes_own_grids_are_joined_and_no_point_is_there_twice():
    section = [
        {"parallel": {"schedule": "gpipe,1f1b", "pp": 2}},
        {"parallel": {"schedule": "1f1b", "pp": "2,4"}},
    ]
    assert labels(section=section) == [
        "schedule=gpipe pp=2",
        "schedule=1f1b pp=2",
        "schedule=1f1b pp=4",
    ]
    assert all(point.overrides[0] == "~sweep" for point in grid((), section, files_of)[0])


def test_a_word_takes_the_place_of_the_recipes_axis_and_others_multiply_it():
    section = {"parallel": {"pp": "1,2,4", "sequence_parallel": True}}
    assert labels("parallel.pp=2", "seed=7,8", section=section) == [
        "sequence_parallel=true seed=7",
        "sequence_parallel=true seed=8",
    ]


@pytest.mark.parametrize(
    "section", ["pp=1,2", [], {}, [{"parallel": {"pp": [1, 2]}}], {"parallel": {"pp": None}}]
)
def test_a_section_that_is_no_group_of_axes_is_refused(section):
    with pytest.raises(ConfigError, match=r"sweep.*: must be a group of axes, or a list of such groups"):
        grid((), section, files_of)


def test_a_short_name_is_as_long_as_tells_settings_apart():
    assert (
        labels("model.name=a,b", "data.name=c,d", "cluster.nodes=1,2")[0]
        == "model.name=a data.name=c nodes=1"
    )


@pytest.mark.parametrize(
    ("label", "folder"),
    [
        ("path=/foo/a\\=10", "03-path_foo_a_10"),
        ("x=../../etc", "03-x_.._.._etc"),
        ("x=a;rm -rf", "03-x_a_rm-rf"),
        ("x=ü", "03-x"),
    ],
)
def test_the_name_of_a_directory_is_harmless(label, folder):
    assert Point(overrides=(), label=label, index=3).folder(16) == folder
