import pytest

from launcher.base.errors import LauncherError
from launcher.cli.arguments import parse, request, split_flags
from launcher.cli.verbs import Flag

FLAGS = (Flag("--json", "as JSON"), Flag("--base RUN", "compared with it"), Flag("-f, --follow", ""))


def test_without_words_the_recipe_is_the_quickstart():
    given = parse("plan", [])
    assert (given.recipe, given.overrides) == ("quickstart", ())
    assert (given.json, given.out) == (False, None)


def test_recipe_overrides_and_flags_are_told_apart_in_any_order():
    given = parse("plan", ["--json", "parallel.tp=2", "mine", "+x=1", "~data", "--out", "plan.json"])
    assert given.recipe == "mine"
    assert given.overrides == ("parallel.tp=2", "+x=1", "~data")
    assert (given.json, given.out, given.draw) == (True, "plan.json", None)


@pytest.mark.parametrize("path", ["./a=b.yaml", "../a=b.yaml", "/tmp/a=b/c.yaml", "~/a=b.yaml"])
def test_a_path_written_as_a_path_may_hold_an_equals_sign(path):
    assert parse("plan", [path]).recipe == path


def test_a_recipe_with_a_space_stays_one_word():
    assert parse("plan", ["my run copy.yaml"]).recipe == "my run copy.yaml"


def test_a_word_with_a_pasted_backslash_is_left_to_the_overrides():
    assert parse("plan", ["\\parallel.tp=4"]).overrides == ("\\parallel.tp=4",)


def test_two_recipes_are_refused():
    with pytest.raises(
        LauncherError, match=r"two recipes: 'a' and 'b'\. Give one; a setting is .* key=value"
    ):
        parse("plan", ["a", "b"])


@pytest.mark.parametrize("words", [["mine", "--resume", "40"], ["--resume", "40"]])
def test_a_step_without_its_equals_sign_is_no_recipe(words):
    with pytest.raises(LauncherError, match=r"^--resume takes its value after =\. Write --resume=40\.$"):
        parse("run", words)
    assert parse("run", ["40", "--resume"]).recipe == "40"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--jsn", r"unknown flag --jsn\. Did you mean --json\?"),
        ("--quite", r"unknown flag --quite\. Known: --base, --follow, --json, --help\."),
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
        split_flags([word], FLAGS)


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
        split_flags(["--base", "--json"], FLAGS)


def test_flags_alone_leave_every_other_word_in_order():
    given, rest = split_flags(["runs/a", "--base=runs/b=c", "runs/d"], FLAGS)
    assert rest == ["runs/a", "runs/d"]
    assert vars(given) == {"base": "runs/b=c", "json": False, "follow": False}


@pytest.mark.parametrize("word", ["-f", "--follow"])
def test_a_flag_of_one_letter_is_the_flag(word):
    assert split_flags(["a", word], FLAGS)[0].follow is True
    with pytest.raises(LauncherError, match=r"--follow is given twice"):
        split_flags(["-f", word], FLAGS)


@pytest.mark.parametrize("word", ["--bas", "--fol=1", "--", "-1", "-x y", "-rf"])
def test_what_begins_with_a_dash_is_a_known_flag_or_refused(word):
    with pytest.raises(LauncherError, match=rf"unknown flag {word}\. (Did you mean --|Known: )"):
        split_flags([word, "a"], FLAGS)


def test_where_no_settings_are_taken_a_word_may_hold_an_equals_sign():
    assert parse("report", ["a=b", "~c", "--json"]).names == ("a=b", "~c")


def test_an_action_has_its_own_flags_and_words():
    given = parse("sweep", ["best", "--by", "loss", "mine"])
    assert (given.action, given.names, given.by) == ("best", ("mine",), "loss")
    with pytest.raises(LauncherError, match=r"unknown flag --by\. Known: --trust, --help\."):
        parse("sweep", ["plan", "--by", "loss"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"recipe: known are ls and show\.$"),
        (["shwo"], r"recipe shwo: known are ls and show\. Did you mean show\?$"),
    ],
)
def test_an_action_that_is_not_known_is_refused_with_the_known_ones(words, message):
    with pytest.raises(LauncherError, match=message):
        parse("recipe", words)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--config-name", "my own"], "A recipe is a word of its own, without the flag: 'my own'."),
        (["-cn", "quickstart"], "A recipe is a word of its own, without the flag: quickstart."),
        (["--config-name=quickstart"], "A recipe is a word of its own, without the flag: quickstart."),
        (["--config-name"], "A recipe is a word of its own, without the flag: RECIPE."),
        (["--config-path=x"], "A recipe is given by its path, such as ./FOLDER/RECIPE.yaml."),
        (["--dry-run"], "trireme plan RECIPE starts nothing."),
        (["--cfg", "job"], "trireme recipe show prints what a recipe says."),
    ],
)
def test_a_flag_of_hydra_or_of_another_verb_is_refused_with_what_to_type(words, hint):
    with pytest.raises(LauncherError) as refused:
        parse("run", words)
    assert str(refused.value) == f"unknown flag {words[0]}. {hint}"


@pytest.mark.parametrize("flag", ["--multirun", "-m"])
def test_a_sweep_asked_for_as_hydra_does_is_refused_with_what_to_write(flag):
    message = rf"unknown flag {flag}\. Several values are a sweep: trireme sweep run RECIPE key=A,B\."
    with pytest.raises(LauncherError, match=message):
        parse("run", ["quickstart", flag, "parallel.tp=1,2"])


def test_what_is_asked_for_is_read_from_the_flags():
    asked = request(
        parse("sweep", ["run", "mine", "a=1,2", "--at-once=3", "--untracked", "x,y", "--dry-run"])
    )
    assert (asked.recipe, asked.overrides, asked.at_once) == ("mine", ("a=1,2",), 3)
    assert (asked.untracked, asked.dry_run, asked.wants_baseline) == (("x", "y"), True, True)
    assert not request(parse("run", ["--no-baseline"])).wants_baseline
