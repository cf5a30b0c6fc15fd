import pytest

from launcher.base.errors import LauncherError
from launcher_plugins.executors.slurm import nodelist
from launcher_plugins.executors.slurm.nodelist import expand

FORMS = {
    "alpha": "alpha",
    "alpha,beta,gamma": "alpha beta gamma",
    "linux[1,2]": "linux1 linux2",
    "nodeA,nodeB[001,003],nodeC": "nodeA nodeB001 nodeB003 nodeC",
    "host[001,003-004,006]": "host001 host003 host004 host006",
    "node[8-11]": "node8 node9 node10 node11",
    "node[08-11]": "node08 node09 node10 node11",
    "node[099-101]": "node099 node100 node101",
    "rack[0-1]node[1-2]": "rack0node1 rack0node2 rack1node1 rack1node2",
    "rack[0-1]node[3]": "rack0node3 rack1node3",
    "juwels[07-08]i": "juwels07i juwels08i",
    "a[1-2]-ib0,b.example.org": "a1-ib0 a2-ib0 b.example.org",
    "d05-[41-42]": "d05-41 d05-42",
    "[1-2]a": "1a 2a",
    "node[0-1]": "node0 node1",
}
WRONG = {
    "": "a name is missing",
    "a,": "a name is missing",
    ",a": r"at ',a'",
    "a,,b": r"at ',b'",
    "node[1-": r"at '\[1-'",
    "node]": r"at '\]'",
    "node[1-2": r"at '\[1-2'",
    "node[[1]]": r"at '\[\[1\]\]'",
    "node[]": "'' is neither a number nor FIRST-LAST",
    "node[1,]": "'' is neither a number",
    "node[a-b]": "'a-b' is neither a number",
    "node[1-2-3]": "'1-2-3' is neither a number",
    "node[3-1]": "'3-1' is no rising range with one width",
    "node[01-003]": "'01-003' is no rising range with one width",
    "node[0-99999999]": "more than 65536 nodes",
    "a[0-999]b[0-999]": "more than 65536 nodes",
    "no de": r"a name holds letters, digits, \. _ and -",
    "a;b": r"a name holds letters",
    "a\nb": r"a name holds letters",
}


@pytest.mark.parametrize("text", FORMS)
def test_every_form_stands_for_its_names(text):
    assert list(expand(text)) == FORMS[text].split()


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_form_is_refused_and_never_taken_for_one_node(text):
    with pytest.raises(LauncherError, match=WRONG[text]):
        expand(text)


def test_the_refusal_shows_the_text_and_a_right_form():
    with pytest.raises(LauncherError, match=r"^'node\[3-1\]' is no list .* such as node\[01-03,07\],gpu1\.$"):
        expand("node[3-1]")


def test_as_a_program_it_prints_one_name_a_line(capsys):
    assert nodelist.main(["n[1-2]"]) == 0
    assert capsys.readouterr().out == "n1\nn2\n"


@pytest.mark.parametrize("words", [[], ["n[1-"]])
def test_as_a_program_it_fails_on_a_wrong_form(capsys, words):
    assert nodelist.main(words) == 1
    assert "is no list of nodes" in capsys.readouterr().err
