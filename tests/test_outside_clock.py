"""The launcher's own clock: what it stamps and doubts, that a verdict is one of both, and clocks that are moved."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import comparing
import fork_server
import pytest
import real_runs
from cases import slow

from bench.cli import compare
from bench.compare import eligibility, verdict
from bench.machine import stamped_pipes
from bench.record import outside_clock, printed_times, verification
from bench.record.rows import row_of

MS = 1_000_000


def edges(*segments_ms, late_ms=()):
    """Returns the edges of segments in ms: training, validation, training and so on."""
    t_ns, marks = 0, [(0, 0, "start")]
    for number, segment_ms in enumerate(segments_ms):
        t_ns += segment_ms * MS
        marks.append((t_ns, 0, "go" if number % 2 else "pause"))
    marks[-1] = (t_ns, 0, "stop")
    return [(t_ns, dict(late_ms).get(number, 0) * MS, kind) for number, (t_ns, _, kind) in enumerate(marks)]


def clock_of(segments_ms, claimed_s, gaps_ns=(), late_ms=()):
    return outside_clock.clock_from_edges(edges(*segments_ms, late_ms=late_ms), gaps_ns, claimed_s)


def doubts(clock):
    return [instrument for instrument, _ in outside_clock.doubts(clock)]


TEN_S = (0, 100, 5000, 110, 5000, 105)  # a validation at step 0, one in the middle, one at the end


def test_training_is_what_passes_between_validations():
    clock = clock_of(TEN_S, 10.0)
    assert (clock["outside_s"], clock["outside_train_s"]) == (10.315, 10.0)
    assert (clock["validations_s"], clock["validation_at_start_s"]) == ([0.1, 0.11, 0.105], 0.1)
    assert doubts(clock) == []


def test_a_run_that_ends_without_a_last_validation_has_its_edges():
    clock = clock_of((0, 100, 5000), 5.0)
    assert (clock["outside_train_s"], clock["validations_s"]) == (5.0, [0.1])


@pytest.mark.parametrize("claimed_s", [5.0, 9.5, 9.7, 9.9, 10.1, 20.0])
def test_a_clock_that_counts_otherwise_is_doubted(claimed_s):
    """50 ms and 1 ms for each of three validations: 9.9 of 10 s is seen, 1 %."""
    assert doubts(clock_of(TEN_S, claimed_s)) == ["outside clock"]
    ((_, doubt),) = outside_clock.doubts(clock_of(TEN_S, claimed_s))
    assert f"{claimed_s:.3f} s" in doubt and "10.000 s" in doubt and "tolerance 0.053 s" in doubt
    assert doubts(clock_of(TEN_S, 9.96)) == doubts(clock_of(TEN_S, 10.04)) == []  # rounding and short delays


def test_what_the_reader_says_of_its_own_lateness_accuses_nobody():
    assert doubts(clock_of(TEN_S, 9.8, late_ms={3: 60}.items())) == ["launcher"]


@pytest.mark.parametrize("kinds", [[], ["start"], ["start", "pause", "pause", "stop"], ["pause", "go", "stop"]])
def test_edges_that_are_no_whole_series_are_doubted(kinds):
    clock = outside_clock.clock_from_edges([(number, 0, kind) for number, kind in enumerate(kinds)], [], 1.0)
    assert clock["outside_s"] is None and doubts(clock) == ["outside clock"]


def test_validations_that_grow_once_the_run_trains_are_doubted():
    honest = (0, 100, 900, 104, 900, 99, 900, 108, 900, 100)
    assert doubts(clock_of(honest, 3.6)) == []
    busy = (0, 100, 900, 150, 900, 100, 900, 190, 900, 100)
    assert doubts(clock_of(busy, 3.6)) == []
    windows_grow = (0, 100, 900, 130, 900, 160, 900, 190, 900, 200)
    assert doubts(clock_of(windows_grow, 3.6)) == []
    windows_double = (0, 100, 900, 200, 900, 240, 900, 280, 900, 290)
    assert doubts(clock_of(windows_double, 3.6)) == []
    cheat = (0, 100, 900, 310, 900, 315, 900, 308, 900, 310)
    ((who, doubt),) = outside_clock.doubts(clock_of(cheat, 3.6))
    assert who == "validations" and "0.310 s, against 0.100 s at step 0" in doubt
    assert outside_clock.doubts(clock_of(cheat, 3.6), is_busy=True) == []
    longer = (0, 100, 900, 1010, 900, 1015, 900, 1008, 900, 1010)
    assert [who for who, _ in outside_clock.doubts(clock_of(longer, 3.6), is_busy=True)] == ["validations"]


@pytest.mark.parametrize("held_up_ms", [303, 900])
def test_one_validation_of_two_that_the_machine_held_up_is_no_reproach(held_up_ms):
    """141 and 303 ms were seen in one of 239 honest runs at load."""
    for later_ms in ((held_up_ms, 150), (150, held_up_ms)):
        assert doubts(clock_of((0, 141, 900, later_ms[0], 900, later_ms[1]), 1.8)) == []
    assert doubts(clock_of((0, 141, 900, 900, 900, 850), 1.8)) == ["validations"]


def test_a_launcher_that_was_not_run_doubts_the_machine():
    gaps_ns = [(1000 * MS, 4000 * MS), (60_000 * MS, 90_000 * MS)]  # the second after the run
    clock = clock_of(TEN_S, 10.0, gaps_ns)
    ((who, doubt),) = outside_clock.doubts(clock)
    assert (who, clock["frozen_s"]) == ("launcher", 3.0) and "not run for 3.00 of the 10.31 s" in doubt


def test_a_stopped_launcher_cannot_make_the_outside_time_shorter():
    """All edges come at once when it goes on: the first may have come as early as it last looked."""
    late = [(9000 * MS, 9000 * MS, kind) for _, _, kind in edges(*TEN_S)]
    clock = outside_clock.clock_from_edges(late, [(200 * MS, 9000 * MS)], 5.0)
    assert clock["outside_s"] == 9.0 and doubts(clock) == ["launcher"]


# ---- the reader


class Kept:
    """A pipe whose pieces are kept."""

    def __init__(self, path):
        self.fd, self.pieces = stamped_pipes.opened(str(path)), []

    def take(self, data, t_ns, late_ns):
        self.pieces.append((data, t_ns, late_ns))


def test_what_comes_through_a_pipe_is_stamped_at_once_and_read_to_its_end(tmp_path):
    kept = Kept(tmp_path / "pipe")
    fd = os.open(tmp_path / "pipe", os.O_WRONLY)
    with stamped_pipes.StampedPipes([kept]):
        before_ns = time.perf_counter_ns()
        os.write(fd, b"start\n")
        time.sleep(0.3)
        os.write(fd, b"stop\n")
    assert b"".join(data for data, _, _ in kept.pieces) == b"start\nstop\n"
    (_, first_ns, late_ns), (_, last_ns, _) = kept.pieces[0], kept.pieces[-1]
    assert before_ns <= first_ns and first_ns - late_ns - before_ns < 50 * MS and last_ns - first_ns > 250 * MS


STOPPED = """
import os, sys, time
from bench.machine import stamped_pipes
class Kept:
    def __init__(self): self.fd, self.late_ns = stamped_pipes.opened(sys.argv[1]), 0
    def take(self, data, t_ns, late_ns): self.late_ns = max(self.late_ns, late_ns)
kept = Kept()
with stamped_pipes.StampedPipes([kept]) as pipes:
    print("reads", flush=True)
    time.sleep(2.5)
print(max(end - begin for begin, end in pipes.gaps_ns), kept.late_ns)
"""


@pytest.mark.slow
def test_a_reader_that_was_stopped_knows_it_and_how_late_it_was(tmp_path):
    path = tmp_path / "pipe"
    command = [sys.executable, "-c", STOPPED, str(path)]
    with subprocess.Popen(command, cwd=real_runs.REPO, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "reads\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        fd = os.open(path, os.O_WRONLY)
        os.write(fd, b"start\n")
        time.sleep(1.0)
        process.send_signal(signal.SIGCONT)
        gap_ns, late_ns = map(int, process.stdout.read().split())
    os.close(fd)
    assert gap_ns > 800 * MS and late_ns > 1000 * MS


# ---- the printed times of a script


def lines(*steps, val_every=5):
    """Returns rows of steps.csv.  Each step: (wall ms, counted ms, ms that its line came late); validations: 100 ms.

    A script whose line is late was kept from printing it, and its clock ran on meanwhile.
    """
    t_ns, time_ms, rows = 0, 0.0, [{"step": 0, "train_time_ms": 0.0, "val_line_t_ns": 0}]
    for step, (wall_ms, counted_ms, *late_ms) in enumerate(steps, 1):
        t_ns, time_ms = t_ns + wall_ms * MS + sum(late_ms) * MS, time_ms + counted_ms
        row = {"step": step, "train_time_ms": time_ms, "line_t_ns": t_ns, "val_line_t_ns": None}
        time_ms += sum(late_ms)
        if step % val_every == 0:
            t_ns += 100 * MS
            row |= {"val_line_t_ns": t_ns, "train_time_at_val_ms": time_ms}
        rows.append(row)
    return rows


def judge_rows(rows, late_ns=None):
    times = printed_times.PrintedTimes(rows)
    clock = times.clock(late_ns or {})
    return times.doubts(clock)[0], clock


@pytest.mark.parametrize(
    ("frac", "num_steps", "val_every"),
    [(0.5, 100, 5), (0.95, 100, 5), (0.97, 100, 5), (0.98, 100, 5), (0.99, 2000, 100)],
)
def test_a_share_of_the_time_that_is_not_counted_is_seen(frac, num_steps, val_every):
    """100 steps of 50 ms; 4 of 5 steps before each validation are sure: 5 s * 0.02 * 0.8 is 80 ms, above 71."""
    ((doubt, *_), clock) = judge_rows(lines(*[(50, 50 * frac)] * num_steps, val_every=val_every))
    assert doubt.startswith("it claims less time than its lines took") and f"{clock['claimed_train_s']:.2f} s" in doubt


@pytest.mark.parametrize("late_at", [1, 4, 5, 6, 99])
def test_one_late_line_is_no_reproach(late_at):
    honest = [(50, 50)] * 100
    late = [*honest[: late_at - 1], (50, 50, 200), *honest[late_at:]]
    assert judge_rows(lines(*late))[0] == [] == judge_rows(lines(*honest))[0]
    clock, usual = judge_rows(lines(*late))[1], judge_rows(lines(*honest))[1]
    assert clock["outside_s"] == pytest.approx(usual["outside_s"] + 0.2)  # that it lost, and counted
    assert clock["claimed_train_s"] == pytest.approx(usual["claimed_train_s"] + 0.2)


def test_lines_that_a_late_reader_got_at_once_accuse_nobody():
    """It did not run for 300 ms: six lines have the same stamp, and it knows."""
    rows = lines(*[(50, 50)] * 40, val_every=20)
    for row in rows[10:16]:
        row["line_t_ns"] = rows[15]["line_t_ns"]
    reasons, clock = judge_rows(rows, {rows[15]["line_t_ns"]: 250 * MS})
    assert reasons == [] and doubts(clock) == ["launcher"]
    assert judge_rows(rows)[0][0].startswith("it counts more time than passed")  # a script that printed them in a burst


def test_lines_of_another_run_that_are_printed_at_once_are_still_doubted():
    doubts, _ = judge_rows(lines(*[(1, 50)] * 40))
    assert doubts[0].startswith("it counts more time than passed") and "s too much in a row" in doubts[0]


def test_work_in_the_first_steps_that_a_clock_leaves_out_is_seen():
    """Ten steps are not counted, of which two compile; the cheat trains four steps in each of the others."""

    def rows(first_ms):
        printed = lines(*[(900, 900)] * 2, *[(first_ms, first_ms)] * 8, *[(50, 50)] * 30, val_every=10)
        restart_ms, end_ns = printed[10]["train_time_at_val_ms"], 0
        for row in printed[1:]:
            row["wall_ms"], end_ns = (row["line_t_ns"] - end_ns) / MS, row["val_line_t_ns"] or row["line_t_ns"]
            row["train_time_ms"] -= restart_ms if row["step"] > 10 else 0
            row.pop("train_time_at_val_ms", None)
        printed[10]["train_time_at_val_ms"] = 0.0
        return printed

    assert printed_times.restarted_at(rows(50)) == 10
    for first_ms, is_doubted in ((50, False), (60, False), (200, True)):
        times = printed_times.PrintedTimes(rows(first_ms), 10)
        doubts, _ = times.doubts(times.clock({}))
        assert doubts == [] or is_doubted and "is 200 ms, that of the steps that it counts 50 ms" in doubts[0]
        assert bool(doubts) == is_doubted


def test_time_between_steps_in_which_the_script_waited_for_a_core_is_the_machines():
    rows = lines(*[(50, 47)] * 60)
    assert judge_rows(rows)[0]
    end_ns = rows[-1]["line_t_ns"]
    for waited_s, num_doubts in ((0.05, 1), (0.2, 0)):
        waits_ns = [(0, 7), (end_ns, 7 + round(waited_s * 1e9))]
        times = printed_times.PrintedTimes(rows)
        clock = times.clock({}, waits_ns=waits_ns)
        assert clock["ranks_waited_s"] == pytest.approx(waited_s)
        ended = [(0, 7 + 10**10), *waits_ns[1:]]  # a child that had waited longer, and has ended
        assert times.clock({}, waits_ns=ended)["ranks_waited_s"] == pytest.approx(max(0.0, waited_s - 10))
        doubts, disturbances = times.doubts(clock)
        assert (len(doubts), len(disturbances)) == (num_doubts, 1 - num_doubts)
    assert "waited 0.20 s for a CPU core" in disturbances[0]


# ---- both clocks


def with_clock(run, outside_s, validations_s=1.0, **changes):
    clock = clock_of(TEN_S, 10.0) | {"outside_s": outside_s, "outside_validations_s": validations_s} | changes
    return run | {"referee": {"clock": clock}}


def raced(a_s, b_s, a_validations_s, b_validations_s):
    """Returns the Comparison of runs with these claimed seconds and seconds in validations."""
    pairs = zip(comparing.raced(a_s, b_s), ((a_s, a_validations_s), (b_s, b_validations_s)), strict=True)
    arms = [
        [with_clock(run, own_s + val_s, val_s) for run, own_s, val_s in zip(runs, *arm_times_s, strict=True)]
        for runs, arm_times_s in pairs
    ]
    return comparing.compare(*arms)


A_S, B_S = [10.0, 10.01, 9.99, 10.005], [7.13, 7.12, 7.14, 7.125]


def test_time_that_an_arm_moves_into_its_validations_makes_it_no_faster():
    cheat = raced(A_S, B_S, [0.3] * 4, [3.17, 3.18, 3.16, 3.175])
    outside = cheat["time"]["outside"]
    assert cheat["time"]["change_pct"] == pytest.approx(-28.7, abs=0.1) and abs(outside["change_pct"]) < 0.1
    assert cheat["verdict"] == "inconclusive" and "clocks-disagree" in cheat["flags"] and cheat["comparable"]
    assert "-28.7" in cheat["words"] and "by the launcher's clock" in cheat["words"]
    assert raced(A_S, B_S, [0.3] * 4, [0.31, 0.3, 0.32, 0.3])["verdict"] == "faster"


def test_an_arm_that_takes_longer_beside_its_clock_is_marked():
    for extra_s, is_marked in ((0.9, False), (1.1, True)):  # of 10 s of training
        arms = [[with_clock(run, 10.3) for run in runs] for runs in comparing.raced(A_S, A_S)]
        for number, run in enumerate(arms[0] + arms[1]):
            run["measured"] |= {"wall_s": 15 + number / 100 + extra_s * (number > 3)}
        assert ("more-beside-the-clock" in comparing.compare(*arms)["flags"]) == is_marked


def test_the_clock_that_says_less_leads_the_sentence():
    partly = raced(A_S, B_S, [0.3] * 4, [1.3, 1.31, 1.3, 1.29])
    assert partly["verdict"] == "faster" and partly["words"].startswith("B is 18.7")
    assert "by the launcher's clock" in partly["words"] and ", 28.72 % by its own (95" in partly["words"]


def test_a_slowdown_is_not_excluded_by_the_runs_own_clocks_alone():
    honest, cheat = raced(A_S, B_S, [0.3] * 4, [0.3] * 4), raced(A_S, B_S, [0.3] * 4, [3.6, 3.5, 3.4, 3.5])
    slower = [("slower", 0.5)]
    assert (compare.exit_code(honest, slower), compare.exit_code(cheat, slower)) == (0, 1)


def test_the_difference_is_beyond_the_noise_floor_by_both_clocks():
    time = raced(A_S, B_S, [0.3] * 4, [1.3, 1.31, 1.3, 1.29])["time"]  # 28.7 % by their own, 18.7 % by the launcher's
    assert [verdict.decide(time | {"floor_pct": floor_pct}) for floor_pct in (18.0, 19.0)] == ["faster", "inconclusive"]


def test_a_run_that_a_late_reader_timed_is_excluded_as_a_disturbed_one():
    a_runs, b_runs = ([with_clock(run, 10.3) for run in runs] for runs in comparing.raced(A_S, B_S))
    doubt = outside_clock.doubts(b_runs[0]["referee"]["clock"] | {"reader_late_s": 0.5})[0][1]
    b_runs[0] |= {"doubts": [{"rank": None, "instrument": "launcher", "doubt": doubt}], "validity": "suspect"}
    b_runs[0]["validity_reasons"] = [doubt]
    comparison = comparing.compare(a_runs, b_runs)
    assert [run["reasons"] for run in comparison["excluded"]] == [[doubt]] and comparison["comparable"]


def test_an_arm_that_hides_time_is_neither_slower_nor_as_fast():
    assert raced(A_S, A_S[::-1], [0.3] * 4, [0.3] * 4)["verdict"] == "equivalent"
    assert raced(A_S, A_S[::-1], [0.3] * 4, [1.3] * 4)["verdict"] == "inconclusive"
    assert raced(B_S, A_S, [3.17, 3.18, 3.16, 3.175], [0.3] * 4)["verdict"] == "inconclusive"


def test_records_without_the_launchers_clock_are_compared_as_before_and_a_lacking_one_gives_no_verdict():
    arms = comparing.raced(A_S, B_S)
    assert comparing.compare(*arms)["verdict"] == "faster" and comparing.compare(*arms)["time"]["outside"] is None
    for which in (0, 1):
        mixed = [[with_clock(run, 10.3) for run in runs] for runs in arms]
        mixed[which][0]["referee"] = {"clock": outside_clock.unknown("none", "no pipe")}
        comparison = comparing.compare(*mixed)
        assert comparison["verdict"] == "inconclusive" and "unknown: no pipe" in comparison["words"]
        mixed[which] = arms[which]  # of a revision before there was such a clock
        comparison = comparing.compare(*mixed)
        assert comparison["verdict"] == "faster" and "one-clock" in comparison["flags"]


def test_a_run_whose_own_clock_is_contradicted_is_not_compared():
    a_runs, b_runs = comparing.raced(A_S, B_S)
    b_runs[0]["doubts"] = [{"rank": None, "instrument": "outside clock", "doubt": "its clock counts less"}]
    judgement = eligibility.judge([row_of(run) for run in a_runs], [row_of(run) for run in b_runs])
    assert any("cannot be trusted: its clock counts less" in refusal for refusal in judgement.refusals)


# ---- real runs

CLOCKS = str(real_runs.REPO / "tests" / "planted" / "clocks")


def own(tmp_path, arch, *overrides, steps=60, **env):
    """Runs a class of tests/planted/clocks and returns (its folder, its record)."""
    few = ["data.batch_tokens=256", "model.num_layers=1", "model.width=32", "model.num_heads=1"]
    settings = [*few, f"goal.num_steps={steps}", f"goal.val_every_steps={steps // 4}", f"model.arch={arch}", *overrides]
    folder = real_runs.run(tmp_path, *settings, SPEEDRUN_CWD=CLOCKS, **env)
    return folder, real_runs.run_json(folder)


def distrusted(run):
    return [doubt["doubt"] for doubt in run["doubts"] if doubt["instrument"] in ("outside clock", "validations")]


def test_an_honest_run_of_two_ranks_is_timed_from_outside(tmp_path):
    folder, run = own(tmp_path, "honest.py:Mine", *real_runs.TWO)
    clock, (claimed_s, _) = run["referee"]["clock"], run["measured"]["train_s_by_rank"]
    assert (clock["source"], clock["unknown"], clock["claimed_train_s"]) == ("edges", None, claimed_s)
    assert len(clock["validations_s"]) == run["measured"]["num_validations"] == 5
    assert clock["outside_validations_s"] == pytest.approx(run["measured"]["validation_s"], abs=0.1)
    assert distrusted(run) == [] and not (folder / ".clock.pipe.tmp").exists()
    rules = {rule["rule"]: rule for rule in verification.report(folder)["rules"]}
    assert rules["the clock of the launcher agrees"]["passed"], rules
    row = row_of(run)
    assert row["outside_s"] == clock["outside_s"] > row["outside_validations_s"] > 0


def test_a_class_that_lets_its_clock_run_at_half_speed_is_caught(tmp_path):
    """Nine lines in __init__: the clock of the run, that of its steps and the marks count half; nothing else moves."""
    folder, run = own(tmp_path, "half.py:Mine", "hardware.num_threads=1", steps=400)
    clock = run["referee"]["clock"]
    assert clock["claimed_train_s"] < 0.6 * clock["outside_train_s"] and run["environment"]["num_threads"] == 3
    (doubt,) = distrusted(run)
    assert doubt.startswith("its clock counts less time than passed") and run["validity"] == "suspect"
    assert row_of(run)["script_doubt"] == doubt
    run["doubts"] = []
    (folder / "run.json").write_text(json.dumps(run))
    failed = [rule["rule"] for rule in verification.report(folder)["rules"] if not rule["passed"]]
    assert "the clock of the launcher agrees" in failed


@pytest.mark.slow
def test_a_class_that_trains_in_its_validations_takes_no_less_time_by_the_launchers_clock(tmp_path):
    """Each validation but the first takes as long as some steps, which its own clock does not see."""
    _, run = own(tmp_path, "in_validations.py:Mine", "hardware.num_threads=1", steps=60)
    clock = run["referee"]["clock"]
    assert clock["outside_validations_s"] > 3 and clock["outside_s"] > clock["claimed_train_s"] + 3
    assert any("its validations take longer once it has trained" in doubt for doubt in distrusted(run))


@pytest.mark.slow
def test_a_run_that_stops_its_launcher_is_disturbed(tmp_path):
    _, run = own(tmp_path, "stops_launcher.py:Mine", "hardware.num_threads=1", steps=40)
    clock = run["referee"]["clock"]
    assert clock["frozen_s"] > 1 and clock["outside_s"] > clock["claimed_train_s"]
    assert any("the launcher did not run for" in doubt for doubt in row_of(run)["machine_doubts"])


def test_time_that_a_script_names_no_more_or_sets_its_clock_back_over_is_doubted():
    """40 steps of 30 ms with a line each; the cheats were faster by half and by two thirds."""

    def rows(named_until=40, silent=(), back_at=None):
        printed, began = [], 0
        for step in range(1, 41):
            if step == 11 or step == back_at:
                began = step - 1
            if step not in silent:
                time_ms = 30.0 * (step - began) if step <= named_until else None
                printed.append({"step": step, "line_t_ns": 30_000_000 * step, "train_time_ms": time_ms})
        return printed

    def doubted(rows, num_untimed_steps=10):
        times = printed_times.PrintedTimes(rows, num_untimed_steps)
        return times.doubts(times.clock({}))[0]

    assert doubted(rows()) == []
    assert doubted(rows(named_until=38)) == []  # two lines of forty lack it
    (doubt,) = doubted(rows(named_until=20))
    assert doubt == "0.60 s passed uncounted after step 20, the last whose time it names"
    assert "0.12 s passed uncounted after step 36" in doubted(rows(named_until=36))[0]  # 0.11 s are allowed
    (doubt,) = doubted(rows(silent=range(11, 30), back_at=30))
    assert doubt == "0.57 s passed uncounted as it set its clock back, after step 10"
    assert any("out of order: at step 30" in doubt for doubt in doubted(rows(back_at=30)))


def test_steps_before_the_first_line_must_count_what_as_many_after_it_take():
    """40 steps of 50 ms, of which the first 20 have no line: both clocks begin when they are done."""
    rows = lines(*[(50, 50)] * 40, val_every=100)[20:]
    for named_ms, num_doubts in ((1000, 0), (3000, 0), (20, 1)):
        doubts, _ = judge_rows([row | {"train_time_ms": row["train_time_ms"] + named_ms - 1000} for row in rows])
        assert len(doubts) == num_doubts
    assert doubts[0].startswith("its first line is of step 20 and names 0.02 s, 0.98 s less than as many of the next s")


def test_a_first_step_that_is_faster_than_a_next_one_that_was_stopped_is_not_doubted():
    """Only 30 lines from step 1 on: the machine stopped the second step for a second."""
    stopped = lines(*[(50, 50)], (1_050, 1_050), *[(50, 50)] * 28, val_every=100)[1:]
    assert stopped[0]["step"] == 1 and judge_rows(stopped)[0] == []
    half = [row | {"train_time_ms": row["train_time_ms"] - 45} for row in lines(*[(50, 50)] * 30, val_every=100)[1:]]
    assert judge_rows(half)[0] == []  # within the tolerance of two steps


HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("clock") / "fake_clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(HERE / "fake_clock.c")], check=True)
    with fork_server.preloaded(path):
        yield path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moved", "texts"),
    [
        ("-10800 0", ["the time of day moved by -10800"]),
        slow("10800 0", ["the time of day moved by +10800"]),
        slow("0 7", ["the time of day moved by -7", "kernel's /proc/uptime"]),
    ],
)
def test_a_clock_that_is_set_in_mid_run_is_a_doubt_and_changes_no_duration(tmp_path, library, moved, texts):
    state = tmp_path / "clock"
    state.write_text("0 0")
    env = {"LD_PRELOAD": str(library), "FAKE_CLOCK": str(state)}
    with real_runs.Background(tmp_path / "results", "goal.num_steps=200", **env) as running:
        running.wait_for_step(3)
        new = tmp_path / "new"
        new.write_text(moved)
        new.replace(state)
        code, out = running.end(120)
        run = real_runs.run_json(running.folder)
    assert (code, run["status"], run["validity"]) == (0, "complete", "suspect"), out
    doubts = [doubt["doubt"] for doubt in run["doubts"] if doubt["instrument"] == "clock"]
    assert len(doubts) == len(texts) and all(text in doubt for text, doubt in zip(texts, doubts, strict=True)), doubts
    assert all(reason in run["validity_reasons"] for reason in doubts)
    measured = run["measured"]
    assert 0 < measured["launch_s"] < 60 and 0 < measured["import_s"] < 60 and 0 < measured["wall_s"] < 120
    assert 0 < run["metrics"]["goodput_frac"] < 1
    real_runs.bench(tmp_path / "results", "verify", str(running.folder), LD_PRELOAD=str(library), code=0)


@pytest.mark.slow
def test_a_clock_that_stands_still_measures_nothing_and_the_run_does_not_count(tmp_path, library):
    """Waiting for a thread with a timeout may fail at once under such a clock: then the run says that."""
    env = {"LD_PRELOAD": str(library), "FAKE_CLOCK_STOPS_IN": "bench.training.worker"}
    done = real_runs.bench(tmp_path, "run", *real_runs.SHORT, *real_runs.SLIGHT, **env)
    run = real_runs.run_json(real_runs.folders(tmp_path)[0])
    assert run["validity"] == "invalid" and "ZeroDivisionError" not in done.stdout + json.dumps(run)
    if run["status"] == "complete":
        assert run["validity_reasons"][0].startswith("its clock did not advance: 6 steps in 0 s")
    else:
        assert "did not end in 30.0 s" in run["failure"]["message"]
