"""Foreign logs: every metric line is understood or reported, and nothing is guessed."""

import json
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.launch.script import output
from bench.record.importers import consoles, dialects, modded_nanogpt, programs, records

RULE = "=" * 100
FACTS = {"unmatched": [], "sha256": "0" * 64, "num_runs": 1}
SMI = """Sat Jan 10 23:36:12 2026
| NVIDIA-SMI 570.195.03             Driver Version: 570.195.03     CUDA Version: 12.8     |
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:8D:00.0 Off |                    0 |
| N/A   30C    P0            116W /  700W |    1183MiB /  81559MiB |      2%      Default |
|   1  NVIDIA H100 80GB HBM3          On  |   00000000:8E:00.0 Off |                    0 |
| N/A   31C    P0            117W /  700W |    1183MiB /  81559MiB |      2%      Default |
"""
CODE = 'import torch\nprint(f"step:{step}/{total} val_loss:{loss:.4f} train_time:{t:.0f}ms")\n'


def log(*lines, head=f"{CODE}{RULE}\nRunning PyTorch 2.10.0+cu128 compiled for CUDA 12.8\n{SMI}{RULE}\n"):
    return (head + "\n".join(lines) + "\n").encode()


def read_console(data, form):
    return programs.FORMS[form]().read(data)


def run_of(data):
    runs, facts = modded_nanogpt.read(data)
    assert len(runs) == 1 and facts["unmatched"] == []
    return runs[0]


def test_milliseconds_and_what_the_head_says():
    lines = [
        "step:0/2 val_loss:10.8297 train_time:0ms step_avg:0.02ms",
        "step:1/2 train_time:247ms step_avg:246.90ms",
        "step:2/2 train_time:498ms step_avg:248.98ms",
        "step:2/2 val_loss:3.2777 train_time:498ms step_avg:249.00ms",
        "peak memory allocated: 31262 MiB reserved: 46000 MiB",
    ]
    run = run_of(log(*lines))
    assert (run.num_steps, run.declared_steps) == (2, 2)
    assert (run.complete, run.val_loss, run.train_time_ms) == (True, 3.2777, 498.0)
    assert run.step_avg_meaning == modded_nanogpt.MEANINGS[0]
    facts = {"torch": "2.10.0+cu128", "cuda": "12.8", "driver": "570.195.03", "peak_mib": 31262}
    facts |= {"gpu_name": "NVIDIA H100 80GB HBM3", "num_gpus": 2, "power_limit_w": 700.0}
    facts |= {"started_at": "2026-01-10T23:36:12Z", "started_zone": "unknown: the machine's own"}
    assert run.facts == facts | dict.fromkeys(("python", "seed", "world_size"))


def test_a_headline_that_is_not_val_loss_is_reported_and_not_swapped_in():
    run = run_of(
        log("step:5/5 val_loss:3.28243 val_avg_loss:3.28 val_ema_loss:3.27834 train_time:9s step_avg:1800.0ms")
    )
    assert run.val_loss == 3.28243 and run.headline == {"val_ema_loss": "3.27834"}


@pytest.mark.parametrize(
    "which, averages", [(0, (100, 100, 120)), (1, (125, 10000 / 90, 24000 / 190)), (2, (100, 100, 140))]
)
def test_the_three_meanings_of_step_avg_are_distinguished(which, averages):
    """Validations at steps 50, 100, 200 at 5, 10, 24 s.  By hand: t/step; t/(step - 10); since the last one."""
    lines = [
        f"step:{step}/200 val_loss:4.0000 train_time:{ms}ms step_avg:{average:.2f}ms"
        for step, ms, average in zip((50, 100, 200), (5000, 10000, 24000), averages)
    ]
    assert run_of(log(*lines)).step_avg_meaning == modded_nanogpt.MEANINGS[which]


def test_a_step_avg_that_no_meaning_fits_has_none():
    assert run_of(log("step:100/100 val_loss:4.0000 train_time:5000ms step_avg:77.00ms")).step_avg_meaning is None


def test_llm_c_has_no_time_and_none_is_made_up():
    lines = ["s:0 tel:11.0092", "s:0 trl:11.0091 lr:0.000001 norm:15.37", "s:1 trl:10.9598 lr:0.000002 norm:15.24"]
    run = run_of(log(*lines, "s:1 tel:10.9", head=""))
    assert (run.train_time_ms, run.val_loss, run.complete, run.declared_steps) == (None, 10.9, True, None)


def plain_log(last="3.2790"):
    head = f"import os\n{'=' * 100}\nRunning PyTorch 2.6.0 compiled for CUDA 12.6\n{'=' * 100}\n"
    steps = "".join(f"step:{step}/3 train_time:{90 * step}ms step_avg:90.00ms\n" for step in (1, 2, 3))
    return (
        f"{head}step:0/3 val_loss:10.8258 train_time:0ms step_avg:nanms\n{steps}step:3/3 val_loss:{last} "
        "train_time:270ms step_avg:90.00ms\n"
    )


@pytest.mark.parametrize(
    "dressed",
    [
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.rstrip("\n").encode(),
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: text.encode("utf-16"),
        lambda text: re.sub("^step", "\x1b[32mstep", text, flags=re.M).replace("ms\n", "ms\x1b[0m\n").encode(),
        lambda text: re.sub("^step", "[rank0]: step", text, flags=re.M).encode(),
        lambda text: re.sub("^step", "[default0]:step", text, flags=re.M).encode(),
        lambda text: re.sub("^step", "0: step", text, flags=re.M).encode(),
        lambda text: re.sub("^step", "  step", text, flags=re.M).encode(),
    ],
)
def test_what_a_terminal_an_editor_or_a_launcher_puts_around_lines_is_taken_off(dressed):
    ((run,), facts) = modded_nanogpt.read(dressed(plain_log()))
    assert (run.val_loss, run.train_time_ms) == (3.279, 270.0)
    assert (run.complete, run.facts["torch"], facts["unmatched"]) == (True, "2.6.0", [])


@pytest.mark.parametrize("printed", ["nan", "inf"])
def test_a_loss_that_is_no_number_is_one_run_that_diverged(printed):
    ((run,), facts) = modded_nanogpt.read(plain_log(last=printed).encode())
    record, rows = records.record_of(run, "x.txt", "modded-nanogpt", FACTS)
    assert (record["failure"]["kind"], record["failure"]["step"]) == ("non_finite_loss", 3)
    assert (record["status"], facts["unmatched"]) == ("failed", [])
    json.dumps([record, rows], allow_nan=False)
    ((run,), _) = read_console(f"iter 0: loss {printed}, time 200.00ms, mfu 1.00%\n".encode(), "nanogpt")
    assert run.diverged_step == 1 and not run.complete


# ---- consoles


NANOGPT = """tokens per iteration will be: 491,520
step 0: train loss 10.9876, val loss 10.9865
iter 0: loss 10.9883, time 14528.66ms, mfu -100.00%
iter 1: loss 10.1000, time 200.00ms, mfu -100.00%
step 2: train loss 4.0001, val loss 4.1000
iter 2: loss 4.0500, time 5100.00ms, mfu 12.30%
iter 3: loss 4.0000, time 210.00ms, mfu 12.31%
step 4: train loss 3.9000, val loss 4.0500
iter 4: loss 3.9500, time 5000.00ms, mfu 12.30%
"""
NANOCHAT = """GPU: NVIDIA H100 80GB HBM3 | Peak FLOPS (BF16): 9.89e+14
2026-03-16 22:43:15,107 - nanochat.common - INFO - Distributed world size: 8
Total batch size 524,288 => gradient accumulation steps: 1
Step 00000 | Validation bpb: 3.228247
{steps}
Step 00014 | Validation bpb: 1.329710
Step 00014 | CORE metric: 0.1234
Peak memory usage: 75422.02MiB
Total training time: 0.03m
Minimum validation bpb: 1.329710
"""
NANOCHAT_STEP = (
    "step {num:05d}/00014 ({num}.00%) | loss: 9.012936 | lrm: 0.00 | dt: {ms:.2f}ms | tok/sec: 11,405 | "
    "bf16_mfu: 0.00 | epoch: 1 pq: 0 rg: 1 | total time: {total}m"
)
FORGE = (
    "\x1b[2m[rank 0]\x1b[0m \x1b[32mINFO    \x1b[0m \x1b[2m[step {num}]\x1b[0m "
    "\x1b[36mloss\x1b[0m=\x1b[1m{loss:.4f}\x1b[0m | lr=3.00e-04 | grad_norm=1.200 | tok/s=51,200 | mfu=31.2% | "
    "mem={mem}/80GB | step_time=0.64s\n"
)


def test_nanogpts_iterations_are_rows_after_them_and_those_with_a_validation_inside_are_flagged():
    ((run,), facts) = read_console(NANOGPT.encode(), "nanogpt")
    assert (run.val_loss, run.val_step) == (4.05, 4)
    assert (run.num_steps, run.complete, run.batch_tokens, facts["unmatched"]) == (5, True, 491_520, [])
    record, rows = records.record_of(run, "x.log", "nanogpt", FACTS)
    columns = ("step", "train_loss", "val_loss", "step_ms", "flags")
    assert [tuple(row.get(name) for name in columns) for row in rows] == [
        (0, None, 10.9865, None, ""),
        (1, 10.9883, None, 14528.66, "validation"),
        (2, 10.1, 4.1, 200.0, ""),
        (3, 4.05, None, 5100.0, "validation"),
        (4, 4.0, 4.05, 210.0, ""),
        (5, 3.95, None, 5000.0, "validation"),
    ]
    assert record["metrics"]["step_avg_ms"] == pytest.approx(205.0)  # of the two iterations that hold nothing else


def test_a_number_that_cannot_be_read_is_no_line_that_was_skipped():
    """Else the validation before would count as the last."""
    text = b"step 0: train loss 4.5, val loss 4.9\niter 0: loss 4.5, time 9.00ms, mfu 1.00%\n"
    text += b"iter 1: loss 4.4, time 9.00ms, mfu 1.00%\nstep 2: train loss 4.5, val loss 3,9\n"
    ((_,), facts) = read_console(text, "nanogpt")
    assert facts["unmatched"] == [(4, "step 2: train loss 4.5, val loss 3,9")]
    assert [consoles.as_number(number) for number in ("1,234.5", "12,345,678", "-1,000", "1,23", "0,5", ",1")] == [
        *(1234.5, 12345678.0, -1000.0),
        *(None, None, None),
    ]


def test_a_log_of_eight_times_as_many_iterations_takes_no_square_of_the_time():
    def seconds(num_lines):
        text = "".join(f"iter {step}: loss 4.1000, time 12.30ms, mfu 1.20%\n" for step in range(num_lines)).encode()
        begin_s = time.process_time()
        assert len(dialects.reader_of("nanogpt").read(text)[0]) == 1
        return time.process_time() - begin_s

    assert min(seconds(40_000) for _ in range(2)) < 24 * min(seconds(5_000) for _ in range(2))  # it took 64 times


@pytest.mark.parametrize("num_chars", [4_080, 9_000, 12_000, 70_000, 3_000_000])
def test_a_number_at_the_end_of_a_long_line_is_read_whole_or_not_at_all(tmp_path, num_chars):
    """As a program prints that writes all it knows as a line of JSON."""
    described = {"step": r'"step": (?P<step>\d+), "val_loss": (?P<val_loss>[\d.]+)'}
    lines = [json.dumps({"pad": "x" * num_chars, "step": step, "val_loss": 10.4876 - step}) for step in range(3)]
    data, kept = "\n".join(lines).encode() + b"\n", SimpleNamespace(lines=[], late_ns={})
    with open(os.devnull) as null:
        rank = output._Rank(os.dup(null.fileno()), tmp_path / "log", re.compile("val_loss"), kept)
    for start in range(0, len(data), 65_536):  # as a pipe gives it
        rank.take(data[start : start + 65_536], start)
    rank.close()
    runs, facts = dialects.read(described, [text for _, text in kept.lines])
    losses = [row["val_loss"] for run in runs for row in records.rows_of(run)]
    assert ("[cut]" in (tmp_path / "log").read_text()) is (num_chars > output.MAX_LINE_BYTES)
    assert (losses, len(facts["unmatched"])) == (([10.4876, 9.4876, 8.4876], 0) if num_chars < 10_000 else ([], 3))


def test_a_line_without_an_end_takes_no_square_of_its_length(tmp_path):
    """As of a progress bar of dots."""

    def seconds(num_pieces):
        with open(os.devnull) as null:
            rank = output._Rank(os.dup(null.fileno()), tmp_path / "log", re.compile("val_loss"), None)
        begin_s = time.process_time()
        for number in range(num_pieces):
            rank.take(b"." * 20, number)
        spent_s = time.process_time() - begin_s
        rank.close()
        return spent_s

    assert min(seconds(48_000) for _ in range(2)) < 24 * min(seconds(6_000) for _ in range(2))  # it took 64 times


@pytest.mark.parametrize(
    ("form", "line"),
    [
        ("nanogpt", "step 0: train loss 10.9, val loss 10.9\n"),
        ("kempnerforge", "[step 0] eval/loss=10.9000 | eval/perplexity=9.0\n"),
    ],
)
def test_a_run_that_crashed_before_its_first_step_is_not_complete(form, line):
    runs, _ = dialects.reader_of(form).read(line.encode() + b"torch.OutOfMemoryError: CUDA out of memory\n")
    assert not any(run.complete for run in runs)


def test_nanogpt_that_prints_every_tenth_iteration_has_their_times_and_no_total():
    text = b"iter 0: loss 10.9, time 300.00ms, mfu -100.00%\niter 10: loss 8.1, time 200.00ms, mfu -100.00%\n"
    ((run,), _) = read_console(text, "nanogpt")
    record, rows = records.record_of(run, "x.log", "nanogpt", FACTS)
    assert record["metrics"]["train_s"] is None and [row["step_ms"] for row in rows] == [300.0, 200.0]


def nanochat(every=1):
    steps = (
        NANOCHAT_STEP.format(num=num, ms=9000.0 if num < 11 else 500.0 + num, total="0.03" if num == 13 else "0.02")
        for num in range(0, 14, every)
    )
    return NANOCHAT.format(steps="\n".join(steps)).encode()


def test_nanochats_bits_per_byte_are_its_headline_and_no_loss():
    ((run,), facts) = read_console(nanochat(), "nanochat")
    assert (run.val_loss, run.headline) == (None, {"val_bpb": "1.32971"})
    assert (run.val_step, run.declared_steps, run.complete) == (14, 14, True)
    assert run.facts == {"gpu_name": "NVIDIA H100 80GB HBM3", "world_size": 8, "peak_mib": 75422.02}
    assert run.batch_tokens == 524_288
    assert run.train_time_ms == pytest.approx(511 + 512 + 513)  # steps 0 to 10 are not timed
    metrics = records.record_of(run, "x.log", "nanochat", FACTS | facts)[0]["metrics"]
    assert metrics["step_avg_ms"] == pytest.approx(512) and metrics["tokens_per_s"] == pytest.approx(524_288 / 0.512)
    assert (metrics["num_steps"], metrics["num_flagged_steps"], metrics["step_ms_p50"]) == (14, 0, 512.0)
    assert facts["unmatched"] == []


def test_nanochat_that_prints_every_other_step_has_the_time_that_it_prints():
    ((run,), _) = read_console(nanochat(every=2), "nanochat")
    assert run.train_time_ms == pytest.approx(0.03 * 60e3)
    ((run,), _) = read_console(nanochat().replace(b"Step 00014 | Validation", b"Step 00014 | Lost"), "nanochat")
    assert not run.complete


def test_kempnerforges_evaluations_are_validations_and_its_colours_are_taken_off():
    text = FORGE.format(num=1, loss=7.1, mem=40.5) + FORGE.format(num=2, loss=6.9, mem="71.2")
    text += "[step 2] moe/aux_loss=0.01\n[rank 0] INFO     [step 2] eval/loss=6.8000 | eval/perplexity=897.8473\n"
    text += "[step 3] loss=abc\nTraining complete: 2 steps, 65,536 tokens\n"
    ((run,), facts) = read_console(text.encode(), "kempnerforge")
    assert run.train_time_ms == pytest.approx(1280.0) and run.columns["train_loss"].tolist() == [7.1, 6.9]
    assert run.columns["lr"].tolist() == [3e-4, 3e-4] and run.facts["peak_mib"] == pytest.approx(71.2 * 1024)
    assert (run.val_loss, run.complete, run.batch_tokens) == (6.8, True, 32_768)
    assert facts["unmatched"] == [(5, "[step 3] loss=abc")]


def test_nanochats_fine_tuning_numbers_from_one_and_says_no_total():
    """In the chat_sft.py of 2026 steps 11 and 12 are timed, 20 + 30 ms; it is complete when it says so."""
    text = "".join(
        f"step {num:05d} ({num}.00%) | loss: 1.5 | lrm: 1.00 | dt: "
        f"{10.0 * (num - 9) if num > 10 else 900.0:.2f}ms | tok/sec: 5 | mfu: 1.00 | epoch: 1 | total time: "
        "0.00m\n"
        for num in range(1, 13)
    )
    text += "Step 00012 | Validation bpb: 0.5123\nStep 00012 | ChatCORE: 0.2100 | ChatCORE_cat: 0.1000\n"
    text += "Total training time: 0.00m\nMinimum validation bpb: 0.5123\n"
    ((run,), facts) = read_console(text.encode(), "nanochat")
    assert (run.num_steps, run.declared_steps, run.train_time_ms) == (12, None, 50.0)
    assert (run.headline, run.complete, facts["unmatched"]) == ({"val_bpb": "0.5123"}, True, [])


def test_nanochats_fine_tuning_of_2025_has_losses_and_no_times():
    line = "Step {:05d}/00003 | Training loss: 1.{}00000| lrm: 1.000000| num_tokens: 1,234\n"
    text = "".join(line.format(num, num) for num in range(2))
    text = f"Step 00000 | Validation loss: 2.000000\n{text}Step 00002 | Validation loss: 1.500000\n"
    text += "Step 00002 | mmlu_acc: 0.280000, arc_easy_acc: 0.310000\n"
    ((run,), facts) = read_console(text.encode(), "nanochat")
    assert (run.val_loss, run.num_steps) == (1.5, 2)
    assert (run.declared_steps, run.train_time_ms, run.complete, facts["unmatched"]) == (2, None, True, [])
    assert run.columns["train_loss"][1:].tolist() == [1.0, 1.1]


@pytest.mark.parametrize(
    "line",
    [
        "step 00003/00014 (1.0",
        "step 00003 (1.00%) | loss: 1.0",
        "Step 00003 | Validation bp",
        "Step 00003/00014 | Training lo",
    ],
)
def test_a_torn_nanochat_line_is_reported(line):
    _, facts = read_console(nanochat() + line.encode(), "nanochat")
    assert [text for _, text in facts["unmatched"]] == [line]


FORGE_HEAD = """[rank 0] INFO     Detected GPU: NVIDIA H200 → 989.0 bf16 TFLOPS
[rank 0] INFO     Starting training: step=0, max_steps=3, batch_size=4, grad_accum=4, world_size=8
"""


def test_kempnerforge_without_evaluations_is_complete_when_it_says_so():
    steps = "".join(FORGE.format(num=num, loss=7.1, mem=40.5) for num in (1, 2, 3))
    text = f"{FORGE_HEAD}{steps}[rank 0] INFO     [step 3] GPU mem: 1.0GB allocated\n"
    done = "[rank 0] INFO     Training complete: 3 steps, 393,216 tokens\n"
    ((run,), facts) = read_console((text + done).encode(), "kempnerforge")
    assert (run.complete, run.val_loss) == (True, None)
    assert (run.declared_steps, run.batch_tokens, facts["unmatched"]) == (3, 131_072, [])
    assert (run.facts["gpu_name"], run.facts["world_size"]) == ("NVIDIA H200", 8)
    ((run,), _) = read_console(text.encode(), "kempnerforge")
    assert not run.complete
    text = f"{text}Training complete: 2 steps, 5 tokens\n".replace("[step 3]", "[step 2]")
    ((run,), _) = read_console(text.encode(), "kempnerforge")
    assert run.complete  # it was stopped, and says that this was its end


NANOSWE = """system info:
    world_size: 8
    gpu_name: NVIDIA B200
step 000000 | loss 10.398314 | lrm 0.0250 | dt_ms 54852.9
step 000001 | loss 10.340952 | lrm 0.0500 | dt_ms 8124.4
run complete @ step 2: 0.00 min training time; 0.1/192 GPU-h used
"""
FP32 = "val loss 4.5\nstep    1/2: train loss 4.3 (45.5 ms, 9 tok/s)\nstep    2/2: train loss 4.2 (44.5 ms, 9 tok/s)\n"
LLM_C = "val loss 5.3\nstep 0: train loss 5.2 (took 1928.5 ms)\nstep 1: train loss 5.1 (took 71.5 ms)\n"


@pytest.mark.parametrize("before", ["", "[2026-06-25 19:28:42] ", "1776142719.307 ", "[04:55:57] ", "[default0]:"])
@pytest.mark.parametrize(
    ("form", "text", "losses", "time_ms", "declared"),
    [
        ("nanoswe", NANOSWE, [10.398314, 10.340952], None, None),  # its clock starts after 11 steps
        ("llm.c", FP32 + "val loss 4.0\n", [4.3, 4.2], 90.0, 2),
        ("llm.c", LLM_C + "val loss 4.0\n", [5.2, 5.1], 2000.0, None),
    ],
)
def test_lines_are_read_whatever_a_logger_or_a_launcher_puts_before_them(before, form, text, losses, time_ms, declared):
    ((run,), facts) = read_console("".join(f"{before}{line}\n" for line in text.splitlines()).encode(), form)
    losses_read = run.columns["train_loss"][~np.isnan(run.columns["train_loss"])].tolist()
    assert (losses_read, run.train_time_ms, run.declared_steps) == (losses, time_ms, declared)
    assert (run.complete, run.num_steps, facts["unmatched"]) == (True, 2, [])
    if form == "nanoswe":
        assert (run.val_loss, run.facts["gpu_name"], run.facts["world_size"]) == (None, "NVIDIA B200", 8)
    else:
        assert (run.val_loss, run.val_step) == (4.0, 2)


@pytest.mark.parametrize("printed, unmatched", [("skipped", 0), ("None", 0), ("0.99x", 1), ("skipped 0.9", 1), ("", 1)])
def test_a_metric_that_was_not_evaluated_is_none_and_one_that_was_torn_is_reported(printed, unmatched):
    steps = "step 00000 (0.0%) | loss: 9.0 | lrm: 1.00 | dt: 900ms | tok/sec: 5 | mfu: 1% | remaining: 300s\n"
    ((run,), facts) = read_console(f"{steps}val_bpb:          {printed}\nnum_steps: 1\n".encode(), "autoresearch")
    assert (run.headline, run.num_steps, len(facts["unmatched"])) == ({}, 1, unmatched)


@pytest.mark.parametrize("time", ["nan", "inf"])
def test_a_step_time_that_cannot_be_read_is_unknown_as_is_every_sum_of_it(time):
    text = "".join(f"iter {step}: loss 5.0, time {ms}ms, mfu 1.00%\n" for step, ms in enumerate((200, time, 300)))
    ((run,), _) = read_console(text.encode(), "nanogpt")
    assert (run.train_time_ms, run.diverged_step, run.num_steps) == (None, None, 3)
    assert [row.get("step_ms") for row in records.rows_of(run)] == [200.0, None, 300.0]


@pytest.mark.parametrize("max_iters, complete", [(4, True), (9, False)])
def test_nanogpt_that_prints_its_settings_says_where_it_was_to_end(max_iters, complete):
    head = f"max_iters = 600000 # config\nOverriding: max_iters = {max_iters}\n"
    ((run,), _) = read_console((head + NANOGPT).encode(), "nanogpt")
    assert (run.declared_steps, run.complete) == (max_iters + 1, complete)


def test_a_run_that_was_resumed_is_one_and_one_that_began_anew_is_another():
    first = "".join(f"iter {num}: loss {num + 1}.0, time 200.00ms, mfu 1.00%\n" for num in (0, 1, 2, 3))
    resumed = "".join(f"iter {num}: loss 0.{num}, time 200.00ms, mfu 1.00%\n" for num in (2, 3, 4))
    runs, _ = read_console((first + resumed + first).encode(), "nanogpt")
    assert [run.columns["train_loss"].tolist() for run in runs] == [[1.0, 2.0, 0.2, 0.3, 0.4], [1.0, 2.0, 3.0, 4.0]]


# ---- records


def test_a_record_says_what_is_unknown(tmp_path):
    folder = tmp_path / "track_1_short" / "2026-01-10_Idea" / "baseline"
    folder.mkdir(parents=True)
    steps = [f"step:{step}/3 train_time:{ms}ms step_avg:nanms" for step, ms in ((1, 100), (2, 250), (3, 300))]
    last = "step:3/3 val_loss:3.2700 train_time:300ms step_avg:100.00ms"
    (folder / "a.txt").write_bytes(log("step:0/3 val_loss:10.8 train_time:0ms step_avg:nanms", *steps, last))
    ((path, part_of),) = dialects.files_of([tmp_path])
    (((run, _),), _) = dialects.read_file(path, part_of=part_of)
    assert (run["provenance"], run["track"], run["name"]) == ("imported", "gpt2_small", "2026-01-10_Idea-baseline")
    assert (run["seed"], run["session_id"], run["comparability_id"], run["config_id"], run["world_size"]) == (None,) * 5
    assert run["metrics"]["train_s"] == 0.3 and run["metrics"]["step_avg_ms"] == pytest.approx(100.0)
    assert run["metrics"]["target_reached"] is True
    assert run["imported"]["file"] == "track_1_short/2026-01-10_Idea/baseline/a.txt"
    assert str(tmp_path) not in json.dumps(run)
    ((_, rows),), _ = dialects.read_file(folder / "a.txt")
    assert [row.get("step_ms") for row in rows] == [None, 100.0, 150.0, 50.0]


def test_a_clock_that_goes_back_a_little_in_the_first_steps_was_not_restarted():
    times_ms = (10, 20, 30, 40, 50, 60, 70, 55, 90)
    lines_ = [f"step:{step}/9 train_loss:7.0 train_time:{ms}ms step_avg:nanms" for step, ms in enumerate(times_ms, 1)]
    (run,), _ = modded_nanogpt.read(log(*lines_, "step:9/9 val_loss:6.7 train_time:90ms step_avg:10.00ms"))
    record, rows = records.record_of(run, Path("x.txt"), "modded-nanogpt", FACTS)
    assert record["validity_reasons"] == [
        "the time that it prints goes back from 70 to 55 ms at step 8 (1 step): it counts nowhere"
    ]
    assert [row["step"] for row in rows if row.get("train_time_ms") is None] == [8]


def test_steps_before_a_clock_that_starts_again_are_not_timed_whatever_step_avg_says():
    times_ms = [*range(100, 1001, 100), *range(100, 1001, 100)]
    lines_ = [
        f"step:{k}/20 train_loss:7.0 train_time:{ms}ms step_avg:{ms / k:.2f}ms" for k, ms in enumerate(times_ms, 1)
    ]
    (run,), _ = modded_nanogpt.read(log(*lines_, "step:20/20 val_loss:6.7 train_time:1000ms step_avg:50.00ms"))
    record, _ = records.record_of(run, Path("x.txt"), "modded-nanogpt", FACTS)
    assert record["metrics"]["step_avg_ms"] == 100.0 and "untimed" in record["imported"]["step_avg_meaning"]
    assert record["validity_reasons"] == ["its clock starts again at step 11, and its step_avg does not say so"]


def test_a_loss_below_0_makes_an_imported_run_invalid():
    (run,), _ = modded_nanogpt.read(log("step:2/2 val_loss:-0.5 train_time:20ms step_avg:10.00ms"))
    record, _ = records.record_of(run, Path("x.txt"), "modded-nanogpt", FACTS)
    assert record["validity"] == "invalid" and record["validity_reasons"][0].startswith("val_loss -0.500000 is below 0")


def test_short_runs_whose_times_differ_by_a_fraction_of_a_millisecond_are_two():
    ids = set()
    for ms in ("20.125", "20.126", "20.126"):
        ends = [f"step:{step}/2 val_loss:3.0 train_time:{10 * step}ms step_avg:10.00ms" for step in (0, 1)]
        (run,), _ = modded_nanogpt.read(log(*ends, f"step:2/2 val_loss:3.0 train_time:{ms}ms step_avg:10.06ms"))
        ids.add(records.record_of(run, Path("x.txt"), "modded-nanogpt", FACTS)[0]["imported"]["same_run_id"])
    assert len(ids) == 2


@pytest.mark.parametrize(("before", "quotes"), [("", '"""'), ("+ cat train.py\n", "'''")])
def test_a_metric_line_in_a_docstring_of_a_source_without_separators_is_no_run(before, quotes):
    line = "step:1/1 val_loss:3.0 train_time:20ms step_avg:20.00ms"
    source = f"{before}import time\n\ndef train():\n    {quotes}Prints\n{line}\n    {quotes}\n    pass\n"
    (run,), _ = modded_nanogpt.read(f"{source}{line.replace('3.0', '2.5')}\n".encode())
    assert run.val_loss == 2.5
    assert not modded_nanogpt.read(source.encode())[0]


def test_a_clock_that_was_set_back_gives_no_step_time():
    data = log(
        "step:10/12 train_loss:7.0 train_time:54881ms step_avg:nanms",
        "step:11/12 train_loss:6.9 train_time:176ms step_avg:nanms",
        "step:12/12 train_loss:6.8 train_time:353ms step_avg:nanms",
        "step:12/12 val_loss:6.7 train_time:353ms step_avg:176.50ms",
    )
    (run,), _ = modded_nanogpt.read(data)
    record, rows = records.record_of(run, Path("x.txt"), "modded-nanogpt", FACTS)
    assert [row.get("step_ms") for row in rows] == [None, None, 177.0]
    assert record["validity"] == "valid" and "untimed" in record["imported"]["step_avg_meaning"]
