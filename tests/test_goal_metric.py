"""Goals of another metric than val_loss: bits per byte of our own models, scores where higher is better, refusals."""

import math

import comparing
import pytest
import real_runs
import torch

from bench.base import metric
from bench.cli import table
from bench.compare import target
from bench.config import schema
from bench.data import shards
from bench.data.sources import datasets
from bench.launch import initial_record
from bench.launch.prepare import prepare
from bench.record import step_files, verification
from bench.training import weights
from bench.training.model import build_model

NOTHING = {"target_val_loss": None, "target_gap_nats": None, "stop_at_target": False}


def goal(name, direction="lower", unit="", target=None):
    return NOTHING | {"metric": {"name": name, "unit": unit, "direction": direction}, "target": target}


def raced(a_scores, b_scores, **of_goal):
    arms = comparing.raced([10.0, 10.1, 10.2, 10.1], [10.1, 10.2, 10.0, 10.1], goal=goal(**of_goal))
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
    words = ("goal.metric=val_bpb", "goal.target=6.5", "goal=target", "goal.val_tokens=16384", "checkpoint.save=true")
    return real_runs.run(results, *words, "goal.num_steps=40", "goal.val_every_steps=2")


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


def test_a_run_stops_at_its_target_of_bits_per_byte_and_says_them_everywhere(run_by_bpb, capsys):
    run, rows = real_runs.run_json(run_by_bpb), step_files.read(run_by_bpb)
    assert run["metrics"]["target_reached"] is True and run["metrics"]["num_steps"] < 40
    validated = [row["val_bpb"] for row in rows if row["val_loss"] is not None]
    assert validated[-1] == run["metrics"]["score"] <= 6.5 < min(validated[:-1])
    assert f"val_bpb:{validated[-1]:.6f} " in (run_by_bpb / "logs" / "rank0.log").read_text()
    assert [rule for rule in verification.report(run_by_bpb)["rules"] if not rule["passed"]] == []
    assert table.main([str(run_by_bpb)]) == 0
    assert f"val_bpb  {run['metrics']['score']:.5f}" in capsys.readouterr().out


def test_fewer_bits_per_byte_are_better_and_the_sentences_name_them():
    arms = raced([1.20, 1.21, 1.19, 1.20], [1.10, 1.11, 1.09, 1.10], name="val_bpb", unit="bits per byte", target=1.15)
    found = comparing.compare(*arms, on="loss")
    assert found["verdict"] == "better" and found["val_loss"]["below_target"] == [False, True]
    assert found["words"].startswith("B is better than A: -0.10000 bits per byte of val_bpb (95 % interval ")


def test_where_higher_is_better_more_wins_and_less_loses():
    of_goal = {"name": "core", "direction": "higher", "target": 0.255}
    low, high = [0.24, 0.241, 0.239, 0.24], [0.26, 0.261, 0.259, 0.26]
    found, turned = (comparing.compare(*raced(*scores, **of_goal), on="loss") for scores in ((low, high), (high, low)))
    assert (found["verdict"], turned["verdict"]) == ("better", "worse")
    assert found["val_loss"]["below_target"] == [False, True] and found["val_loss"]["verdict"] == "not_worse"
    assert found["val_loss"]["change_nats"] == pytest.approx(0.02) and found["val_loss"]["ci95_nats"][0] > 0.018
    assert turned["val_loss"]["verdict"] == "worse"
    _, rows = found, [comparing.row_of(run) for run in raced(low, high, **of_goal)[1]]
    decision = target.decide(rows, 0.01)
    assert decision["passed"] is True and decision["words"].startswith("mean core 0.2600 (sd 0.0008, n=4) is above the")


def test_runs_of_different_metrics_are_not_compared():
    (a, _), (_, b) = (raced([1.2] * 4, [1.1] * 4, name=name) for name in ("val_bpb", "core"))
    found = comparing.compare(a, b, on="loss")
    assert found["verdict"] == "not_comparable"
    assert found["val_loss"]["reasons"] == ["the goals are of different metrics (core, val_bpb)"]


def test_the_goal_of_val_loss_is_recorded_as_before():
    config = prepare(["track=cpu_nano", "hardware=cpu"], check_own=False, say=str).config
    assert initial_record.goal_facts(config.goal) == {} and metric.of_goal({"target_val_loss": 3.0}) == metric.VAL_LOSS


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["goal.metric=val_bpb"], "goal.target_val_loss=3.0: the goal is val_bpb: give goal.target=NUMBER and goal."),
        (["goal.target=3.0"], "goal.target=3.0: of val_loss it is goal.target_val_loss: give that, or name a goal.met"),
        (["goal.metric=core", "goal.target_val_loss=null"], "goal.metric=core: our own models are measured in val_lo"),
        (["goal.metric=Val"], "goal.metric=Val: use a name of small letters, digits and _"),
        (["goal.metric_unit=bits"], "goal.metric_unit=bits: val_loss has its own: remove it, or name a metric of your"),
        (
            ["track=cpu_floor", "goal.metric=val_bpb", "goal.target_gap_nats=null", "goal.target=2"],
            "goal.metric=val_bpb: source markov does not say how many bytes its tokens stand for: use data=pysource",
        ),
        (
            ["goal.metric=val_bpb", "goal.target_val_loss=null", "goal=target"],
            "goal.stop_at_target=True: there is no target: set goal.target",
        ),
    ],
)
def test_a_metric_that_cannot_be_had_is_refused_before_anything_is_trained(words, sentence):
    with pytest.raises(ValueError) as refused:
        prepare(["track=cpu_nano", "hardware=cpu", *words], check_own=False, say=str)
    assert str(refused.value).startswith(sentence)
