"""Goals of another metric than val_loss: bits per byte of our own models, scores where higher is better, refusals."""

import json
import math
import re

import claimed
import comparing
import pytest
import real_runs
import scripted
import torch

from bench.base import metric
from bench.base.reading import patterns
from bench.cli import table
from bench.compare import effects, selection, target
from bench.config import compose, refusals, schema
from bench.data import shards
from bench.data.sources import datasets
from bench.launch.prepare import prepare
from bench.launch.script import outcome, script
from bench.plans.race import planning
from bench.plans.sweep import search
from bench.record import metrics, race_folder, step_files, verification
from bench.record import rows as rows_module
from bench.record.importers import dialects
from bench.report import curves, run_page
from bench.training import weights
from bench.training.model import build_model
from bench.training.timing.loop import FinishLine

NOTHING = {"target_val_loss": None, "target_gap_nats": None, "stop_at_target": False}


def goal(name, direction="lower", unit="", target=None):
    return NOTHING | {"metric": {"name": name, "unit": unit, "direction": direction}, "target": target}


def raced(a_scores, b_scores, **goal_settings):
    arms = comparing.raced([10.0, 10.1, 10.2, 10.1], [10.1, 10.2, 10.0, 10.1], goal=goal(**goal_settings))
    for runs, scores in zip(arms, (a_scores, b_scores), strict=True):
        for run, score in zip(runs, scores, strict=True):
            run["metrics"]["score"] = score
    return arms


def bits_per_byte(logits_NV, targets_N, bytes_V):
    """nanochat's definition in plain words: nats of the targets that have bytes, in bits, over those bytes."""
    nats, num_bytes = 0.0, 0
    for logits_V, target_token in zip(logits_NV.double(), targets_N.tolist(), strict=True):
        if bytes_V[target_token]:
            nats -= torch.log_softmax(logits_V, 0)[target_token].item()
            num_bytes += int(bytes_V[target_token])
    return nats / math.log(2) / num_bytes


@pytest.fixture(scope="module")
def run_by_bpb(tmp_path_factory):
    results = tmp_path_factory.mktemp("bpb") / "results"
    options = ("goal.metric=val_bpb", "goal.target=6.5", "goal=target", "goal.val_tokens=16384", "checkpoint.save=true")
    return real_runs.run(results, *options, "goal.num_steps=40", "goal.val_every_steps=2")


def test_bits_per_byte_are_those_of_nanochats_formula_and_marks_of_documents_do_not_count(run_by_bpb):
    config, run = schema.read(run_by_bpb), real_runs.run_json(run_by_bpb)
    model = build_model(config, torch.device("cpu"), 256)
    kept = {name: torch.as_tensor(tensor) for name, tensor in weights.read(run_by_bpb / weights.FILE).items()}
    model.load_state_dict(kept)
    bytes_V = datasets.chosen(config.data).token_bytes()
    (shard,) = (shards.check(file.path) for file in datasets.find(config.data, say=str).val)
    span = torch.as_tensor(shard.tokens()[: config.goal.val_tokens + 1].astype("int64"))
    tokens_BT, targets_N = span[:-1].view(-1, config.data.seq_len), span[1:]
    assert (targets_N == 256).any()  # else nothing is left out
    with torch.no_grad():
        logits_NV = model.eval().logits(tokens_BT).flatten(0, 1)
    expected = bits_per_byte(logits_NV, targets_N, bytes_V)
    assert run["metrics"]["score"] == pytest.approx(expected, rel=1e-5)
    assert run["measured"]["val_bytes"] == int(bytes_V[targets_N].sum())
    assert abs(run["metrics"]["val_loss"] / math.log(2) - expected) > 1e-4  # what it would be with the marks


def test_a_run_stops_at_its_target_of_bits_per_byte_and_says_them_everywhere(run_by_bpb, printed):
    run, rows = real_runs.run_json(run_by_bpb), step_files.read(run_by_bpb)
    assert run["metrics"]["target_reached"] is True and run["metrics"]["num_steps"] < 40
    validated = [row["val_bpb"] for row in rows if row["val_loss"] is not None]
    assert validated[-1] == run["metrics"]["score"] <= 6.5 < min(validated[:-1])
    assert f"val_bpb:{validated[-1]:.6f} " in (run_by_bpb / "logs" / "rank0.log").read_text()
    assert [rule for rule in verification.report(run_by_bpb)["rules"] if not rule["passed"]] == []
    assert f"val_bpb  {run['metrics']['score']:.5f}" in printed(table, run_by_bpb)


def test_pages_and_curves_draw_the_goals_metric(run_by_bpb):
    rows = [row for row in step_files.read(run_by_bpb) if row["val_loss"] is not None]
    by_step, by_time, step_time = curves.arm_charts({"A": [run_by_bpb]})
    titles = [chart["title"] for chart in (by_step, by_time, step_time)]
    assert titles == ["val_bpb by step", "val_bpb by time", "Step time"]
    curve = curves.curves_of_run(run_by_bpb, score="val_bpb")["val"]
    assert curve["step"] == [row["step"] for row in rows]
    assert curve["val_bpb"] == pytest.approx([row["val_bpb"] for row in rows], rel=1e-5)
    overlay = curves.html([selection.arm_from_each([str(run_by_bpb)])[0]], run_by_bpb / "overlay.html")
    assert re.search('"goals": ?{"val_bpb": ?"val_bpb, bits per byte"}', overlay)
    assert ">val_bpb</th>" in overlay
    assert overlay.index(">val_bpb</option>") < overlay.index(">val_loss</option>")
    page = run_page.html(run_by_bpb)
    score = real_runs.run_json(run_by_bpb)["metrics"]["score"]
    assert "val_bpb by step" in page and "val_bpb, bits per byte" in page and f"{score:.5f}" in page


def test_runs_of_different_goals_are_drawn_by_val_loss():
    by_bpb, by_loss = goal("val_bpb", unit="bits per byte"), {"target_val_loss": 3.0}
    assert curves.metric_of([by_bpb, by_bpb]) == metric.VAL_BPB
    assert curves.metric_of([by_bpb, by_loss]) == curves.metric_of([]) == metric.VAL_LOSS


def test_fewer_bits_per_byte_are_better_and_the_sentences_name_them():
    arms = raced([1.20, 1.21, 1.19, 1.20], [1.10, 1.11, 1.09, 1.10], name="val_bpb", unit="bits per byte", target=1.15)
    comparison = comparing.compare(*arms, on="loss")
    assert comparison["verdict"] == "better" and comparison["val_loss"]["below_target"] == [False, True]
    assert comparison["words"].startswith("B is better than A: -0.10000 bits per byte of val_bpb (95 % interval ")


def test_where_higher_is_better_more_wins_and_less_loses():
    core = {"name": "core", "direction": "higher", "target": 0.255}
    low, high = [0.24, 0.241, 0.239, 0.24], [0.26, 0.261, 0.259, 0.26]
    outcome, turned = (comparing.compare(*raced(*scores, **core), on="loss") for scores in ((low, high), (high, low)))
    assert (outcome["verdict"], turned["verdict"]) == ("better", "worse")
    assert outcome["val_loss"]["below_target"] == [False, True] and outcome["val_loss"]["verdict"] == "not_worse"
    assert outcome["val_loss"]["change"] == pytest.approx(0.02) and outcome["val_loss"]["ci95"][0] > 0.018
    assert turned["val_loss"]["verdict"] == "worse"
    _, rows = outcome, [comparing.row_of(run) for run in raced(low, high, **core)[1]]
    decision = target.decide(rows, 0.01)
    assert decision["passed"] is True and decision["words"].startswith("mean core 0.2600 (sd 0.0008, n=4) is above the")


def test_a_race_of_bits_per_byte_is_planned_and_judged_in_their_unit(tmp_path, monkeypatch):
    arguments = ["goal.metric=val_bpb", "goal.target_val_loss=null", "n=3", "on=loss", "--anyway"]
    results = claimed.Results(tmp_path / "results")
    plans, margins = [], []
    for own in ([], ["margin=0.0003"]):
        folder = results.race(monkeypatch, *arguments, *own)
        plans.append(json.loads((folder / "plan.json").read_text()))
        margins.append(race_folder.verdicts_of(race_folder.read(folder))["B"]["val_loss"]["margin"])
        text = (folder / "race.md").read_text()
        assert "val_bpb" in text and not re.search("(?<!target_)val_loss", text)
    assert [plan["margin"] for plan in plans] == margins == [0.0006, 0.0003]
    assert plans[0]["metric"] == ["val_bpb", "bits per byte", "lower"] and "loss_margin_nats" not in plans[0]


def test_plans_from_before_margins_had_units_are_read_as_they_were_meant():
    chosen, usual = {"loss_margin_nats": 0.01}, {"loss_margin_nats": 0.002}
    assert [target.planned_margin(plan, metric.VAL_LOSS) for plan in (chosen, usual, {})] == [0.01, 0.002, None]
    assert [target.planned_margin(plan, metric.VAL_BPB) for plan in (chosen, usual)] == [0.01, None]


def test_a_track_that_fixes_bits_per_byte_allows_no_wider_margin_of_them():
    margin = {"margin": 0.001}
    planning.refuse_laxer("autoresearch", {"margin": 0.0006, "metric": metric.VAL_BPB})
    with pytest.raises(ValueError, match="margin=0.001: track autoresearch allows at most 0.0006"):
        planning.refuse_laxer("autoresearch", margin | {"metric": metric.VAL_BPB})
    with pytest.raises(ValueError, match="margin=0.001: track autoresearch allows at most 0: leave margin out"):
        planning.refuse_laxer("autoresearch", margin | {"metric": ["accuracy", "", "higher"]})
    planned = margin | {"metric": ["val_bpb", "bits per byte", "lower"]}  # as plan.json has it, which a claim shows
    assert target.laxer_than_track("autoresearch", planned) == [("margin", 0.001, 0.0006)]


def test_a_search_makes_the_goals_metric_small_or_where_higher_is_better_large():
    run = comparing.a_run("A", 10.0, 0, goal=goal("core", "higher"))
    run["metrics"]["score"] = 0.25
    assert search.objective_of(run, "score") == -0.25
    assert search.objective_of(comparing.a_run("A", 10.0, 0, val_loss=3.5), "score") == 3.5


def test_runs_of_different_metrics_are_not_compared():
    (a, _), (_, b) = (raced([1.2] * 4, [1.1] * 4, name=name) for name in ("val_bpb", "core"))
    comparison = comparing.compare(a, b, on="loss")
    assert comparison["verdict"] == "not_comparable"
    assert comparison["val_loss"]["reasons"] == ["the goals are of different metrics (core, val_bpb)"]


def test_the_goal_of_val_loss_is_recorded_as_before():
    config = prepare(["track=cpu_nano", "hardware=cpu"], check_own=False, say=str).config
    assert metric.goal_facts(config.goal.of, None) == {}
    assert metric.from_goal({"target_val_loss": 3.0}) == metric.VAL_LOSS


def test_shards_of_ones_own_have_the_bytes_of_the_tokenizer_that_made_them():
    facts = {"source": "shards", "seq_len": 128, "batch_tokens": 1024, "train_glob": "a", "val_glob": "b"}
    by_gpt2 = datasets.chosen(schema.DataConfig(**facts, vocab_size=50304, tokenizer="gpt2")).token_bytes()
    assert by_gpt2.shape == (50304,) and by_gpt2[:256].tolist() == [1] * 256  # GPT-2's first tokens are single bytes
    assert by_gpt2[50256:].sum() == 0  # <|endoftext|>, and padding
    by_bytes = datasets.chosen(schema.DataConfig(**facts, vocab_size=300, tokenizer="bytes")).token_bytes()
    assert by_bytes.sum() == 256 and by_bytes[256:].sum() == 0
    with pytest.raises(ValueError, match="add data.tokenizer=gpt2 .or bytes., if that made them"):
        datasets.chosen(schema.DataConfig(**facts, vocab_size=300)).token_bytes()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["goal.metric=val_bpb"], "goal.target_val_loss=3.0: the goal is val_bpb: set goal.target=NUMBER and goal."),
        (["goal.target=3.0"], "goal.target=3.0: for val_loss, set goal.target_val_loss instead; otherwise choose"),
        (["goal.metric=core", "goal.target_val_loss=null"], "goal.metric=core: the harness measures its own models in"),
        (["goal.metric=Val"], "goal.metric=Val: use a name of small letters, digits and _"),
        (["goal.metric_unit=bits"], "goal.metric_unit=bits: val_loss already defines it: remove it, or name a"),
        (
            ["track=cpu_floor", "goal.metric=val_bpb", "goal.target_gap_nats=null", "goal.target=2"],
            "goal.metric=val_bpb: source markov does not say how many bytes its tokens encode: use data=pysource",
        ),
        (
            ["goal.metric=val_bpb", "goal.target_val_loss=null", "goal=target"],
            "goal.stop_at_target=True: there is no target: set goal.target",
        ),
    ],
)
def test_a_metric_that_cannot_be_had_is_refused_before_anything_is_trained(overrides, sentence):
    with pytest.raises(ValueError) as refused:
        prepare(["track=cpu_nano", "hardware=cpu", *overrides], check_own=False, say=str)
    assert str(refused.value).startswith(sentence)


# ---- metrics that are printed

AUTORESEARCH = """Vocab size: 8,192
\rstep 00000 (0.0%) | loss: 9.01 | lrm: 1.00 | dt: 900ms | tok/sec: 1,000 | mfu: 1.0% | epoch: 1 | remaining: 300s    \
\rstep 00001 (0.0%) | loss: 8.50 | lrm: 1.00 | dt: 300ms | tok/sec: 3,000 | mfu: 3.0% | epoch: 1 | remaining: 300s
---
val_bpb:          0.997900
training_seconds: 300.1
total_seconds:    325.9
peak_vram_mb:     45060.2
num_steps:        2
"""
GOLF = """train_batch_tokens:524288 train_seq_len:1024
seed:1337
step:13600/20000 train_loss:2.0234 train_time:592147ms step_avg:43.54ms
step:13780/20000 val_loss:2.0606 val_bpb:1.2172 train_time:600038ms step_avg:43.54ms
stopping_early: wallclock_cap train_time:600038ms step:13780/20000
Total submission size: 67272625 bytes
Total submission size int8+zlib: 15863489 bytes
DIAGNOSTIC post_ema val_loss:1.9155 val_bpb:1.1344 eval_time:2059ms
final_int8_zlib_roundtrip_exact stride:64 val_loss:2.07269931 val_bpb:1.22436570
"""
OF_GOLF = {"artifact_bytes": 15863489, "val_loss": 2.07269931}
NEW_GOLF = """  seed: 42
4900/20000 train_loss: 2.4294 train_time: 9.8m tok/s: 8000000
4900/20000 val_loss: 2.3541 val_bpb: 1.0757
stopping_early: wallclock_cap train_time: 599623ms step: 4900/20000
diagnostic pre-quantization post-ema val_loss:2.33055251 val_bpb:1.06490240 eval_time:7779ms
Total submission size quantized+brotli: 15952086 bytes
quantized_ttt_phased val_loss:2.32247803 val_bpb:1.06128183 eval_time:519546ms
"""
SLOWRUN = """Batch size: 524,288 tokens, grad accum: 1 steps
Step 00000 | Val BPB: 3.200000 | Val Loss: 10.900000
step 00001 (0.50%) | loss: 9.100000 | dt: 812.30ms | tok/sec: 645,280 | bf16_mfu: 40.00%
step 00002 (1.00%) | loss: 8.100000 | dt: 800.00ms | tok/sec: 655,360 | bf16_mfu: 40.00% | eta: 46.1m
Step 00002 | Epoch 1 | Val BPB: 1.050000 | Val Loss: 3.410000
  [equal] Val BPB: 1.040000 | Val Loss: 3.402000
Total training time: 47.12m
Min val Loss: 3.402000
"""
NANOCHAT = """step 00000/2 (0.00%) | loss: 9.1 | lrm: 1.00 | dt: 812.30ms | tok/sec: 645,280
step 00001/2 (50.00%) | loss: 8.1 | lrm: 1.00 | dt: 812.30ms | tok/sec: 645,280
Step 00002 | Validation bpb: 0.745000
Step 00002 | CORE metric: 0.2585
Total training time: 182.49m
"""


@pytest.mark.parametrize(
    ("form", "text", "name", "score", "steps", "train_s", "row"),
    [
        ("autoresearch", AUTORESEARCH, "val_bpb", 0.9979, 2, 300.1, {}),
        ("parameter-golf", GOLF, "val_bpb", 1.2243657, 13780, 600.038, OF_GOLF),
        ("parameter-golf", NEW_GOLF, "val_bpb", 1.06128183, 4900, 599.623, {"artifact_bytes": 15952086}),
        ("slowrun", SLOWRUN, "val_loss", 3.402, 2, 2827.2, {"val_bpb": 1.04}),
        ("nanochat", NANOCHAT, "val_bpb", 0.745, 2, 10949.4, {"core": 0.2585}),
    ],
)
def test_a_neighbours_log_is_read_with_the_metric_that_it_goes_by(
    tmp_path, form, text, name, score, steps, train_s, row
):
    (tmp_path / "a.log").write_text(text)
    assert dialects.detect(text.replace("\r", "\n").splitlines()) == form
    [(run, rows)], facts = dialects.read_file(tmp_path / "a.log", form)
    summary = rows_module.row_of(run)
    assert (facts["unmatched"], run["status"]) == ([], "complete")
    assert (summary["metric"], summary["num_steps"]) == (name, steps)
    assert (summary["score"], summary["train_s"]) == (pytest.approx(score), pytest.approx(train_s))
    assert rows[-1] | row == rows[-1]
    compared = selection.arms_from_words([str(tmp_path / "a.log")] * 2)[0].rows[0]  # without the name of its format
    assert compared["train_s"] == pytest.approx(train_s) and compared["metric"] == name


PRINTS = """import sys, time
for step in range(1, 5):
    time.sleep(0.05)
    print(f"step:{step}/4 train_loss:{5 - step} train_time:{50 * step}ms step_avg:50.00ms", flush=True)
    print(f"step:{step}/4 val_loss:{5 - step} train_time:{50 * step}ms step_avg:50.00ms", flush=True)
    print(f"accuracy after {step}: {step / 10}", flush=True)
"""


def test_a_metric_of_ones_own_is_found_by_its_pattern_in_what_a_script_prints(tmp_path):
    (tmp_path / "prints.py").write_text(PRINTS)
    own = ["track=free", "goal.metric=accuracy", "goal.metric_direction=higher", "goal.target=0.4"]
    setup = [*own, f"script={tmp_path / 'prints.py'}", r"goal.metric_pattern='accuracy after \d+: (?P<value>\S+)'"]
    done = real_runs.bench(tmp_path / "results", "run", "hardware=cpu", *setup)
    assert done.returncode == 0 and "complete: accuracy 0.4, val_loss 1.0000" in done.stdout, done.stdout + done.stderr
    (folder,) = real_runs.folders(tmp_path / "results")
    assert real_runs.run_json(folder)["metrics"]["target_reached"] is True
    assert step_files.validations(folder, "accuracy") == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}
    never = real_runs.bench(tmp_path / "results", "run", "hardware=cpu", *setup[4:5], "track=free", "goal.metric=core")
    why = "the script printed no core, which the goal needs; it printed val_loss: give goal.metric=val_loss"
    assert never.returncode == 1 and why in never.stdout


TRAINS_ONLY = """import time
start = time.perf_counter()
for step in range(7):
    print(f"step {step} loss {5 - step / 10} time {time.perf_counter() - start}", flush=True)
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    "metric",
    [
        ["goal.metric=train_loss"],
        ["goal.metric=loss_of_a_step", r"goal.metric_pattern='^step (?P<step>\d+) loss (?P<value>\S+)'"],
    ],
)
def test_a_script_that_does_not_validate_is_judged_by_the_loss_of_its_last_step(tmp_path, metric):
    (tmp_path / "train.py").write_text(TRAINS_ONLY)
    lines = r"step: '^step (?P<step>\d+) loss (?P<train_loss>\S+) time (?P<train_time_s>\S+)'"
    (tmp_path / "lines.yaml").write_text(lines)
    setup = ["track=free", "hardware=cpu", f"script={tmp_path}/train.py", f"script.dialect={tmp_path}/lines.yaml"]
    done = real_runs.bench(tmp_path / "results", "run", *setup, *metric)
    (folder,) = real_runs.folders(tmp_path / "results")
    assert done.returncode == 0 and real_runs.run_json(folder)["metrics"]["score"] == pytest.approx(4.4), done.stdout
    assert "is of step" not in done.stdout and "prints no" not in done.stdout
    never = real_runs.bench(tmp_path / "other", "run", *setup)
    assert "print val_loss after the last step, or give goal.metric=train_loss" in never.stdout


@pytest.mark.parametrize("name", ["tokens", "flags", "step_ms", "train_s"])
def test_a_metric_that_is_called_as_another_column_is_refused(tmp_path, name):
    (tmp_path / "train.py").write_text(TRAINS_ONLY)
    settings = [
        "track=free",
        f"script={tmp_path}/train.py",
        f"goal.metric={name}",
        r"goal.metric_pattern='a (?P<value>\S+)'",
    ]
    with pytest.raises(ValueError, match=f"goal.metric={name}: steps.csv has such a column already"):
        script.from_config(compose.compose(settings), settings)


# ---- budgets


def clocked(step_s, budget_s, val_every_steps=1000, slower_from=None):
    """Runs at this pace -> (steps at which it is validated, what its schedule was told, train_s)."""
    goal = schema.GoalConfig(num_steps=10_000, val_tokens=1, val_every_steps=val_every_steps, time_budget_s=budget_s)
    stops, horizons, train_s = [0], [], 0.0
    line = FinishLine(goal, 1.0, 1, lambda own_s: own_s, lambda *known: horizons.append(known))
    while (stop := line.next_stop(stops[-1], math.inf, train_s)) is not None:
        train_s += sum(step_s * (2 if slower_from and step > slower_from else 1) for step in range(stops[-1], stop))
        stops.append(stop)
    return stops, horizons, train_s


def test_a_run_by_the_clock_ends_before_its_budget_does_and_its_schedule_knows_when():
    stops, horizons, train_s = clocked(0.01, 5.0)
    assert stops[:4] == [0, 1, 10, 100] and len(stops) == 6 and 490 <= stops[4] <= 492 and 4.98 < train_s <= 5.0
    assert horizons[-2] == (stops[4], pytest.approx(500, abs=1))
    stops, horizons, train_s = clocked(0.01, 5.0, val_every_steps=50)
    assert stops[:5] == [0, 1, 10, 50, 100] and 4.97 < train_s <= 5.0
    assert 4.0 < clocked(0.01, 5.0, 50, slower_from=100)[2] <= 5.0


def test_a_budget_shorter_than_a_step_is_refused():
    with pytest.raises(ValueError, match="goal.time_budget_s=0.005: the first step took 0.01 s: give more"):
        clocked(0.01, 0.005)
    overrides = ["track=cpu_nano", "hardware=cpu", "goal=budget", "goal.target_val_loss=null"]
    with pytest.raises(ValueError, match=r"goal.token_budget=1000: a step has 1024 tokens .*: give as many or more"):
        prepare([*overrides, "goal.token_budget=1000"], check_own=False, say=str)
    with pytest.raises(ValueError, match="goal.token_budget=5000: goal.time_budget_s is set too: keep one of them"):
        prepare([*overrides, "goal.token_budget=5000", "goal.time_budget_s=3"], check_own=False, say=str)
    assert prepare([*overrides, "goal.token_budget=5000"], check_own=False, say=str).config.goal.num_steps == 4
    goal = schema.GoalConfig(num_steps=10, val_tokens=1, val_every_steps=5, flop_budget=7.9)
    known = []
    assert FinishLine(goal, 2.0, 1, float, lambda *horizon: known.append(horizon)).num_steps == 3 and known == [(0, 3)]
    with pytest.raises(ValueError, match=r"goal.flop_budget=7.9: a step of 4 tokens has 8 FLOPs: give more"):
        FinishLine(goal, 2.0, 4, float, print)


def test_the_best_validation_within_the_budget_counts():
    losses = {1: 5.0, 10: 3.0, 20: 3.2, 29: 3.1, 30: 2.9}  # a second a step
    rows = [{"step": step, "val_loss": losses.get(step), "step_ms": 1e3} for step in range(1, 31)]
    run = {"measured": {"batch_tokens": 8}, "model": {"flops_per_token": 2.0}, "goal": NOTHING}

    def score(**budget):
        scores = metrics._scores_within(run | {"goal": NOTHING | {"budget": budget}}, rows, metric.VAL_LOSS)
        return metric.VAL_LOSS.best(scores)

    assert (score(time_s=30.0), score(time_s=29.98), score(time_s=29.9)) == (2.9, 2.9, 3.0)  # 0.1 % late counts
    assert (score(tokens=8 * 30), score(tokens=8 * 30 - 1), score(flops=16.0)) == (2.9, 3.0, 5.0)
    assert score(time_s=0.5) is None
    printed = [row | {"train_time_ms": row["step"] * 500.0} for row in rows]
    goal = NOTHING | {"budget": {"time_s": 15.0}}
    assert metrics._scores_within(run | {"goal": goal}, printed, metric.VAL_LOSS) == list(losses.values())


def test_what_a_run_used_must_be_known_to_count_and_the_first_step_past_the_budget_is_named():
    rows = [{"step": step, "val_loss": 5.0 - step, "train_time_ms": 1e3 * step} for step in range(1, 4)]
    run = {"measured": {}, "model": {}, "goal": NOTHING | {"budget": {"time_s": 2.0}}}
    assert (metrics.step_past_budget(run, rows), metrics.step_past_budget(run, rows[:2])) == (3, None)
    by_tokens = run | {"goal": NOTHING | {"budget": {"tokens": 1000}}}
    assert metrics._scores_within(by_tokens, rows, metric.VAL_LOSS) == []
    assert metrics.step_past_budget(by_tokens, rows) is None
    assert metrics.step_past_budget(by_tokens | {"measured": {"batch_tokens": 400}}, rows) == 3


@pytest.mark.slow
def test_a_script_that_trains_on_past_its_budget_is_ended_and_its_run_is_whole(tmp_path):
    overrides = ["goal=budget", "goal.target_val_loss=null", "script.dialect=modded-nanogpt"]
    run = scripted.odd(tmp_path, "goes_on", *overrides, "goal.time_budget_s=1")
    rows, at_step = step_files.read(run["folder"]), run["script"]["ended_at_step"]
    assert run["status"] == "complete" and 1e3 < rows[-1]["train_time_ms"] < 5e3 and rows[-1]["step"] == at_step
    assert 5 < metrics.step_past_budget(run, rows) < at_step and run["metrics"]["score"] == 3.6
    assert not [doubt for doubt in run["doubts"] if doubt["instrument"] == "script"]
    assert run["script"]["ended_by"] == "script"
    assert run["environment"]["python"]  # what it knew of itself when it was ended
    assert [rule for rule in verification.report(run["folder"])["rules"] if not rule["passed"]] == []
    none = scripted.odd(tmp_path, "well", *overrides, "goal.time_budget_s=0.001", expect=1)
    spent = "goal.time_budget_s=0.001 is used up before the end of step 1, the first that the script prints: "
    assert none["failure"]["message"] == f"{spent}use a larger budget" and none["failure"]["kind"] == "bad_setting"
    short = scripted.odd(tmp_path, "well", *overrides, "goal.time_budget_s=100")  # ends itself
    assert short["status"] == "complete" and "ended_at_step" not in short["script"]
    by_tokens = scripted.odd(tmp_path, "well", *overrides, "goal.token_budget=10000", expect=1)
    assert by_tokens["failure"]["message"].startswith("goal.token_budget=10000 needs the number of tokens in a step")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "status", "ended_by"),
    [
        ("stops_naming_its_time", "complete", "launcher"),
        ("names_little_time", "complete", "launcher"),
        ("validates_never", "failed", "launcher"),
        ("compiles_for_long", "complete", "script"),  # after step 0, for longer than three budgets
    ],
)
def test_a_script_that_does_not_name_its_budgets_time_is_ended_by_the_launchers_clock(tmp_path, what, status, ended_by):
    overrides = [*scripted.TRACK, f"script={scripted.ODD}", f"script.args=[{what}]", "script.dialect=modded-nanogpt"]
    overrides += ["goal=budget", "goal.target_val_loss=null", "goal.time_budget_s=1", "hardware.wall_timeout_s=300"]
    changed = {"bench.launch.script.script_run.OVERDUE_S": 0.5}
    with real_runs.started(tmp_path, "run", *overrides, changed=changed) as launcher:
        assert launcher.wait(240) == (status != "complete")
        out = launcher.stdout.read()
    (folder,) = real_runs.folders(tmp_path)
    run = real_runs.run_json(folder)
    assert (run["status"], run["script"]["ended_by"]) == (status, ended_by), out
    by_launcher = "since its first step: it was ended by the launcher's clock"
    if status == "failed":
        assert by_launcher in run["failure"]["message"] and by_launcher in out
        return
    assert any(by_launcher in reason for reason in run["validity_reasons"]) == (ended_by == "launcher")
    assert [rule for rule in verification.report(folder)["rules"] if not rule["passed"]] == []


def test_runs_of_one_budget_are_compared_by_what_they_reached_in_it():
    timed_goal = NOTHING | {"budget": {"time_s": 300.0}}
    a, b = comparing.raced([10.0, 10.1, 10.2, 10.1], [10.1, 10.2, 10.0, 10.1], goal=timed_goal)
    for number, run in enumerate(a + b):
        run["metrics"] |= {"num_steps": 100 + number, "score": (3.3 if run in a else 3.2) + 0.001 * (number % 4)}
    judged = comparing.compare(a, b, on="loss")
    assert judged["verdict"] == "better" and judged["words"].startswith("B is better than A: -0.10000 nats of val_loss")
    reason = 'all runs have a budget of {"time_s":300.0}: what they reach in it is compared (on=loss)'
    assert judged["reasons"][0] == reason
    for runs, num_scores in ((a, 2), (b, 4)):
        for run in runs:
            run["metrics"]["num_scores"] = num_scores
    assert comparing.compare(a, b, on="loss")["verdict"] == "better"
    b[2]["metrics"]["num_scores"] = 50  # a slower machine in one run
    assert comparing.compare(a, b, on="loss")["verdict"] == "better"
    for run in b:  # of a loss that only fluctuates, the best of more is lower
        run["metrics"]["num_scores"] = 5
    why = "4 runs of B validate up to 5 times within the budget, and A 2 times: the best counts, and of more"
    assert comparing.compare(a, b, on="loss")["words"].startswith(why)
    for run in b[2:]:
        run["metrics"]["num_scores"] = 2
    assert comparing.compare(a, b, on="loss")["words"].startswith("2 runs of B validate up to 5 times within")
    b[0]["goal"] = timed_goal | {"budget": {"time_s": 600.0}}
    assert comparing.compare(a, b, on="loss")["words"] == "the budgets differ"


def test_metrics_of_one_name_are_different_if_their_direction_or_pattern_is():
    goals = [{}, {"goal.metric_pattern": "val (.*)"}, {"goal.metric_pattern": "train (.*)"}]
    config = [(json.dumps({"goal.x": 1} | goal),) for goal in goals]
    rows = [{"metric": "accuracy", "metric_direction": "higher", "config": texts} for texts in config]
    rows += [rows[0] | {"metric_direction": "lower"}, rows[0] | {"config": ()}]
    ids = [effects._metric_id(row | {"metric_unit": ""}) for row in rows]
    assert len(set(ids)) == 4 and ids[0] == ids[-1]
    lines = [{"script.lines.val": "(?P<accuracy>.*)"}, {"script.lines.step": "ema (?P<accuracy>.*)"}]
    lines.append({"script.lines.step": "it (?P<step>.*)"})  # which says nothing of the metric
    own = [effects._metric_id(rows[-1] | {"metric_unit": "", "config": (json.dumps(each),)}) for each in lines]
    assert len({*own, ids[0]}) == 3 and own[-1] == ids[0]


@pytest.mark.parametrize("pattern", [r"(x+x+)+y(?P<value>\S+)", r"(?:x|xx)*(?P<value>\d)", r"((?P<value>x?)){50}y"])
def test_a_pattern_that_may_take_forever_is_refused(pattern, tmp_path):
    own = schema.GoalConfig(num_steps=1, val_tokens=1, val_every_steps=1, metric="acc", metric_pattern=pattern)
    with pytest.raises(ValueError, match="it repeats a group that varies"):
        refusals._check_metric(own, is_script=True)
    (tmp_path / "own.yaml").write_text(json.dumps({"step": pattern.replace("value", "step")}))
    with pytest.raises(ValueError, match="repeats a group that varies"):
        dialects.read_yaml(str(tmp_path / "own.yaml"), "own.yaml")


def test_a_log_of_lines_in_two_formats_is_read_in_the_one_in_which_it_is_complete(tmp_path):
    """As a program prints it that has modded-nanogpt's validations and nanoGPT's iterations."""
    lines = [f"iter {step}: loss 4.1000, time 10.00ms, mfu 1.20%" for step in range(100)]
    lines.append("step:100/100 val_loss:3.2 train_time:1000ms step_avg:10.00ms")
    (tmp_path / "a.log").write_text("\n".join(lines) + "\n")
    (row,) = selection.arms_from_words([str(tmp_path / "a.log")] * 2)[0].rows
    assert (row["status"], row["num_steps"], row["val_loss"]) == ("complete", 100, 3.2)


def test_long_logs_have_more_time(monkeypatch):
    monkeypatch.setattr(outcome, "MATCHING_CPU_S", 1e-3)
    lines = [(step, f"step:{step}/9999 train_time:{step}ms step_avg:1ms") for step in range(3000)]
    own = schema.GoalConfig(num_steps=1, val_tokens=1, val_every_steps=1)
    assert len(outcome.read("modded-nanogpt", lines, own).rows) == 3000


def test_a_pattern_that_takes_too_long_is_interrupted(monkeypatch):
    monkeypatch.setattr(outcome, "MATCHING_CPU_S", 0.2)
    pattern = r".*.*.*.*.*.*y(?P<value>\S+)"
    own = schema.GoalConfig(num_steps=1, val_tokens=1, val_every_steps=1, metric="acc", metric_pattern=pattern)
    lines = [(1, "step:1/2 train_time:1ms step_avg:1ms"), (2, "x" * 2000)]
    with pytest.raises(patterns.TooLong, match=r"more than 0.2\d* s to match: use a simpler pattern"):
        outcome.read("modded-nanogpt", lines, own)
