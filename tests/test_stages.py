"""Stages: a run whose shape changes is the runs of its shapes one after the other, and says so in its record."""

import copy
import dataclasses
import functools
import math

import pytest
import real_runs
import torch

import models
from bench.config import compose, resolve, schema, stages
from bench.data import shards
from bench.data.sources import datasets
from bench.data.stream import Stream
from bench.instruments.instrument_set import InstrumentSet
from bench.launch.prepare import prepare
from bench.record import metrics, verification, work
from bench.training import distributed, staging
from bench.training.evaluate import evaluate
from bench.training.step_log import StepLog
from bench.training.timers import marks_for
from bench.training.trainer import Trainer
from models.documents import cu_seqlens, document_ids
from models.stages import Stage, Timeline, ends_of

CPU = schema.Machine(num_gpus=0, num_cpus=2)
SMALL = ["goal.num_steps=6", "goal.val_tokens=4096", "goal.val_every_steps=3", "hardware=cpu", "hardware.num_threads=1"]
SMALL += ["model.num_layers=1", "model.width=32", "model.num_heads=2"]
TWO_STAGES = "stages=[{until_step:2,batch_tokens:512,seq_len:64},{batch_tokens:1536,lr_frac:0.5}]"


def resolved(*overrides):
    return resolve.resolve(compose.compose(["track=free", *overrides], CPU), CPU, vocab_size=257)


def trainer_of(*overrides):
    job = prepare(["track=free", *overrides], check_own=False)
    files = {split: [shards.check(file.path) for file in getattr(job.dataset, split)] for split in ("train", "val")}
    trainer = Trainer(job.config, distributed.start("cpu", 60), files["train"], files["val"])
    log = StepLog(marks_for("cpu"), torch.device("cpu"), job.config.goal.num_steps)
    trainer.attach(InstrumentSet(essential=log), log)
    return trainer, log, files


def trained(trainer, log):
    """Losses of all steps, and the validation losses before the first step, in the middle and after the last."""
    val_losses = []
    for step in range(6):
        if step in (0, 3):
            val_losses.append(trainer.evaluate())
        log.on_step_start(step)
        trainer.step(step)
        log.on_step_end(step)
    val_losses.append(trainer.evaluate())
    trainer.close()
    return log._losses.tolist(), val_losses


# ---- which step is in which stage


def test_a_stage_ends_where_it_says_and_the_last_one_with_the_run():
    rows = [Stage(until_frac=0.25), Stage(until_step=7), Stage()]
    assert ends_of(rows, 10) == [2, 7, 10]  # round(2.5) is 2
    timeline = Timeline(rows, 10)
    assert [timeline.at(step).stage is rows[index] for step, index in ((0, 0), (1, 0), (2, 1), (6, 1), (7, 2), (9, 2))]
    assert [portion.num_steps for portion in timeline.portions] == [2, 5, 3]


def up_to(tokens):
    """Records 19 to 21: the next multiple of 128, from 128 on."""
    return next(multiple for multiple in range(128, 4096, 128) if multiple >= tokens)


# of each record: its window at step k of n, as its source works it out, and how many windows a run has
WINDOWS = {
    "r13": (lambda k, n: int(64 * ((k / n * (1792 - 64) + 64) // 64)), 27),
    "r14": (lambda k, n: int(64 * ((k / n * (1792 - 64) + 64) // 64)), 27),
    "r15": (lambda k, n: 64 * int((64 + (1792 - 64) * k / n) // 64), 27),
    "r16": (lambda k, n: 128 * int(((1 - k / n) * 64 + k / n * 1792 + 64) // 128), 14),
    "r17": (lambda k, n: 128 * int(((1 - k / n) * 64 + k / n * 1792 + 64) // 128), 14),
    "r18": (lambda k, n: 128 * int(((1 - k / n) * 128 + k / n * 1856) // 128), 14),
    "r19": (lambda k, n: up_to(1728 * k / n), 14),
    "r20": (lambda k, n: up_to(1728 * k / n), 14),
    "r21": (lambda k, n: up_to(1728 * k / n), 14),
    "r26": (lambda k, n: up_to(1728 * k / n), 14),
}


# of records 29 to 53: steps of the schedule, steps in all, and the blocks of the last steps and of the last validation
THIRDS = {
    "r29": (1671, 1670, 11, 11),
    "r30": (1706, 1705, 11, 11),
    "r31": (1671, 1670, 11, 13),
    "r32": (1671, 1670, 11, 13),
    "r33": (1661, 1660, 11, 20),
    "r34": (1646, 1645, 11, 20),
    "r35": (1641, 1680, 11, 20),
    "r37": (1641, 1680, 11, 20),
    "r38": (1631, 1670, 11, 20),
    "r39": (2381, 2420, 11, 20),
    "r40": (2291, 2330, 11, 20),
    "r42": (2245, 2285, 13, 20),
    "r43": (2205, 2245, 13, 20),
    "r45": (2185, 2225, 13, 20),
    "r46": (2120, 2160, 13, 20),
    "r48": (2120, 2160, 13, 20),
    "r49": (2070, 2110, 13, 20),
    "r50": (2050, 2090, 13, 20),
    "r51": (1995, 2035, 13, 20),
    "r52": (1960, 2000, 13, 20),
    "r53": (1880, 1920, 13, 20),
}
PEAKS = dict.fromkeys(("r46", "r48"), (0.33, 0.66, 1.51, 1.93))  # of a learning rate: from where on, how large
PEAKS |= dict.fromkeys(("r49", "r50", "r51", "r52"), (1 / 3, 2 / 3, 1.51, 1.93)) | {"r53": (1 / 3, 2 / 3, 1.52, 1.73)}


@pytest.mark.parametrize("rung", THIRDS)
def test_a_window_changes_in_thirds_as_in_the_record(rung):
    """The record: block number int(3 * k / n) of (3, 7, 11) at step k of n, and what comes after n."""
    num_scheduled, num_steps, tail, end = THIRDS[rung]
    config = compose.compose([f"experiment={rung}"], CPU)
    assert config.goal.num_steps == num_steps
    timeline = Timeline(config.stages, num_steps, window_block=128)
    blocks = [(3, 7, 11)[int(3 * k / num_scheduled)] if k < num_scheduled else tail for k in range(num_steps)]
    assert [timeline.at(step).window_tokens for step in range(num_steps)] == [128 * one for one in blocks]
    assert timeline.window_after(num_steps) == 128 * end


@pytest.mark.parametrize("rung", PEAKS)
def test_batch_and_learning_rate_grow_at_their_own_steps(rung):
    num_scheduled, num_steps, *_ = THIRDS[rung]
    config = compose.compose([f"experiment={rung}"], CPU)
    timeline = Timeline(config.stages, num_steps, window_block=128)
    batches = [(8, 16, 24)[int(3 * k / num_scheduled)] if k < num_scheduled else 24 for k in range(num_steps)]
    assert [timeline.at(step).stage.batch_tokens for step in range(num_steps)] == [2048 * 8 * one for one in batches]
    first_at, second_at, first, second = PEAKS[rung]
    num_falling = round(0.55 * num_scheduled)  # a part of a step more in r49 to r51

    def lr(k):  # the record's, whose peak changes at two points and which falls from 0.45 of the steps on
        x = k / num_scheduled
        peak = second if x > second_at else first if x > first_at else 1.0
        left = min(1.0, max(0.0, (num_scheduled - k) / num_falling))
        return peak * left + 0.1 * (1 - left)

    schedule = config.optim.schedule
    found = [schedule.lr_frac(k, num_steps) for k in range(num_steps)]
    assert found == pytest.approx([lr(k) for k in range(num_steps)], rel=1e-9)


def test_record_53s_loss_looks_ahead_and_its_embedding_parts_step_by_step_as_in_the_record():
    timeline = Timeline(compose.compose(["experiment=r53"], CPU).stages, 1920, window_block=128)
    for k in range(1920):
        x = k / 1880
        weights = [1.0, 0.5, 0.25 * (1 - 3 * x)] if x < 1 / 3 else [1.0, 0.5 * (2 - 3 * x)] if x < 2 / 3 else None
        assert timeline.ahead_weights(k) == (weights and pytest.approx(weights, abs=1e-7))
        assert bool(timeline.at(k).stage.untied) == (k >= math.ceil(2 / 3 * 1880))


@pytest.mark.parametrize("rung", ["r52", "r53"])
def test_scalars_rest_for_40_steps_where_batch_and_window_change_as_in_the_record(rung):
    num_scheduled, num_steps, *_ = THIRDS[rung]
    timeline = Timeline(compose.compose([f"experiment={rung}"], CPU).stages, num_steps, window_block=128)
    thirds = [int(3 * k / num_scheduled) for k in range(num_scheduled)] + [3] * 40
    changes = [k for k in range(1, num_steps) if thirds[k] != thirds[k - 1]]
    frozen = {k for change in changes for k in range(change, change + 40)}
    assert {k for k in range(num_steps) if timeline.is_frozen("vectors", k)} == frozen
    assert not any(timeline.is_frozen("head", k) for k in range(num_steps))


@pytest.mark.parametrize("rung", WINDOWS)
def test_a_window_grows_as_in_the_record(rung):
    """At every step of the rung's experiment; the validation after the last has grown to the end."""
    config, (window_at, num_windows) = compose.compose([f"experiment={rung}"], CPU), WINDOWS[rung]
    num_steps = config.goal.num_steps
    timeline = Timeline(config.stages, num_steps, window_block=64 if rung < "r16" else 128)
    windows = [window_at(step, num_steps) for step in range(num_steps + 1)]
    assert [timeline.at(step).window_tokens for step in range(num_steps)] == windows[:-1]
    assert [timeline.window_after(step) for step in range(num_steps + 1)] == windows
    assert len(timeline.distinct()) == len(timeline.portions) == num_windows
    assert config.goal.val_window_tokens is None  # in every one of them validation has the step's own


def test_a_window_that_grows_is_rounded_to_blocks_and_has_one_at_least():
    def windows(**stage):
        timeline = Timeline([Stage(**stage)], 8, window_block=16)
        return [timeline.window_after(step) for step in range(9)]

    assert windows(first_window_tokens=0, window_tokens=40) == [16] * 7 + [32] * 2  # 35, 40 at the end
    assert windows(first_window_tokens=0, window_tokens=40, window_rounding="up") == [16] * 4 + [32] * 3 + [48] * 2
    assert windows(first_window_tokens=40, window_tokens=8) == [32] * 3 + [16] * 6  # 40, 36, 32, 28


def test_what_is_the_same_is_warmed_up_once():
    rows = [Stage(until_step=2, batch_tokens=4), Stage(until_step=4, batch_tokens=8), Stage(batch_tokens=4)]
    assert [portion.first_step for portion in Timeline(rows, 6).distinct()] == [0, 2]


def test_of_windows_that_are_no_graph_the_first_and_the_widest_are_warmed_up():
    rows = [Stage(until_step=8, first_window_tokens=0, window_tokens=64), Stage(window_tokens=32, batch_tokens=8)]
    timeline = Timeline(rows, 10, window_block=16)
    assert [portion.window_tokens for portion in timeline.distinct()] == [16, 32, 48, 32]
    assert [portion.window_tokens for portion in timeline.distinct(every_window=False)] == [16, 48, 32]
    grown = Timeline(
        [Stage(window_tokens=16, until_step=2), Stage(window_tokens=64, until_step=4), Stage(window_tokens=32)], 6
    )
    assert [portion.first_step for portion in grown.distinct(every_window=False)] == [0, 2]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("stages=[{until_frac:0.5},{until_frac:0.9}]", r"stages\[1\].until_frac=0.9: the last stage ends with the run"),
        ("stages=[{batch_tokens:512},{}]", r"stages\[0\].until_frac=None: neither is given"),
        ("stages=[{until_frac:0.5,until_step:3},{}]", "both are given"),
        ("stages=[{until_step:6},{}]", r"stages\[0\]: it would go from step 0 to 6 of 6"),
        ("stages=[{until_step:3},{until_step:2},{}]", r"stages\[1\]: it would go from step 3 to 2 of 6"),
        ("stages=[{until_frac:0.01},{}]", "it would go from step 0 to 0 of 6"),
        ("stages=[{batch_tokens:1000}]", r"stages\[0\].batch_tokens=1000: use a multiple of .* = 128; try 1024"),
        ("stages=[{batch:512}]", r"unknown setting stages\[0\].batch=512"),
        ("stages=[{momenta:{muon:0.9}}]", r"stages\[0\].momenta.muon=0.9: optim=adamw is all one part"),
        ("stages=[{momenta:{muon:1.5}}]", r"stages\[0\].momenta.muon=1.5: use a number from 0 to below 1"),
        ("stages=[{until_step:3,window_tokens:16},{}]", r"stages\[1\].window_tokens=null: another stage has it"),
        ("stages=[{first_window_tokens:16}]", "give window_tokens, its end, too"),
        ("stages=[{until_step:3,window_tokens:16,end_window_tokens:32},{window_tokens:16}]", "only the last stage has"),
        ("stages=[{end_window_tokens:32}]", r"stages\[0\].end_window_tokens=32: give window_tokens too"),
        ("stages=[{first_window_tokens:-1,window_tokens:16}]", "first_window_tokens=-1: use a whole number of 0"),
        ("stages=[{window_tokens:16,window_rounding:up}]", "window_rounding=up: only a window that grows is rounded"),
        ("stages=[{until_step:3,untied:true},{}]", r"stages\[1\].untied=null: the stage before has it"),
        ("stages=[{ahead_weights:[1,1],end_ahead_weights:[1]}]", r"end_ahead_weights=\[1.0\]: .* as many of both"),
        ("stages=[{ahead_weights:[]}]", r"stages\[0\].ahead_weights=\[\]: use 1 to 127"),
        ("stages=[{frozen_steps:{muon:2}}]", r"stages\[0\].frozen_steps.muon=2: optim=adamw is all one part"),
        ("goal.val_window_tokens=64", "goal.val_window_tokens=64: no stage has a window"),
        ("goal.val_seq_len=96", "goal.val_tokens=4096: it must be a multiple of .* = 96"),
        ("model.bfloat16_params=[embedding]", "model.bfloat16_params=.*hardware.dtype is float32"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(word, message):
    with pytest.raises(ValueError, match=message):
        resolved(*SMALL, word)


def test_parts_of_the_optimizer_are_checked_together():
    groups = ["optim=groups", "model=modern"]
    with pytest.raises(ValueError, match=r"stages\[1\].momenta.matrices is not set: another stage sets it"):
        resolved(*SMALL, *groups, "stages=[{until_step:3,momenta:{matrices:0.9}},{}]")
    with pytest.raises(ValueError, match=r"stages\[0\].update_every_steps.tail=2: .* parts embedding, head, matrices"):
        resolved(*SMALL, *groups, "stages=[{update_every_steps:{tail:2}}]")
    with pytest.raises(ValueError, match="optim.grad_clip_norm=1.0: update_every_steps adds up"):
        resolved(*SMALL, *groups, "optim.grad_clip_norm=1.0", "stages=[{update_every_steps:{head:2}}]")
    for stage, why in (
        ("update_every_steps:{head:2}", "update_every_steps keeps gradients"),
        ("frozen_steps:{head:2}", "frozen_steps leaves gradients out"),
        ("untied:true", "before it the embedding has no gradient"),
    ):
        with pytest.raises(ValueError, match=f"hardware.reducer=shard: {why}"):
            resolved(*SMALL, *groups, "hardware.reducer=shard", "hardware.num_processes=2", f"stages=[{{{stage}}}]")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stages=[{window_tokens:64}]"], r"stages\[0\].window_tokens=64: model.arch=gpt2 has no windows"),
        (["stages=[{until_step:2},{untied:true}]"], r"stages\[1\].untied=True: .*gpt2 has no embedding that"),
        (["model=windowed", "stages=[{window_tokens:70}]"], r"stages\[0\].window_tokens=70: .*window_block=16: 64"),
        (
            ["model=windowed", "stages=[{window_tokens:64}]", "goal.val_window_tokens=70"],
            "goal.val_window_tokens=70: use a multiple",
        ),
    ],
)
def test_a_window_that_the_model_cannot_have_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(*SMALL, *words)


def test_a_model_without_windows_is_refused_before_its_run_is_started():
    with pytest.raises(ValueError, match=r"model.arch=gpt2 cannot be trained:\n  - it lacks set_window"):
        prepare(["track=free", *SMALL, "stages=[{window_tokens:64}]"])


def test_data_without_documents_cannot_be_aligned_to_them():
    with pytest.raises(ValueError, match="data.bos_aligned=True: source markov marks no documents"):
        prepare(["track=free", "data=markov", "data.bos_aligned=true"])


# ---- what a config with stages is


def test_stages_are_part_of_the_id_and_what_they_leave_open_is_not():
    plain, same = resolved(*SMALL), resolved(*SMALL, "data.bos_aligned=false", "stages=[]")
    assert schema.config_id(plain) == schema.config_id(same)
    grows = "first_window_tokens:16,window_tokens:64"
    first, second = (resolved(*SMALL, f"stages=[{{{grows}{word}}}]") for word in ("", ",window_rounding:down"))
    assert schema.config_id(first) == schema.config_id(second)
    first, second = (resolved(*SMALL, f"stages=[{{until_step:{end},batch_tokens:512}},{{}}]") for end in (2, 3))
    assert len({schema.config_id(one) for one in (plain, first, second)}) == 3
    assert schema.build(schema.Config, schema.to_dict(first)) == first  # as a worker reads it
    text = "".join(map(str, schema.to_dict(first)["stages"]))
    assert "None" in text  # of what a later version adds a null must not be hashed either
    assert schema.config_id(first) == schema.config_id(_with_new_null(first))


def _with_new_null(config):
    new = copy.deepcopy(config)
    new.stages = [NewStage(**dataclasses.asdict(stage)) for stage in config.stages]
    return new


@dataclasses.dataclass(kw_only=True)
class NewStage(Stage):
    idea_of_next_year: int | None = None


def test_a_micro_batch_has_as_many_tokens_in_every_stage():
    config = resolved(*SMALL, "hardware.micro_batch_seqs=4", "stages=[{until_step:2,batch_tokens:2048,seq_len:64},{}]")
    assert [stage.micro_batch_seqs for stage in config.stages] == [8, 4]
    assert [stages.num_micro_steps(config, stage) for stage in config.stages] == [4, 2]
    assert resolved(*SMALL, "stages=[{batch_tokens:4096}]").stages[0].micro_batch_seqs == 32  # a CPU: all at once


def test_a_stage_that_changes_what_the_track_fixes_is_a_deviation():
    def deviations(*words):
        return compose.deviations(resolve.resolve(compose.compose([*words], CPU), CPU, vocab_size=257))

    nano = ["track=cpu_nano", "hardware=cpu"]
    assert deviations(*nano, "stages=[{lr_frac:1.5}]") == []
    (words,) = deviations(*nano, "stages=[{until_frac:0.5,batch_tokens:512},{}]")
    assert words == "stages[0].batch_tokens=512 in the place of data.batch_tokens, which the track fixes"
    assert len(deviations(*nano, "goal.val_seq_len=256")) == 1


# ---- training


def test_two_stages_are_two_loops_by_hand():
    trainer, log, files = trainer_of(*SMALL, TWO_STAGES)
    losses, val_losses = trained(trainer, log)
    model = models.load("gpt2")(vocab_size=320, seq_len=128, num_layers=1, num_heads=2, width=32)
    model.init_weights(torch.Generator().manual_seed(0))
    config = trainer.config
    optimizer = config.optim.build(model, 0, 1, "cpu")
    tokens = torch.from_numpy(Stream(files["train"]).read(0, 7169).astype("int64"))
    position, by_hand = 0, []
    for num_steps, rows, seq_len, lr_frac in ((2, 8, 64, 1.0), (4, 12, 128, 0.5)):
        for _ in range(num_steps):
            span = tokens[position : position + rows * seq_len + 1]
            loss = model(span[:-1].view(rows, seq_len), span[1:].view(rows, seq_len))
            loss.backward()
            if config.optim.grad_clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip_norm)
            lr = config.optim.schedule.lr_frac(len(by_hand), 6) * config.optim.lr * lr_frac
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
            by_hand.append(loss.item())
            position += rows * seq_len
    assert losses == by_hand
    assert val_losses[2] == pytest.approx(_val_loss(model, files, 128), abs=1e-12)


def _val_loss(model, files, seq_len):
    span = torch.from_numpy(Stream(files["val"]).read(0, 4097).astype("int64"))
    batch = (span[:-1].view(-1, seq_len), span[1:].view(-1, seq_len))
    pieces = zip(batch[0].split(8), batch[1].split(8), strict=True)
    return evaluate(model, pieces, torch.no_grad, lambda sums: sums, torch.device("cpu"))


def test_one_stage_is_a_run_without_stages_to_the_bit():
    plain = trained(*trainer_of(*SMALL)[:2])
    assert trained(*trainer_of(*SMALL, "stages=[{lr_frac:1.0}]")[:2]) == plain


def test_parts_are_updated_when_they_are_due_on_the_sum_of_their_gradients(monkeypatch):
    words = ["optim=groups", "stages=[{momenta:{matrices:0.5,embedding:0.7},update_every_steps:{matrices:2}}]"]
    trainer, _, _ = trainer_of(*SMALL, *words)
    embedding, matrix = next(trainer.model.parameters()), trainer.model.hidden_matrices()[0]
    parts = trainer.optimizer.parts
    used, step_of = [], trainer.optimizer.step
    monkeypatch.setattr(trainer.optimizer, "step", lambda names: used.append(matrix.grad.clone()) or step_of(names))
    alone, changed = [], []
    for step in range(4):
        alone.append(_gradient_alone(trainer, step))
        before = embedding.detach().clone(), matrix.detach().clone()
        trainer.step(step)
        after = embedding, matrix
        changed.append([not torch.equal(*pair) for pair in zip(before, after, strict=True)])
        assert (matrix.grad is None) == (step % 2 == 1)
    assert changed == [[True, False], [True, True], [True, False], [True, True]]
    torch.testing.assert_close(used[1], alone[0] + alone[1])
    torch.testing.assert_close(used[3], alone[2] + alone[3])
    assert parts["matrices"].param_groups[0]["momentum"] == 0.5
    assert parts["embedding"].param_groups[0]["betas"] == (0.7, 0.95)
    trainer.close()


def _gradient_alone(trainer, step):
    """Of the first hidden matrix, of one step's tokens and the weights as they are."""
    model = copy.deepcopy(trainer.model)
    model.zero_grad()
    trainer.loader.load_state_dict({"step": step, "micro_step": 0})
    model(*trainer.loader.next()).backward()
    trainer.loader.load_state_dict({"step": step, "micro_step": 0})
    return model.hidden_matrices()[0].grad


PARTING = ["experiment=r53", "model.num_layers=4", "model.width=32", "model.num_heads=2", "model.args.block=16"]
PARTING += ["data.seq_len=128", "data.batch_tokens=512", "goal.val_seq_len=128", "goal.val_tokens=4096"]
PARTING += ["goal.num_steps=6", "hardware=cpu", "hardware.num_threads=1", "model.args.activations=float32"]
PARTING += ["data=pysource", "goal.target_val_loss=null", "goal.val_every_steps=3"]
PARTS = "update_every_steps:{embedding:2,head:2,vectors:2,skips:2,smear:2}"
PARTING += [
    f"stages=[{{until_step:4,window_tokens:32,{PARTS},ahead_weights:[1.0,0.5],end_ahead_weights:[1.0,0.0]}},"
    f"{{window_tokens:32,{PARTS},untied:true,frozen_steps:{{vectors:1}}}}]"
]


def test_an_embedding_parts_as_the_head_is_and_what_is_frozen_rests():
    trainer, _, _ = trainer_of(*PARTING)
    model, state = trainer.model, trainer.optimizer.parts["head"].state
    embedding, head, scalar = model.embedding.weight, model.head.weight, model.smear_weight
    drawn = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.warm_up()
    assert all(value.equal(drawn[name]) for name, value in model.state_dict().items())
    assert not model.untied and not any(value.any() for value in (*state[embedding].values(), *state[head].values()))
    ahead = []
    for step in range(4):
        trainer.step(step)
        ahead.append(model.ahead_weights.tolist())
    assert ahead == [[1.0, 0.5], [1.0, 0.375], [1.0, 0.25], [1.0, 0.125]]
    assert embedding.equal(drawn["embedding.weight"]) and embedding.grad is None
    assert state[head]["step"] == 2  # updated in every second step
    tied = trainer.evaluate()  # in the state of the step that comes next
    assert embedding.equal(head) and state[embedding]["exp_avg"].equal(state[head]["exp_avg"])
    assert state[embedding]["step"] == 2 and model.ahead_weights is None
    model.untied = False
    assert trainer.evaluate() == tied
    model.untied = True
    rested = scalar.detach().clone()
    trainer.step(4)
    assert scalar.grad is None and head.grad is not None  # a frozen part's gradient is dropped, another's is kept
    trainer.step(5)
    assert not scalar.equal(rested) and not embedding.equal(head) and state[embedding]["step"] == 3
    trainer.close()


def test_a_run_whose_embedding_parts_is_the_same_on_two_ranks(tmp_path):
    found = []
    for world_size in (1, 2):
        words = [*PARTING, "track=free", f"hardware.num_processes={world_size}", f"name=w{world_size}"]
        folder = real_runs.run(tmp_path, *words)
        assert [fault for fault in verification.report(folder)["rules"] if _is_fault(fault)] == []
        rows = real_runs.steps(folder)
        found.append([float(row["train_loss"]) for row in rows[1:]] + [float(rows[-1]["val_loss"])])
    assert found[1] == pytest.approx(found[0], rel=2e-4)


def test_the_warm_up_warms_every_stage_and_leaves_no_trace(monkeypatch):
    trainer, _, _ = trainer_of(*SMALL, "experiment=stages", "goal.num_steps=6")
    seen, forward = [], trainer.model.forward

    def watched(tokens_BT, targets_BT):
        seen.append((tuple(tokens_BT.shape), trainer.model.window_tokens, torch.is_grad_enabled()))
        return forward(tokens_BT, targets_BT)

    monkeypatch.setattr(trainer.model, "forward", watched)
    weights = copy.deepcopy(trainer.model.state_dict())
    trainer.warm_up()
    warm = set(seen)
    assert {((8, 64), 32, True), ((8, 128), 64, True), ((16, 128), 64, True), ((16, 128), 96, True)} < warm
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    assert trainer.loader.state_dict() == {"step": 0, "micro_step": 0}
    assert trainer.model.window_tokens == 32
    state = [
        value for part in trainer.optimizer.parts.values() for one in part.state.values() for value in one.values()
    ]
    assert state and not any(value.any() for value in state)
    seen.clear()
    for step in range(6):
        trainer.evaluate() if step % 3 == 0 else None
        trainer.step(step)
    trainer.evaluate()
    trainer.close()
    assert set(seen) <= warm  # no graph is new once the clock runs
    assert {window for _, window, has_gradients in seen if not has_gradients} == {128}


def test_no_stage_compiles_anything_once_the_clock_runs(monkeypatch):
    graphs, compiled = [], torch.compile
    backend = functools.partial(compiled, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    monkeypatch.setattr(torch, "compile", backend)
    trainer, _, _ = trainer_of(*SMALL, "experiment=stages", "goal.num_steps=6", "hardware.compile=true")
    try:
        assert torch._dynamo.config.recompile_limit >= 10  # four shapes with gradients and without, and two more
        trainer.warm_up()
        num_warm = len(graphs)
        assert num_warm >= 4  # shapes of training, and one of validation
        trained(trainer, trainer._log)
        assert len(graphs) == num_warm
    finally:
        torch._dynamo.reset()


def test_without_a_window_of_its_own_validation_has_that_of_the_next_step(monkeypatch):
    trainer, _, _ = trainer_of(
        *SMALL, "model=windowed", "stages=[{until_step:3,window_tokens:16},{first_window_tokens:32,window_tokens:64}]"
    )
    windows = []
    monkeypatch.setattr(
        trainer.model,
        "set_window",
        lambda tokens: windows.append(tokens) or vars(trainer.model).update(window_tokens=tokens),
    )
    trainer.warm_up()
    windows.clear()
    found = []
    for step in range(6):
        trainer.evaluate()
        found.append(trainer.model.window_tokens)
        trainer.step(step)
    trainer.evaluate()
    assert [*found, trainer.model.window_tokens] == [16, 16, 16, 32, 32, 48, 64]
    assert windows == [32, 48, 64]  # it is called where the window changes and not else
    trainer.close()


@pytest.mark.slow
def test_the_losses_are_those_of_every_world_size_and_each_record_verifies(tmp_path):
    words = ["experiment=stages", "model.num_layers=1", "model.width=32", "model.num_heads=2", "data.bos_aligned=true"]
    found = []
    for world_size in (1, 2, 8):
        folder = real_runs.run(
            tmp_path, *words, f"hardware.num_processes={world_size}", "hardware.num_threads=1", f"name=w{world_size}"
        )
        assert [fault for fault in verification.report(folder)["rules"] if _is_fault(fault)] == []
        rows = real_runs.steps(folder)
        assert [int(row["tokens"]) for row in rows] == [0, 512, 1024, 2048, 3072, 5120, 7168]
        found.append([float(row["train_loss"]) for row in rows[1:]] + [float(rows[-1]["val_loss"])])
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], rel=2e-4)


def _is_fault(rule):
    """A clock may be wrong where eight processes share two cores; what was counted may not."""
    return not rule["passed"] and "time" not in rule["rule"]


# ---- the record


def measured():
    rows = [(1, 2, 512, 10, 6), (3, 4, 1536, 20, 11)]
    names = ("first_step", "num_steps", "batch_tokens", "flops_per_token", "flops_per_token_causal")
    return {"stages": [dict(zip(names, row, strict=True)) for row in rows], "batch_tokens": 7168 / 6}


def test_tokens_and_flops_of_a_run_are_those_of_its_steps():
    assert [work.num_tokens(measured(), step) for step in range(7)] == [0, 512, 1024, 2560, 4096, 5632, 7168]
    assert work.num_tokens(measured(), 6, without=[1, 4]) == 7168 - 512 - 1536
    run = {"measured": measured(), "model": {"flops_per_token": 1, "flops_per_token_causal": 1}}
    assert work.flops_per_token(run, 3)["flops_per_token"] == (1024 * 10 + 1536 * 20) / 2560
    assert work.mean_flops_per_token(measured()["stages"]) == {"flops_per_token": 19, "flops_per_token_causal": 10}


def test_speed_is_of_the_tokens_that_were_timed():
    run = {"measured": measured() | {"dtype": "float32"}, "model": {}, "world_size": 1, "environment": {}}
    assert metrics.speed(run, 2.0, 6)["tokens_per_s"] == 7168 / 2
    assert metrics.speed(run, 2.0, 5, flagged=[6])["tokens_per_s"] == (7168 - 1536) / 2


def test_what_the_record_says_of_stages_follows_the_config():
    config = resolved(*SMALL, TWO_STAGES)
    timeline = Timeline(config.stages, 6)
    rows = staging.facts(config, timeline, [(10, 6), (20, 11)])
    assert [(row["first_step"], row["num_steps"], row["batch_tokens"], row["seq_len"]) for row in rows] == [
        (1, 2, 512, 64),
        (3, 4, 1536, 128),
    ]
    assert stages.num_tokens(config) == 7168 and stages.mean_batch_tokens(config) == 7168 / 6


# ---- documents and windows

EOS = 7


def test_a_document_begins_at_its_token_and_a_row_begins_one():
    tokens_BT = torch.tensor([[5, EOS, 5, 5, EOS, EOS], [EOS, 5, 5, 5, 5, 5]])
    assert document_ids(tokens_BT, EOS).tolist() == [[0, 1, 1, 1, 2, 3], [1, 1, 1, 1, 1, 1]]
    assert cu_seqlens(tokens_BT, EOS, 7).tolist() == [0, 1, 4, 5, 6, 12, 12, 12]
    assert cu_seqlens(tokens_BT, EOS, 3).tolist() == [0, 1, 4, 12]  # too many are one
    assert cu_seqlens(tokens_BT, None, 3).tolist() == [0, 6, 12, 12]
    assert not document_ids(tokens_BT, None).any()


def test_windowed_counts_the_pairs_in_its_window():
    shape = {"vocab_size": 64, "seq_len": 32, "num_layers": 2, "num_heads": 2, "width": 16}
    windowed, modern = models.load("windowed")(**shape), models.load("modern")(**shape)
    assert windowed.flops_per_token(32) == modern.flops_per_token(32)
    assert windowed.flops_per_token_causal(32) == modern.flops_per_token_causal(32)
    windowed.set_window(16)
    assert modern.flops_per_token(32) - windowed.flops_per_token(32) == 2 * 12 * 16 * 16
    pairs = sum(min(16, query + 1) for query in range(32)) / 32  # 12.25, the diagonal half a pair
    counted = windowed.flops_per_token_causal(32) - modern.flops_per_token_causal(0)
    assert counted == 2 * 12 * 16 * (pairs - 0.25)  # of W = 16, T = 32: 12


# ---- parameters in bfloat16


def test_the_parameters_that_are_named_are_bfloat16_and_so_is_the_state_of_adam():
    words = ["model=modern", "hardware.dtype=bfloat16", "model.bfloat16_params=[embedding,blocks.0.mlp.*]"]
    trainer, log, _ = trainer_of(*SMALL, *words)
    narrow = {name for name, one in trainer.model.named_parameters() if one.dtype == torch.bfloat16}
    assert narrow == {"embedding.weight", "blocks.0.mlp.up.weight", "blocks.0.mlp.proj.weight"}
    losses, _ = trained(trainer, log)
    assert losses[-1] < losses[0]
    assert trainer.optimizer.state[trainer.model.embedding.weight]["exp_avg"].dtype == torch.bfloat16
    assert trainer.optimizer.state[trainer.model.head.weight]["exp_avg"].dtype == torch.float32


def test_a_name_that_means_no_parameter_is_refused():
    words = ["model=modern", "hardware.dtype=bfloat16", "model.bfloat16_params=[embeding]"]
    with pytest.raises(ValueError, match="model.bfloat16_params=embeding: no parameter of that name"):
        trainer_of(*SMALL, *words)


# ---- what sources say of documents


@pytest.mark.parametrize(("data", "eos_token"), [("pysource", 256), ("fineweb10B", 50256), ("markov", None)])
def test_a_source_knows_the_token_before_each_document(data, eos_token):
    config = compose.compose([f"data={data}", "track=free"], CPU)
    assert datasets.chosen(config.data).eos_token == eos_token
