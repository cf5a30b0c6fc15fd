import pytest

from launcher.base.errors import LauncherError
from launcher.cli.arguments import split_flags, split_words

FLAGS = {"json": False, "base": True}


def test_without_words_the_recipe_is_the_quickstart():
    words = split_words([], FLAGS)
    assert (words.recipe, words.overrides) == ("quickstart", ())
    assert words.flags == {"json": False, "base": False}


def test_recipe_overrides_and_flags_are_told_apart_in_any_order():
    words = split_words(["--json", "parallel.tp=2", "mine", "+x=1", "~data", "--base", "runs/a"], FLAGS)
    assert words.recipe == "mine"
    assert words.overrides == ("parallel.tp=2", "+x=1", "~data")
    assert words.flags == {"json": True, "base": "runs/a"}


@pytest.mark.parametrize("path", ["./a=b.yaml", "../a=b.yaml", "/tmp/a=b/c.yaml", "~/a=b.yaml"])
def test_a_path_written_as_a_path_may_hold_an_equals_sign(path):
    assert split_words([path], FLAGS).recipe == path


def test_a_recipe_with_a_space_stays_one_word():
    assert split_words(["my run copy.yaml"], FLAGS).recipe == "my run copy.yaml"


def test_a_word_with_a_pasted_backslash_is_left_to_the_overrides():
    assert split_words(["\\parallel.tp=4"], FLAGS).overrides == ("\\parallel.tp=4",)


def test_two_recipes_are_refused():
    with pytest.raises(
        LauncherError, match=r"two recipes: 'a' and 'b'\. Give one; a setting is .* key=value"
    ):
        split_words(["a", "b"], FLAGS)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--jsn", r"unknown flag --jsn\. Did you mean --json\?"),
        ("--quite", r"unknown flag --quite\. Known: --base, --json, --help\."),
        ("-json", r"unknown flag -json\. Did you mean --json\?"),
        (
            "--parallel.tp=4",
            r"unknown flag --parallel\.tp=4\. Settings are written without dashes: parallel\.tp=4\.",
        ),
        ("--json=1", r"--json takes no value, given --json=1\. Write --json\."),
        ("--base", r"--base needs a value\. Write --base=VALUE\."),
        ("--base=", r"--base needs a value, given an empty one\. Write --base=VALUE\."),
        ("--base= ", r"--base needs a value, given an empty one\."),
    ],
)
def test_a_flag_that_cannot_be_taken_is_refused_with_what_to_write(word, hint):
    with pytest.raises(LauncherError, match=hint):
        split_words([word], FLAGS)


@pytest.mark.parametrize(
    "words", [["--base", "a", "--base", "b"], ["--base=a", "--base=a"], ["--json", "x", "--json"]]
)
def test_a_flag_given_twice_is_refused(words):
    with pytest.raises(LauncherError, match=r"--(base|json) is given twice\. Give it once\."):
        split_flags(words, FLAGS)


def test_an_empty_word_is_no_value():
    with pytest.raises(LauncherError, match=r"--base needs a value, given an empty one\."):
        split_flags(["--base", ""], FLAGS)


def test_a_flag_is_never_swallowed_as_the_value_of_another():
    with pytest.raises(LauncherError, match=r"--base needs a value"):
        split_words(["--base", "--json"], FLAGS)


def test_flags_alone_leave_every_other_word_in_order():
    rest, flags = split_flags(["runs/a", "--base=runs/b=c", "runs/d"], FLAGS)
    assert rest == ("runs/a", "runs/d")
    assert flags == {"base": "runs/b=c", "json": False}
