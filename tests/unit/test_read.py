import json
from pathlib import Path

import pytest

from launcher.base.errors import LauncherError
from launcher.contract.mesh import Mesh
from launcher.metrics.read import read_run
from launcher.typed.read import plain
from tests.helpers.fake_runs import FakeRun, write_records

TWO = FakeRun(mesh=Mesh(pp=1, dp=2, tp=1), kinds_ms={0: {"compute": 4, "dp": 1}, 1: {"compute": 3, "dp": 2}})


def records_file(run_dir: Path, rank: int = 0) -> Path:
    return run_dir / "metrics" / f"rank-{rank:05d}.jsonl"


def sabotaged(tmp_path: Path, line: int, **changes: object) -> Path:
    """A run of which one line of rank 0 has other values."""
    run_dir = TWO.write(tmp_path / "run")
    records = [plain(record) for record in TWO.records(0)]
    records[line] |= changes
    write_records(run_dir, 0, records)
    return run_dir


def append(run_dir: Path, rank: int, text: str) -> None:
    with records_file(run_dir, rank).open("a", encoding="utf-8") as file:
        file.write(text)


def restart(run_dir: Path, rank: int, first_step: int, num_steps: int) -> None:
    """Appends what a rank writes that is started again at ``first_step``."""
    records = TWO.records(rank)
    again = [records[0], *records[1 + first_step : 1 + first_step + num_steps]]
    append(run_dir, rank, "".join(json.dumps(plain(record)) + "\n" for record in again))


def test_reads_all_ranks_of_all_steps(tmp_path):
    records = read_run(TWO.write(tmp_path / "run"))
    assert [header.dp_rank for header in records.headers] == [0, 1]
    assert list(records.steps) == [0, 1, 2, 3, 4, 5]
    assert [row.kinds_ns["dp"] for row in records.steps[3]] == [1_000_000, 2_000_000]
    assert (records.num_torn_lines, records.num_incomplete_steps, records.num_starts) == (0, 0, 1)


def test_one_evaluation_per_step_though_every_last_stage_rank_writes_it(tmp_path):
    run = FakeRun(mesh=TWO.mesh, kinds_ms=TWO.kinds_ms, eval_loss=2.5)
    assert [record.loss for record in read_run(run.write(tmp_path / "run")).evals] == [2.5]


MEMORY = '{"type":"memory","step":6,"states_bytes":700,"peak_bytes":9000}\n'


def test_memory_is_read_where_a_rank_wrote_it(tmp_path):
    run_dir = TWO.write(tmp_path / "run")
    append(run_dir, 1, MEMORY)
    (found,) = read_run(run_dir).memory.items()
    assert (found[0], found[1].states_bytes, found[1].peak_bytes) == (1, 700, 9000)


def test_memory_of_an_earlier_start_is_forgotten(tmp_path):
    run_dir = TWO.write(tmp_path / "run")
    append(run_dir, 0, MEMORY)
    for rank in (0, 1):
        restart(run_dir, rank, 0, 6)
    assert read_run(run_dir).memory == {}


def test_memory_that_is_no_count_is_refused(tmp_path):
    run_dir = TWO.write(tmp_path / "run")
    append(run_dir, 0, MEMORY.replace("700", "-1"))
    with pytest.raises(
        LauncherError, match=r"memory: step, states_bytes, peak_bytes must be whole numbers of at least 0"
    ):
        read_run(run_dir)


def test_half_written_last_line_is_counted_and_left_out(tmp_path):
    run_dir = TWO.write(tmp_path / "run")
    append(run_dir, 1, '{"type":"step","st')
    records = read_run(run_dir)
    assert (records.num_torn_lines, len(records.steps)) == (1, 6)


def test_whole_last_line_without_its_newline_counts(tmp_path):
    run_dir = TWO.write(tmp_path / "run")
    path = records_file(run_dir)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    records = read_run(run_dir)
    assert (records.num_torn_lines, len(records.steps)) == (0, 6)


def test_broken_line_in_the_middle_names_file_and_line(tmp_path):
    run_dir = TWO.write(tmp_path / "run")
    path = records_file(run_dir)
    lines = path.read_text().splitlines()
    lines[2] = lines[2][:20]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(LauncherError, match=r"rank-00000\.jsonl:3: not a JSON object"):
        read_run(run_dir)


def test_broken_line_that_ends_in_a_newline_is_no_torn_line(tmp_path):
    run_dir = TWO.write(tmp_path / "run")
    append(run_dir, 0, '{"type":"step","st\n')
    with pytest.raises(LauncherError, match=r"rank-00000\.jsonl:8: not a JSON object"):
        read_run(run_dir)


def test_line_that_is_not_utf8_is_an_error(tmp_path):
    run_dir = TWO.write(tmp_path / "run")
    path = records_file(run_dir)
    path.write_bytes(path.read_bytes().replace(b'"step": 0', b'"step": \xff', 1))
    with pytest.raises(LauncherError, match=r"rank-00000\.jsonl:2: not a JSON object"):
        read_run(run_dir)


def test_step_that_a_rank_lacks_is_left_out_and_counted(tmp_path):
    run_dir = TWO.write(tmp_path / "run")
    write_records(run_dir, 1, [plain(record) for record in TWO.records(1)[:-1]])
    records = read_run(run_dir)
    assert (list(records.steps), records.num_incomplete_steps) == ([0, 1, 2, 3, 4], 1)


def test_steps_that_a_start_took_with_it_are_counted_once_for_every_time_they_were_lost(tmp_path):
    run_dir = TWO.write(tmp_path / "run")  # steps 0 to 5
    for first_step, num_steps in ((4, 1), (5, 0), (3, 2)):  # loses 4 and 5; nothing; 3 and 4
        for rank in (0, 1):
            restart(run_dir, rank, first_step=first_step, num_steps=num_steps)
    records = read_run(run_dir)
    assert (records.num_starts, records.num_lost_steps) == (4, 4)


def test_a_run_that_went_on_where_it_had_saved_lost_nothing(tmp_path):
    run_dir = TWO.write(tmp_path / "run")
    for rank in (0, 1):
        write_records(run_dir, rank, [plain(record) for record in TWO.records(rank)[:4]])
        restart(run_dir, rank, first_step=3, num_steps=3)
    assert read_run(run_dir).num_lost_steps == 0


def test_resumed_run_counts_from_its_newest_start(tmp_path):
    run_dir = TWO.write(tmp_path / "run")
    for rank in (0, 1):
        restart(run_dir, rank, first_step=4, num_steps=2)
    records = read_run(run_dir)
    assert (list(records.steps), records.num_starts) == ([4, 5], 2)


@pytest.mark.parametrize("num_headers", [(1, 1), (2, 2), (1, 0), (2, 1)])
def test_a_start_that_makes_no_step_hides_nothing_of_the_one_before(tmp_path, num_headers):
    """A rank that ends very early leaves not even a header."""
    run_dir = TWO.write(tmp_path / "run")
    append(run_dir, 1, MEMORY)
    for rank, number in enumerate(num_headers):
        for _ in range(number):
            restart(run_dir, rank, first_step=0, num_steps=0)
    records = read_run(run_dir)
    assert (list(records.steps), records.num_starts) == ([0, 1, 2, 3, 4, 5], 1 + max(num_headers))
    assert list(records.memory) == [1]
    assert len(records.newest) == 2


def test_a_start_in_which_one_rank_makes_a_step_is_the_newest(tmp_path):
    run_dir = TWO.write(tmp_path / "run")
    restart(run_dir, 0, first_step=4, num_steps=1)
    restart(run_dir, 1, first_step=4, num_steps=0)
    records = read_run(run_dir)
    assert (list(records.steps), records.num_incomplete_steps) == ([], 1)


def test_line_torn_by_a_kill_before_a_restart_is_counted(tmp_path):
    run_dir = TWO.write(tmp_path / "run")
    append(run_dir, 0, '{"type":"st\n')
    for rank in (0, 1):
        restart(run_dir, rank, first_step=4, num_steps=2)
    assert read_run(run_dir).num_torn_lines == 1


def test_ranks_of_different_starts_are_not_mixed(tmp_path):
    run_dir = TWO.write(tmp_path / "run")
    restart(run_dir, 0, first_step=4, num_steps=2)
    with pytest.raises(LauncherError, match=r"different starts: rank 1 at step 0, rank 0 at step 4\. Resume"):
        read_run(run_dir)


def test_kinds_that_do_not_sum_to_the_step_are_refused(tmp_path):
    run_dir = sabotaged(tmp_path, 3, duration_ns=5_000_001)
    problem = r"rank-00000\.jsonl:4: step 2: the kinds sum to 5000000 ns, but the step took 5000001 ns"
    with pytest.raises(LauncherError, match=problem):
        read_run(run_dir)


def test_calls_that_do_not_sum_to_their_kind_are_refused(tmp_path):
    run_dir = sabotaged(tmp_path, 1, collectives_ns={"dp": [999_999]})
    with pytest.raises(LauncherError, match="step 0: the dp calls sum to 999999 ns, but dp took 1000000 ns"):
        read_run(run_dir)


def test_kind_of_time_without_its_calls_is_refused(tmp_path):
    run_dir = sabotaged(tmp_path, 1, collectives_ns={})
    with pytest.raises(LauncherError, match="step 0: the dp calls sum to 0 ns, but dp took 1000000 ns"):
        read_run(run_dir)


def test_unknown_kind_of_time_is_refused(tmp_path):
    run_dir = sabotaged(tmp_path, 1, kinds_ns={"lunch": 5_000_000}, collectives_ns={})
    with pytest.raises(LauncherError, match="step 0: 'lunch' is not a kind of time"):
        read_run(run_dir)


@pytest.mark.parametrize("kinds", [{"compute": 6_000_000, "other": -1_000_000}, {"compute": 5e6}])
def test_times_that_are_no_whole_nanoseconds_are_refused(tmp_path, kinds):
    run_dir = sabotaged(tmp_path, 1, kinds_ns=kinds, collectives_ns={})
    with pytest.raises(LauncherError, match="step 0: times must be whole numbers of at least 0"):
        read_run(run_dir)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_receives": -1}, "times and counts must be whole numbers of at least 0"),
        ({"num_tokens": True}, "times and counts must be whole numbers of at least 0"),
        ({"num_samples": 0}, "a step trains at least 1 token of 1 sample"),
        ({"loss": "low"}, "loss, grad_norm and lr must be numbers or null"),
        ({"kinds_ns": 5}, "kinds_ns, collectives_ns and compute_ns hold times"),
    ],
)
def test_step_with_an_impossible_value_is_refused(tmp_path, changes, problem):
    with pytest.raises(LauncherError, match=f":2: step 0: {problem}"):
        read_run(sabotaged(tmp_path, 1, **changes))


def test_step_recorded_twice_is_refused(tmp_path):
    with pytest.raises(LauncherError, match=r":3: step 0 is recorded twice in one start"):
        read_run(sabotaged(tmp_path, 2, step=0))


def test_unknown_field_is_refused(tmp_path):
    with pytest.raises(LauncherError, match=r":2: .*unexpected keyword argument 'mood'"):
        read_run(sabotaged(tmp_path, 1, mood="good"))


def test_unknown_type_of_record_is_refused(tmp_path):
    with pytest.raises(LauncherError, match=":2: type 'stop' is none of header, step, eval, memory"):
        read_run(sabotaged(tmp_path, 1, type="stop"))


def test_evaluation_without_a_loss_is_refused(tmp_path):
    run_dir = TWO.write(tmp_path / "run")
    append(run_dir, 0, '{"type":"eval","step":6,"loss":null,"num_tokens":64}\n')
    with pytest.raises(LauncherError, match=r":8: evaluation at step 6: .* loss a number"):
        read_run(run_dir)


def test_other_version_is_refused_with_both_versions(tmp_path):
    with pytest.raises(LauncherError, match=r":1: records of version 2, this launcher reads 1"):
        read_run(sabotaged(tmp_path, 0, version=2))


def test_broken_header_is_refused(tmp_path):
    with pytest.raises(LauncherError, match=r":1: pp_rank=first: must be a whole number"):
        read_run(sabotaged(tmp_path, 0, pp_rank="first"))


def test_file_without_a_header_is_refused(tmp_path):
    run_dir = TWO.write(tmp_path / "run")
    write_records(run_dir, 0, [plain(TWO.records(0)[1])])
    with pytest.raises(LauncherError, match=r":1: the first record must be the header"):
        read_run(run_dir)


def test_empty_file_is_refused(tmp_path):
    run_dir = TWO.write(tmp_path / "run")
    records_file(run_dir).write_text("")
    with pytest.raises(LauncherError, match=r":1: no header: the rank ended before it had written one"):
        read_run(run_dir)


def test_missing_rank_is_named(tmp_path):
    run_dir = TWO.write(tmp_path / "run")
    records_file(run_dir, 0).unlink()
    with pytest.raises(LauncherError, match="no records of rank 0, but of rank 1"):
        read_run(run_dir)


def test_ranks_at_the_same_coordinates_are_refused(tmp_path):
    with pytest.raises(LauncherError, match="the coordinates of the 2 trainer ranks fill no mesh"):
        read_run(sabotaged(tmp_path, 0, dp_rank=1))


def test_coordinates_with_gaps_are_refused(tmp_path):
    with pytest.raises(LauncherError, match="the coordinates of the 2 trainer ranks fill no mesh"):
        read_run(sabotaged(tmp_path, 0, tp_rank=1))


def test_ranks_of_other_roles_make_no_steps(tmp_path):
    run_dir = TWO.write(tmp_path / "run")
    server = plain(TWO.records(0)[0]) | {"rank": 2, "role": "server"}
    write_records(run_dir, 2, [server])
    records = read_run(run_dir)
    assert [header.rank for header in records.headers] == [0, 1]


def test_run_of_servers_only_is_refused(tmp_path):
    run_dir = FakeRun(header={"role": "server"}).write(tmp_path / "run")
    with pytest.raises(LauncherError, match="no records of a trainer rank"):
        read_run(run_dir)


def test_ranks_that_saw_different_batches_are_refused(tmp_path):
    with pytest.raises(LauncherError, match="step 0 has 128 tokens in 8 samples, on rank 0 64 in 8"):
        read_run(sabotaged(tmp_path, 1, num_tokens=64))


def test_folder_without_records_is_refused(tmp_path):
    with pytest.raises(LauncherError, match=r"holds no metrics/rank-\*\.jsonl\. Give the directory of a run"):
        read_run(tmp_path)


def test_reads_paths_with_spaces_quotes_and_brackets(tmp_path):
    assert len(read_run(TWO.write(tmp_path / "a run; it's [0] ü")).steps) == 6
