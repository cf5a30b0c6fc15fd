"""Verbs about a run that somebody's disk or editor has damaged: refused or shown, never a traceback."""

import pytest

from launcher.cli.main import main

VERBS = ("report", "status", "logs", "wait", "cancel")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", ["n" * 300, "\x1b[31m"])
def test_a_name_that_no_run_has_is_refused_in_one_short_line(verb, name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([verb, name]) == 2
    error = capsys.readouterr().err
    assert "no run directory at" in error or "holds no plan.json" in error
    assert error.rstrip("\n").isprintable()
    assert len(error) < 300


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("plan", [b"\xff\x00", b"[]", b"{}", b""])
def test_a_damaged_plan_is_refused_or_not_needed(verb, plan, capsys, tmp_path):
    (tmp_path / "job.json").write_text("{}")
    (tmp_path / "plan.json").write_bytes(plan)
    main([verb, str(tmp_path)])
    error = capsys.readouterr().err
    if verb in ("report", "wait"):
        assert "plan.json cannot be read as a plan: " in error or "plan.json has version None" in error


@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
@pytest.mark.parametrize("status", ["[]", "{", '{"phase": "running"}', '{"phase": "running", "pid": "x"}'])
def test_a_damaged_status_is_shown_as_it_is(verb, status, capsys, tmp_path):
    (tmp_path / "job.json").write_text("{}")
    (tmp_path / "status.json").write_text(status)
    code = main([verb, str(tmp_path)])
    captured = capsys.readouterr()
    assert (code, captured.err.count("\n")) in ((0, 0), (2, 1))
    if verb == "status":
        assert ("running" if "running" in status else "failed") in captured.out
    if verb == "cancel" and "running" in status:
        assert captured.err == "the run was started on another machine: cancel it there\n"
