"""./run.sh import: what it says of logs that are whole, odd, unreadable or missing."""

import json
import os
import time

import pytest

from bench.cli import import_logs
from bench.compare import selection
from bench.record import named, run_folder
from bench.record.importers import dialects
from bench.report import table_groups

LOG = "step:0/1 val_loss:9.0 train_time:0ms step_avg:nanms\nstep:1/1 val_loss:3.2 train_time:100ms step_avg:100.00ms\n"


@pytest.fixture
def logs(results, monkeypatch):
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(results / "results"))
    (results / "whole.txt").write_text(LOG)
    return results


def test_a_line_that_was_not_understood_is_shown_with_file_and_number_and_makes_its_runs_suspect(logs, capsys):
    (logs / "torn.log").write_text(LOG.replace("step:1", "step:1/1 train_ti\nstep:1"))
    assert import_logs.main(["modded-nanogpt", "torn.log"]) == 1
    out, err = capsys.readouterr()
    assert err == f"import: {logs}/torn.log:2: not understood: 'step:1/1 train_ti'\n"
    assert "unmatched metric lines  1\n" in out
    (folder,) = run_folder.find_runs([logs / "results"])
    run = run_folder.read(folder)
    assert (run["validity"], len(run["validity_reasons"]), run["doubts"][0]["instrument"]) == ("suspect", 1, "import")
    assert "the first is line 2: 'step:1/1 train_ti'" in run["validity_reasons"][0]


def test_a_link_to_itself_is_named(tmp_path):
    (tmp_path / "a.log").symlink_to("a.log")
    with pytest.raises(ValueError, match=r"a\.log: cannot be read"):
        import_logs.main(["nanogpt", str(tmp_path / "a.log")])


def test_of_many_lines_that_were_not_understood_the_first_twenty_are_shown(logs, capsys):
    (logs / "torn.log").write_text(LOG + "step:1/1 what\n" * 25)
    assert import_logs.main(["modded-nanogpt", "torn.log"]) == 1
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 21 and err[-1] == "import: and 5 more like it"


def test_files_without_a_run_say_what_they_are(logs, capsys):
    (logs / "empty.txt").write_text("")
    (logs / "noise.log").write_bytes(b"\x7fELF\0\0\1")
    (logs / "results.tsv").write_text("commit\tval_bpb\tmemory_gb\tstatus\tdescription\na\t0.9979\t44.0\tkeep\tb\n")
    (logs / "words.txt").write_text("seed=0\nexit_code=0\n")
    (logs / "other.log").write_text("iter 0: loss 9.1, time 10.00ms, mfu 1.00%\n")
    assert import_logs.main(["modded-nanogpt", ".", "results.tsv", "--json"]) == 0
    out, err = capsys.readouterr()
    expected = {"files": 6, "runs": 1, "complete": 1, "incomplete": 0, "not_a_run": 5}
    assert json.loads(out) == expected | {"unmatched_metric_lines": 0, "duplicates": 0}
    none = "it has no step lines of modded-nanogpt"
    assert [line.removeprefix(f"import: {logs}/") for line in err.splitlines()] == [
        "empty.txt: no run: the file is empty",
        "noise.log: no run: the file is not text",
        f"other.log: no run: {none}, but some of nanogpt: ./run.sh import nanogpt {logs}/other.log",
        f"words.txt: no run: {none}",
        "results.tsv: no run: a table, not a log: import the logs of its runs, or race the commits that it names",
    ]


def test_a_file_that_cannot_be_read_is_reported_and_the_others_are_imported(logs, capsys, monkeypatch):
    os.symlink(logs / "nowhere", logs / "broken.txt")
    os.mkfifo(logs / "pipe.log")
    monkeypatch.setattr(dialects, "MAX_BYTES", 1000)
    (logs / "huge.txt").write_text("x" * 1001)
    assert import_logs.main(["modded-nanogpt", "."]) == 1
    out, err = capsys.readouterr()
    beginnings = [line.split(": ", 2)[2][:16] for line in err.splitlines()]
    assert "1 new run folder" in out
    assert beginnings == ["cannot be read (", "is 0.0 GiB, too ", "cannot be read ("]
    with pytest.raises(ValueError, match="too large: cut out its lines of metrics"):
        import_logs.main(["modded-nanogpt", "huge.txt"])


def test_globs_are_understood_and_folders_without_logs_refused(logs, answer_of):
    (logs / "a").mkdir()
    (logs / "a" / "one.out").write_text(LOG)
    counts = answer_of(import_logs, "modded-nanogpt", "*.txt", "**/*.out")
    assert (counts["files"], counts["runs"], counts["duplicates"]) == (2, 2, 1)
    (logs / "none").mkdir()
    (logs / "none" / "read.me").write_text(LOG)
    for word, what in (("none", "it holds no log"), ("*.csv", "no such file"), ("missing", "no such file")):
        with pytest.raises(ValueError, match=what):
            import_logs.main(["modded-nanogpt", word])
    assert import_logs.main(["modded-nanogpt", "none/read.me", "--dry-run"]) == 0


def test_lines_that_stand_there_twice_are_reported(logs, capsys):
    (logs / "tee.log").write_text("".join(line * 2 for line in LOG.splitlines(keepends=True)))
    assert import_logs.main(["modded-nanogpt", "tee.log"]) == 0
    assert "2 lines repeat lines before them; each counts once" in capsys.readouterr().err


def test_two_files_of_one_run_are_reported_and_count_once(logs, capsys):
    (logs / "console.log").write_text(f"[Gloo] hello\n{LOG}PASS\n")
    assert import_logs.main(["modded-nanogpt", "console.log", "whole.txt", "--json"]) == 0
    out, err = capsys.readouterr()
    complaint = f"import: {logs}/whole.txt: its run (val_loss 9 to 3.2 at step 1 after 100 ms) is also in "
    assert err == f"{complaint}{logs}/console.log: compare and table --group count it once\n"
    assert (json.loads(out)["runs"], json.loads(out)["duplicates"]) == (2, 0)
    rows = [row | {"name": "x"} for row in named.rows_of_names([str(logs / "results")])]
    (group,) = table_groups.groups(rows)
    assert (group["n"], len(group["run_ids"])) == (1, 2)
    (arm, _) = selection.arms_from_words([str(logs / "results" / "imported")] * 2)
    assert len(arm.rows) == 1
    (logs / "whole.txt").write_text(f"Running PyTorch 2.10.0 compiled for CUDA 12.8\nUsing seed=7\n{LOG}")
    for names in ([str(logs / "*.*")] * 2, [f"{logs}/console.log,{logs}/whole.txt"] * 2):
        (arm, _) = selection.arms_from_words(names)
        assert [row["seed"] for row in arm.rows] == [7]  # the file that says more


def test_logs_without_code_or_a_track_are_grouped_by_name(logs):
    (logs / "other.txt").write_text(LOG.replace("3.2", "7.5"))
    assert import_logs.main(["modded-nanogpt", "other.txt", "whole.txt"]) == 0
    groups = table_groups.groups(named.rows_of_names([str(logs / "results")]))
    assert [(group["name"], group["n"]) for group in groups] == [("other", 1), ("whole", 1)]


@pytest.mark.parametrize(
    "text, reason",
    [
        (
            "step: 3/9 | val_loss:3.2 | train_time:38.6s\n",
            "1 of its lines look like metric lines, and none was understood",
        ),
        ("[METRICS] step: 269  |  loss: 4.01\n", "it has no step lines of modded-nanogpt"),
    ],
)
def test_a_log_of_a_program_that_is_not_known_says_so(logs, capsys, text, reason):
    (logs / "foreign.txt").write_text(text)
    import_logs.main(["modded-nanogpt", "foreign.txt"])
    assert f"{logs}/foreign.txt: no run: {reason}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        " " * 5000,
        "\t " * 3000,
        '{"step": 1, "x": 2},' * 20_000,
        "\r".join(f"step {num}/90000" for num in range(20_000)),
    ],
    ids=["blanks", "tabs", "JSON", "a bar of progress"],
)
def test_no_line_of_a_file_without_a_run_takes_long(logs, line):
    (logs / "crashed.txt").write_text(f"import os\n{line}x\n")
    started_s = time.process_time()
    import_logs.main(["modded-nanogpt", "crashed.txt"])
    assert time.process_time() - started_s < 10  # quadratic: minutes
