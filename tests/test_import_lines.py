"""Odd logs of modded-nanogpt: cut, torn, doubled, with code that looks like results.  No metric line is lost."""

import hashlib
import json
import random
import re

import numpy as np
import pytest

from bench.record.importers import lines, modded_nanogpt, records

RULE = "=" * 100
HEAD = f"import os\n{RULE}\nRunning PyTorch 2.10.0+cu128 compiled for CUDA 12.8\n{RULE}\n"
TRAIN = "step:{step}/{total} train_time:{ms}ms step_avg:100.00ms\n"
VAL = "step:{step}/{total} val_loss:{loss:.4f} train_time:{ms}ms step_avg:100.00ms\n"


def run_lines(total=4, loss=3.2793):
    """The lines of a run with validations at step 0 and at the end, and 100 ms a step."""
    steps = [TRAIN.format(step=step, total=total, ms=100 * step) for step in range(1, total + 1)]
    first = VAL.format(step=0, total=total, loss=10.8258, ms=0)
    return "".join([first, *steps, VAL.format(step=total, total=total, loss=loss, ms=100 * total)])


def read(text):
    return modded_nanogpt.read(text if isinstance(text, bytes) else text.encode())


def record_of(run, num_runs=1):
    facts = {"unmatched": [], "sha256": "0" * 64, "num_runs": num_runs}
    return records.record_of(run, "x.txt", "modded-nanogpt", facts)


@pytest.mark.parametrize(
    ("last", "why"), [("nan", "it prints no number as"), ("1050", "back from 1100 to 1050 ms at step 12")]
)
def test_an_earlier_time_does_not_stand_in_for_a_last_one_that_no_clock_shows(last, why):
    (run,), _ = read(HEAD + run_lines(12).replace("train_time:1200ms", f"train_time:{last}ms"))
    record, _ = record_of(run)
    assert why in record["doubts"][0]["doubt"] and record["measured"]["train_s_by_rank"] == []


# ---- lines that are not whole


def test_a_log_cut_anywhere_in_its_last_line_never_gives_a_number_that_was_not_printed():
    text = HEAD + run_lines()
    start = text.rindex("step:")
    for stop in range(start + 1, len(text)):
        (run,), facts = read(text[:stop])
        remaining = text[start:stop]
        if remaining.endswith("100.00ms"):
            assert (run.val_loss, run.complete, facts["unmatched"]) == (3.2793, True, [])
        else:
            assert (run.val_loss, run.complete) == (10.8258, False), remaining
            assert facts["unmatched"] == ([(10, remaining)] if re.match(r"step:\d", remaining) else []), remaining


@pytest.mark.parametrize(
    "stop, loss, unmatched",
    [(None, 3.2722, 0), (-1, 3.2722, 0), (-2, 3.5, 1), (-4, 3.5, 1), (-5, 3.5, 1), (-6, 3.5, 1), (-12, 3.5, 1)],
)
def test_llm_c_lines_end_in_a_number_and_one_with_fewer_decimals_was_cut(stop, loss, unmatched):
    """ "s:20 tel:3.2722" cut to 3.272, 3.2, "3.", "3", "s:20"; without the last newline only it is whole."""
    (run,), facts = read("s:0 tel:11.0092\ns:10 tel:3.5000\ns:20 tel:3.2722\n"[:stop])
    assert (run.val_loss, len(facts["unmatched"])) == (loss, unmatched)


def test_lines_torn_by_another_ranks_output_are_reported_with_their_numbers():
    torn = "step:2/4 train_time:2[rank3]: W0630 warning\n00ms step_avg:100.00ms\n"
    (run,), facts = read(HEAD + run_lines().replace("step:2/4 train_time:200ms step_avg:100.00ms\n", torn))
    assert facts["unmatched"] == [(7, "step:2/4 train_time:2[rank3]: W0630 warning"), (8, "00ms step_avg:100.00ms")]
    assert run.columns["train_time_ms"].tolist() == [0.0, 100.0, 300.0, 400.0, 400.0] and run.complete


@pytest.mark.parametrize(
    "line",
    [
        # the newline between two lines is missing
        "step:2/4 train_time:200ms step_avg:100.00msstep:2/4 val_loss:3.9 train_time:200ms step_avg:100.00ms",
        "step:2/4 train_time:200ms step:3/4 train_time:300ms step_avg:100.00ms",
        "step:2/4 val_loss:4.1 val_loss:4.2 train_time:200ms step_avg:100.00ms",
        "step:2/4 val_loss:4.1",
        "step:2/4 val_loss:4.1 train_time:200ms",
        "step:2/4 val_loss_ema:4.1step:3/4",
        "step:2/4 train_time:200 step_avg:100.00ms",
        "step:2/4 train_time:200us step_avg:100.00ms",
        "step:2/4 train_time:1_0ms step_avg:100.00ms",
        "step:2.5/4 train_time:200ms step_avg:100.00ms",
        "step:2/4 train_time:2.0.0ms step_avg:100.00ms",
        "step:2/4",
        "step:99999999999999999999/4 train_time:200ms step_avg:100.00ms",
        f"step:{'9' * 5000}/4 val_loss:4.1 train_time:200ms step_avg:100.00ms",
        "rank 1 says step:2/4 train_time:200ms step_avg:100.00ms",
        "epoch=1,step:2/4 val_loss:4.1 and so on",
        "s:2 trl:4.1 what",
        "s:2",
        "tailavg step:2 val_loss:4.1 step:2/4",
    ],
)
def test_a_line_that_looks_like_a_metric_line_and_is_none_is_reported_with_its_number(line):
    (run,), facts = read(HEAD + run_lines().replace("step:2/4 train_time:200ms step_avg:100.00ms", line))
    assert facts["unmatched"] == [(7, line[:200])]
    assert sorted(set(run.columns["step"].tolist())) == [0, 1, 3, 4] and run.val_loss == 3.2793


@pytest.mark.parametrize(
    "line",
    [
        "captured_ref_extrap_state step:2",
        "warming up, 2/4",
        "best val_loss:4.1",
        "step 2/4",
        "Step:2/4 done",
        "footstep:2/4 val_loss:1",
    ],
)
def test_words_that_are_no_metric_line_are_left_alone(line):
    (run,), facts = read(HEAD + run_lines().replace("step:2/4 train", f"{line}\nstep:2/4 train"))
    assert facts["unmatched"] == [] and run.complete


# ---- the same twice


def test_a_line_that_comes_twice_in_a_row_is_one_line():
    doubled = "".join(line * 2 for line in run_lines().splitlines(keepends=True))
    (run,), facts = read(HEAD + doubled)
    assert (run.num_steps, run.complete) == (4, True)
    assert (facts["unmatched"], facts["num_repeated"], len(run.columns["step"])) == ([], 6, 6)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_the_lines_of_other_ranks_are_reported_and_make_no_runs(num_ranks):
    def as_rank(line, rank):
        return re.sub(r"train_time:(\d+)ms", lambda match: f"train_time:{int(match[1]) + rank}ms", line)

    lines_of_all = [as_rank(line, rank) for line in run_lines().splitlines(True) for rank in range(num_ranks)]
    (run,), facts = read(HEAD + "".join(lines_of_all))
    assert (run.num_steps, run.train_time_ms) == (4, 400.0)
    assert (run.complete, len(facts["unmatched"])) == (True, 6 * (num_ranks - 1))


LAST = VAL.format(step=4, total=4, loss=3.1, ms=400)
NEXT = VAL.format(step=5, total=5, loss=3.1, ms=500)
STEP_BACK = TRAIN.format(step=3, total=4, ms=310)
STEP_0 = VAL.format(step=0, total=4, loss=10.8, ms=0)


@pytest.mark.parametrize(
    "again, num_again, num_unmatched",
    [
        ("".join(LAST.replace("3.1", f"3.1{n}") for n in range(9)), 9, 0),
        (STEP_BACK + LAST, 0, 2),
        ("Using seed=2\nRunning PyTorch 2.10.0\n" + LAST, 1, 0),
        (NEXT, 0, 1),
        (LAST.replace("/4", "/5"), 1, 0),
        (STEP_0 + LAST, 0, 2),
        (STEP_0 + STEP_0.replace("10.8", "10.7") + LAST, 0, 3),
        (STEP_0 + TRAIN.format(step=1, total=4, ms=90) + STEP_0 + LAST, 0, 2),
    ],
)
def test_lines_that_begin_no_training_are_no_further_run(again, num_again, num_unmatched):
    runs, facts = read(HEAD + run_lines() + again)
    assert [run.val_loss for run in runs if run.complete] == [3.2793]
    assert (facts["num_validated_again"], len(facts["unmatched"])) == (num_again, num_unmatched)
    assert len(runs[0].other_lines) == num_again
    runs, _ = read(HEAD + run_lines() + again + HEAD + run_lines(loss=3.2))
    assert [run.val_loss for run in runs if run.complete] == [3.2793, 3.2]


def test_a_file_of_nothing_but_last_lines_shows_one_run():
    for totals in ((4, 4, 4), (4, 3, 2), (4, 5, 6)):
        lines_of_all = [VAL.format(step=n, total=n, loss=3 + k / 10, ms=100) for k, n in enumerate(totals)]
        assert [run.val_loss for run in read("".join(lines_of_all))[0]] == [3.0]


# ---- code in a log


LOOKALIKE = '"""It prints:\nstep:0/9 val_loss:1.0000 train_time:0ms step_avg:nanms\ns:9 tel:1.0\n"""\nimport os\n'


@pytest.mark.parametrize("before", ["", f"{RULE}\n"])
def test_lines_of_the_code_that_look_like_results_are_code(before):
    head = f"{RULE}\nRunning PyTorch 2.6.0 compiled for CUDA 12.6\n{RULE}\n"
    (run,), facts = read(f"{before}{LOOKALIKE}{head}{run_lines()}")
    assert (run.val_loss, run.declared_steps) == (3.2793, 4)
    assert (len(run.columns["step"]), run.facts["torch"], facts["unmatched"]) == (6, "2.6.0", [])
    assert run.source_sha256 == hashlib.sha256(LOOKALIKE.strip().encode()).hexdigest()


@pytest.mark.parametrize(
    "before", ["", "# srun on host\n", "Running PyTorch 2.6.0 compiled for CUDA 12.6\n", f"{RULE}\n"]
)
def test_results_before_a_rule_are_no_code(before):
    (run,), facts = read(f"{before}{run_lines()}{RULE}\npeak memory allocated: 100 MiB\n")
    assert (run.val_loss, run.complete) == (3.2793, True)
    assert (run.source_sha256, run.facts["peak_mib"], facts["unmatched"]) == (None, 100, [])


def test_code_without_an_end_and_without_results_is_no_run():
    code = LOOKALIKE.replace("step:", "a step:").replace("s:9", "9")
    for text in (code, f"{RULE}\nimport os\n", "", "\n", "\x00\x01\x02", RULE):
        assert read(text)[0] == []


# ---- several runs


def test_each_run_of_a_file_has_what_stands_around_it():
    smi = "Sat Jan 10 23:36:1{n} 2026\n|   0  NVIDIA H{n}00  On  |  x |\n| N/A | 116W /  700W | x |\n"

    def log_of(n):
        head = f"{HEAD.replace('2.10.0', f'2.1{n}.0')}{smi.format(n=n)}Using seed={n}\n"
        return f"{head}{run_lines(loss=3 + n / 10)}peak memory allocated: {n}00 MiB\n"

    runs, facts = read(log_of(1) + log_of(2))
    assert (facts["unmatched"], [run.val_loss for run in runs]) == ([], [3.1, 3.2])
    names = ("torch", "gpu_name", "num_gpus", "seed", "peak_mib", "started_at")
    assert [tuple(run.facts[name] for name in names) for run in runs] == [
        ("2.11.0+cu128", "NVIDIA H100", 1, 1, 100, "2026-01-10T23:36:11Z"),
        ("2.12.0+cu128", "NVIDIA H200", 1, 2, 200, "2026-01-10T23:36:12Z"),
    ]


def test_later_trials_of_one_process_have_its_machine_and_no_seed_start_or_peak_of_their_own():
    head = f"{HEAD}Using seed=7\nRun UTC timestamp=2026-05-06T02:35:44+00:00\n"
    runs, _ = read(f"{head}{run_lines()}{run_lines(loss=3.1)}peak memory allocated: 100 MiB\n")
    names = ("torch", "seed", "started_at", "started_zone", "peak_mib")
    recorded = [tuple(run.facts[name] for name in names) for run in runs]
    expected = [("2.10.0+cu128", 7, "2026-05-06T02:35:44Z", "UTC", None), ("2.10.0+cu128", None, None, None, 100)]
    assert recorded == expected


def test_a_table_of_nvidia_smi_that_stands_there_twice_is_of_the_same_gpus():
    row = "|   {}  NVIDIA H100 80GB HBM3          On  |   00000000:8D:00.0 Off |                    0 |\n"
    smi = "".join(row.format(number) for number in range(8))
    (run,), _ = read(f"{HEAD}{smi}{smi}{run_lines()}")
    assert run.facts["num_gpus"] == 8


# ---- what drivers, steps within a validation and broken runs leave


def test_a_drivers_summary_of_a_run_is_no_other_run_and_one_that_began_like_it_is():
    """A driver prints the validations again after each run; a run that broke off has another last line."""
    first, second = run_lines(loss=3.1), run_lines(loss=3.2)
    again = [text.splitlines(True)[0] + text.splitlines(True)[-1] for text in (first, second)]
    printed = f"BEGIN 1\n{first}peak memory allocated: 5 MiB\n{again[0]}PASS 1\n"
    printed += f"BEGIN 2\n{second}peak memory allocated: 7 MiB\n{again[1]}PASS 2\n"
    runs, facts = read(printed)
    assert [(run.val_loss, run.facts["peak_mib"], run.complete) for run in runs] == [(3.1, 5, True), (3.2, 7, True)]
    assert (facts["num_repeated"], facts["unmatched"]) == (4, [])
    runs, _ = read(first + first.splitlines(True)[0])
    assert [run.complete for run in runs] == [True, False]


def test_a_run_that_broke_off_has_the_time_of_the_step_that_it_reached():
    steps = run_lines().splitlines(True)
    for num_steps, end in ((4, "step 4, without a validation of it"), (3, "step 3 of 4")):
        (run,), _ = read("".join(steps[: num_steps + 1]))
        record, _ = record_of(run)
        assert (record["metrics"]["num_steps"], record["metrics"]["train_s"]) == (num_steps, num_steps / 10)
        assert record["metrics"]["step_avg_ms"] == 100.0
        assert (record["status"], record["failure"]["message"]) == ("failed", f"the log ends at {end}")
        assert record["failure"]["step"] == num_steps


def test_steps_that_the_clock_left_out_are_in_no_average():
    text = "".join(
        f"step:{step}/40 train_time:{ms}ms step_avg:{'nan' if step <= 10 else '50.00'}ms\n"
        for step in range(1, 41)
        for ms in [9000 * step if step <= 10 else 50 * (step - 10)]
    )
    (run,), _ = read(text + "step:40/40 val_loss:3.2 train_time:1500ms step_avg:50.00ms\n")
    record, rows = record_of(run)
    metrics = record["metrics"]
    assert (metrics["train_s"], metrics["step_avg_ms"]) == (1.5, 50.0)
    assert (metrics["num_flagged_steps"], metrics["step_ms_p95"]) == (0, 50.0)
    assert {row["flags"] for row in rows if 0 < row["step"] <= 10} == {"untimed"}
    assert rows[1]["train_time_ms"] == 18000.0


def test_lines_of_a_step_without_its_loss_or_time_are_kept_as_they_are():
    others = [
        "step:2/4 qnorm:15.9 ema_a:0",
        "step:2/4 val_loss_unmasked:3.2",
        "val_step:1/2 val_loss:3.2904 val_time:51547ms step_avg:51546.60ms",
    ]
    run_text = run_lines().replace(" val_loss:3.2793", " val_loss:3.2793 val_time: 105380ms")
    (run,), facts = read(f"{others[0]}\n{others[1]}\n{run_text}{others[2]}\nstep:3/4 val_lo\n")
    recorded = record_of(run)[0]["imported"]
    assert (run.val_loss, run.complete) == (3.2793, True)
    assert (recorded["other_lines"], recorded["line_tails"]) == (others, {"4": {"val_time": "105380ms"}})
    assert facts["unmatched"] == [(10, "step:3/4 val_lo")]


def test_a_word_behind_a_line_is_kept_and_half_a_word_before_its_end_is_not():
    (run,), facts = read(run_lines().rstrip() + " final_eval\n")
    assert (run.val_loss, run.extras, facts["unmatched"]) == (3.2793, {"4": {"final_eval": ""}}, [])
    (run,), facts = read(run_lines().rstrip().removesuffix(" step_avg:100.00ms") + " step\n")
    assert run.val_loss == 10.8258 and len(facts["unmatched"]) == 1


@pytest.mark.parametrize(
    "text, name, value",
    [
        ("args: {'steps': 4, 'seed': 17, 'lam': 0.5}", "seed", 17),
        ("Running pytorch 2.7.1+cpu", "torch", "2.7.1+cpu"),
        ("peak memory consumption training: 42 GiB", "peak_mib", 43008),
        ("Running PyTorch 2.7.1 compiled for CUDA 12.8 on NVIDIA H8  with world_size 8", "gpu_name", "NVIDIA H8"),
    ],
)
def test_other_words_for_the_same_facts(text, name, value):
    (run,), _ = read(f"{text}\n{run_lines()}{text}\n" if name == "peak_mib" else f"{text}\n{run_lines()}")
    assert run.facts[name] == value


# ---- the record


def test_a_free_tail_and_tail_averages_are_in_the_record_as_text():
    text = "step:2/4 val_loss:3.5 val_avg_loss:3.4 val_ema_loss:3.3 train_time:0.2s step_avg:100.00ms\n"
    text += "tailavg step:4 tau:200 lambda:0.50 val_loss:3.27001\n"
    text += "step:4/4 val_loss:3.4 train_time:0.4s step_avg:100.00ms ref_gamma:0.5 handoff:none\n"
    (run,), facts = read(text)
    recorded = record_of(run)[0]["imported"]
    assert facts["unmatched"] == []
    assert (run.val_loss, run.train_time_ms, run.complete) == (3.4, 400.0, True)
    expected = {"2": {"val_avg_loss": "3.4", "val_ema_loss": "3.3"}, "4": {"ref_gamma": "0.5", "handoff": "none"}}
    assert recorded["line_tails"] == expected
    assert recorded["tail_averages"] == [{"step": "4", "tau": "200", "lambda": "0.50", "val_loss": "3.27001"}]


def test_llm_c_that_diverged_says_so():
    steps = "s:0 trl:11.0 lr:0.000001 norm:15.37\ns:1 trl:-nan lr:1.8e-06 norm:nan\n"
    (run,), facts = read(f"s:0 tel:11.0092\n{steps}s:1 tel:nan\n")
    record, rows = record_of(run)
    assert (record["failure"]["kind"], record["failure"]["step"], facts["unmatched"]) == ("non_finite_loss", 1, [])
    assert rows[1].get("lr") == 1.8e-06
    json.dumps([record, rows], allow_nan=False)


@pytest.mark.parametrize("text", ["Run UTC timestamp=now", "Sat Foo 99 99:99:99 9999", "Sat Jan 10 29:36:12 2026"])
def test_a_date_that_is_none_is_unknown(text):
    (run,), _ = read(f"{HEAD}{text}\n{run_lines()}")
    assert (run.facts["started_at"], run.facts["started_zone"]) == (None, None)


# ---- any log

FORMATS = (
    "s:{step} trl:{loss:.4f} lr:{small:.6f} norm:{norm:.4f}",
    "s:{step} trl:{loss:.6f}",
    "s:{step} tel:{loss:.4f}",
    "step:{step}/{total} train_loss:{loss:.4f} train_time:{ms:.0f}ms step_avg:{avg:.2f}ms",
    "step:{step}/{total} train_loss:{loss:.4f} train_time:{ms:.0f}ms step_avg:nanms",
    "step:{step}/{total} train_time:{ms:.0f}ms step_avg:{avg:.2f}ms",
    "step:{step}/{total} val_loss:{loss:.4f} train_time:{ms:.0f}ms step_avg:{avg:.2f}ms",
    "step:{step}/{total} train_time:{s:.3f}s step_avg:{avg:.2f}ms",
    "step:{step}/{total} val_loss:{loss:.5f} train_time:{s:.3f}s step_avg:{avg:.2f}ms",
    "step:{step}/{total} val_loss:{loss:.5f} val_avg_loss:{loss:.5f} val_ema_loss:{loss:.5f} train_time:{s:.3f}s "
    "step_avg:{avg:.2f}ms",
    "step:{step}/{total} val_loss:{loss:.5f} train_time:{s:.3f}s step_avg:{avg:.2f}ms ema_beta:{small:.3f} "
    "handoff:none",
    "tailavg step:{step} tau:200 lambda:{small:.2f} val_loss:{loss:.5f}",
)
NAMES = {
    "train_loss": "train_loss",
    "trl": "train_loss",
    "val_loss": "val_loss",
    "tel": "val_loss",
    "lr": "lr",
    "norm": "grad_norm",
    "step_avg": "step_avg_ms",
    "train_time": "train_time_ms",
}


def looks_like_a_metric_line(line):
    """A second opinion beside the importer's: a metric line's beginning, or its words anywhere."""
    return bool(re.match(rb"step:\d|s:\d|tailavg step:\d", line) or re.search(rb"\btrain_time:\d|\bstep_avg:\d", line))


def values_of(line):
    """{column: value} of the line's words, in the plainest way."""
    values = {}
    for field in line.decode("utf-8", "replace").split():
        key, _, text = field.partition(":")
        if key in NAMES:
            is_s = key == "train_time" and not text.endswith("ms")
            number = float(text.removesuffix("ms").removesuffix("s")) * (1e3 if is_s else 1)
            if np.isfinite(number):
                values[NAMES[key]] = pytest.approx(number, abs=1e-6)
    return values


def mangled(line, draw):
    """Cuts the line, adds or changes a byte, or puts another line in its middle."""
    at = draw.randrange(len(line) + 1)
    before, after = line[:at], line[at:]
    inserted, other = (draw.choice(characters).to_bytes() for characters in (b"0 :./-xs", b" :9m\xff\x00"))
    changed = [before, after, before + inserted + after, before + b"step:5/9 " + after, before + other + after[1:]]
    return draw.choice([line, line, line, *changed])


@pytest.mark.parametrize("seed", range(40))
def test_every_line_that_looks_like_a_metric_line_is_in_the_columns_or_reported(seed):
    draw, text = random.Random(seed), []
    for number in range(1, 200):
        values = {"step": number, "total": 200, "ms": number * 100, "s": number / 10, "loss": draw.uniform(2, 11)}
        values |= {name: draw.random() for name in ("small", "norm", "avg")}
        printed = draw.choice(FORMATS).format(**values)
        text.append(mangled(printed.encode(), draw).replace(b"\n", b""))
    parsed, texts, _ = lines.read(b"\n".join(text) + b"\n")
    kept = dict(zip(parsed.line_numbers.tolist(), range(len(parsed))))
    reported = {number for number, _ in parsed.unmatched}
    assert not reported & set(kept) and len(parsed.unmatched) == len(reported)
    for number, line in enumerate(texts):
        if number in kept:
            in_columns = {name: float(parsed.columns[name][kept[number]]) for name in set(NAMES.values())}
            recorded = {name: value for name, value in in_columns.items() if not np.isnan(value)}
            assert recorded == values_of(line), line
        elif looks_like_a_metric_line(line) and not line.startswith(b"tailavg"):
            assert number in reported, line
    num_tails = sum(line.startswith(b"tailavg step:") for line in texts)
    assert len(parsed.tails) + sum(text.startswith("tailavg step:") for _, text in parsed.unmatched) == num_tails


@pytest.mark.parametrize("seed", range(20))
def test_no_bytes_make_the_importer_fail(seed):
    draw = random.Random(seed)
    others = "s:1 trl:2.0\ntailavg step:3 x:1\npeak memory allocated: 1 MiB\n"
    whole = bytearray(f"{HEAD}{run_lines(20)}{others}{RULE}\n".encode())
    pieces = [b"", b"9", b"=", b"\n", b"\r", b":", b"e9", b"-", b".", b" nan", b"\xff\xfe"]
    for _ in range(draw.randrange(1, 60)):
        at = draw.randrange(len(whole))
        whole[at : at + draw.randrange(3)] = draw.choice([*pieces, bytes(whole[at : at + 60])])
    runs, _ = read(bytes(whole))
    for run in runs:
        json.dumps(record_of(run), allow_nan=False)
