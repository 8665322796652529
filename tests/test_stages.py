"""Stages: a run whose shape changes is the runs of its shapes one after the other, and says so in its record."""

import copy
import dataclasses

import pytest
import torch
from staged import CPU, SMALL, TWO_STAGES, resolved, trained, trainer_of

import models
from bench.config import compose, identity, resolve, schema, stages
from bench.config.resolve import deviations_of
from bench.data.sources import datasets
from bench.launch.prepare import prepare
from bench.record import metrics
from bench.training.model import stage_facts
from models.masked_attention import document_ids
from models.stages import Stage, Timeline, ends_of

# ---- which step is in which stage


def test_a_stage_ends_where_it_says_and_the_last_one_with_the_run():
    rows = [Stage(until_frac=0.25), Stage(until_step=7), Stage()]
    assert ends_of(rows, 10) == [2, 7, 10]  # round(2.5) is 2
    timeline = Timeline(rows, 10)
    assert [timeline.at(step).stage is rows[index] for step, index in ((0, 0), (1, 0), (2, 1), (6, 1), (7, 2), (9, 2))]
    assert [portion.num_steps for portion in timeline.portions] == [2, 5, 3]


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
    ("setting", "message"),
    [
        (
            "stages=[{until_frac:0.5},{until_frac:0.9}]",
            r"stages\[1\] has until_frac=0.9: every .*the last ends with the run",
        ),
        ("stages=[{batch_tokens:512},{}]", r"stages\[0\] has no end: every stage has one of until_frac and"),
        (
            "stages=[{until_frac:0.5,until_step:3},{}]",
            r"stages\[0\] has until_frac=0.5 and until_step=3: every stage has one of",
        ),
        ("stages=[{until_step:6},{}]", r"stages\[0\]: it would go from step 0 to 6 of 6"),
        ("stages=[{until_step:3},{until_step:2},{}]", r"stages\[1\]: it would go from step 3 to 2 of 6"),
        ("stages=[{until_frac:0.01},{}]", "it would go from step 0 to 0 of 6"),
        ("stages=[{batch_tokens:1000}]", r"stages\[0\].batch_tokens=1000: use a multiple of .* = 128; try 1024"),
        ("stages=[{batch:512}]", r"unknown setting stages\[0\].batch=512"),
        ("stages=[{momenta:{muon:0.9}}]", r"stages\[0\].momenta.muon=0.9: optim=adamw is all one part"),
        ("stages=[{momenta:{muon:1.5}}]", r"stages\[0\].momenta.muon=1.5: use a number from 0 to below 1"),
        ("stages=[{until_step:3,window_tokens:16},{}]", r"stages\[1\].window_tokens=null: another stage sets it"),
        ("stages=[{first_window_tokens:16}]", "set window_tokens, its end, too"),
        ("stages=[{until_step:3,window_tokens:16,end_window_tokens:32},{window_tokens:16}]", "only the last stage"),
        ("stages=[{end_window_tokens:32}]", r"stages\[0\].end_window_tokens=32: set window_tokens too"),
        ("stages=[{first_window_tokens:-1,window_tokens:16}]", "first_window_tokens=-1: use a whole number of 0"),
        ("stages=[{window_tokens:16,window_rounding:up}]", "window_rounding=up: only a growing window is rounded"),
        ("stages=[{until_step:3,untied:true},{}]", r"stages\[1\].untied=null: the stage before sets it"),
        ("stages=[{ahead_weights:[1,1],end_ahead_weights:[1]}]", r"end_ahead_weights=.* both lists need the same"),
        ("stages=[{ahead_weights:[]}]", r"stages\[0\].ahead_weights=\[\]: use 1 to 127"),
        ("stages=[{frozen_steps:{muon:2}}]", r"stages\[0\].frozen_steps.muon=2: optim=adamw is all one part"),
        ("goal.val_window_tokens=64", "goal.val_window_tokens=64: no stage has a window"),
        ("goal.val_seq_len=96", "goal.val_tokens=4096: it must be a multiple of .* = 96"),
        ("model.bfloat16_params=[embedding]", "model.bfloat16_params=.*hardware.dtype is float32"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(setting, message):
    with pytest.raises(ValueError, match=message):
        resolved(*SMALL, setting)


def test_parts_of_the_optimizer_are_checked_together():
    groups = ["optim=groups", "model=modern"]
    with pytest.raises(ValueError, match=r"stages\[1\].momenta.matrices=null: another stage sets it"):
        resolved(*SMALL, *groups, "stages=[{until_step:3,momenta:{matrices:0.9}},{}]")
    with pytest.raises(ValueError, match=r"stages\[0\].update_every_steps.tail=2: .* parts embedding, head, matrices"):
        resolved(*SMALL, *groups, "stages=[{update_every_steps:{tail:2}}]")
    with pytest.raises(ValueError, match="optim.grad_clip_norm=1.0: update_every_steps sums"):
        resolved(*SMALL, *groups, "optim.grad_clip_norm=1.0", "stages=[{update_every_steps:{head:2}}]")
    shard = [*SMALL, *groups, "hardware.reducer=shard", "hardware.num_processes=2"]
    with pytest.raises(ValueError, match="optim.grad_clip_norm=1.0: the shards hold no gradients of frozen parts"):
        resolved(*shard, "optim.grad_clip_norm=1.0", "stages=[{frozen_steps:{head:2}}]")
    assert resolved(*shard, "stages=[{frozen_steps:{head:2},update_every_steps:{head:2}}]").hardware.reducer == "shard"


@pytest.mark.parametrize(
    ("overrides", "message"),
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
def test_a_window_that_the_model_cannot_have_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(*SMALL, *overrides)


def test_a_model_without_windows_is_refused_before_its_run_is_started():
    with pytest.raises(ValueError, match=r"model.arch=gpt2 cannot be trained:\n  - it lacks set_window"):
        prepare(["track=free", *SMALL, "stages=[{window_tokens:64}]"])


def test_data_without_documents_cannot_be_aligned_to_them():
    with pytest.raises(ValueError, match="data.bos_aligned=True: source markov marks no documents"):
        prepare(["track=free", "data=markov", "data.bos_aligned=true"])


# ---- what a config with stages is


def test_stages_are_part_of_the_id_and_what_they_leave_open_is_not():
    plain, same = resolved(*SMALL), resolved(*SMALL, "data.bos_aligned=false", "stages=[]")
    assert identity.config_id(plain) == identity.config_id(same)
    grows = "first_window_tokens:16,window_tokens:64"
    first, second = (resolved(*SMALL, f"stages=[{{{grows}{word}}}]") for word in ("", ",window_rounding:down"))
    assert identity.config_id(first) == identity.config_id(second)
    first, second = (resolved(*SMALL, f"stages=[{{until_step:{end},batch_tokens:512}},{{}}]") for end in (2, 3))
    assert len({identity.config_id(config) for config in (plain, first, second)}) == 3
    assert schema.build(schema.Config, schema.to_dict(first)) == first  # as a worker reads it
    text = "".join(map(str, schema.to_dict(first)["stages"]))
    assert "None" in text  # of what a later version adds a null must not be hashed either
    assert identity.config_id(first) == identity.config_id(_with_new_null(first))


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
    def deviations(*overrides):
        return deviations_of(resolve.resolve(compose.compose([*overrides], CPU), CPU, vocab_size=257))

    nano = ["track=cpu_nano", "hardware=cpu"]
    assert deviations(*nano, "stages=[{lr_frac:1.5}]") == []
    (deviation,) = deviations(*nano, "stages=[{until_frac:0.5,batch_tokens:512},{}]")
    assert deviation == "stages[0].batch_tokens=512 in the place of data.batch_tokens, which the track fixes"
    assert len(deviations(*nano, "goal.val_seq_len=256")) == 1


# ---- the record


def measured():
    rows = [(1, 2, 512, 10, 6), (3, 4, 1536, 20, 11)]
    names = ("first_step", "num_steps", "batch_tokens", "flops_per_token", "flops_per_token_causal")
    return {"stages": [dict(zip(names, row, strict=True)) for row in rows], "batch_tokens": 7168 / 6}


def test_tokens_and_flops_of_a_run_are_those_of_its_steps():
    assert [metrics.tokens_in_steps(measured(), step) for step in range(7)] == [0, 512, 1024, 2560, 4096, 5632, 7168]
    assert metrics.tokens_in_steps(measured(), 6, without=[1, 4]) == 7168 - 512 - 1536
    run = {"measured": measured(), "model": {"flops_per_token": 1, "flops_per_token_causal": 1}}
    assert metrics.flops_per_token(run, 3)["flops_per_token"] == (1024 * 10 + 1536 * 20) / 2560
    assert metrics.mean_flops_per_token(measured()["stages"]) == {"flops_per_token": 19, "flops_per_token_causal": 10}


def test_speed_is_of_the_tokens_that_were_timed():
    run = {"measured": measured() | {"dtype": "float32"}, "model": {}, "world_size": 1, "environment": {}}
    assert metrics.speed(run, 2.0, 6)["tokens_per_s"] == 7168 / 2
    assert metrics.speed(run, 2.0, 5, flagged=[6])["tokens_per_s"] == (7168 - 1536) / 2


def test_what_the_record_says_of_stages_follows_the_config():
    config = resolved(*SMALL, TWO_STAGES)
    timeline = Timeline(config.stages, 6)
    rows = stage_facts(config, timeline, [(10, 6), (20, 11)])
    expected = [(1, 2, 512, 64), (3, 4, 1536, 128)]
    assert [(row["first_step"], row["num_steps"], row["batch_tokens"], row["seq_len"]) for row in rows] == expected
    assert stages.num_tokens(config) == 7168 and stages.mean_batch_tokens(config) == 7168 / 6


# ---- documents and windows

EOS = 7


def test_a_document_begins_at_its_token_and_a_row_begins_one():
    tokens_BT = torch.tensor([[5, EOS, 5, 5, EOS, EOS], [EOS, 5, 5, 5, 5, 5]])
    assert document_ids(tokens_BT, EOS).tolist() == [[0, 1, 1, 1, 2, 3], [1, 1, 1, 1, 1, 1]]
    assert document_ids(tokens_BT, EOS).dtype == torch.int32  # FlexAttention's mask takes no conversion of a sum
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
    overrides = ["model=modern", "hardware.dtype=bfloat16", "model.bfloat16_params=[embedding,blocks.0.mlp.*]"]
    trainer, log, _ = trainer_of(*SMALL, *overrides)
    narrow = {name for name, parameter in trainer.model.named_parameters() if parameter.dtype == torch.bfloat16}
    assert narrow == {"embedding.weight", "blocks.0.mlp.up.weight", "blocks.0.mlp.proj.weight"}
    losses, _ = trained(trainer, log)
    assert losses[-1] < losses[0]
    assert trainer.optimizer.state[trainer.model.embedding.weight]["exp_avg"].dtype == torch.bfloat16
    assert trainer.optimizer.state[trainer.model.head.weight]["exp_avg"].dtype == torch.float32


def test_a_name_that_means_no_parameter_is_refused():
    overrides = ["model=modern", "hardware.dtype=bfloat16", "model.bfloat16_params=[embeding]"]
    with pytest.raises(ValueError, match="model.bfloat16_params=embeding: no parameter of that name"):
        trainer_of(*SMALL, *overrides)


# ---- what sources say of documents


@pytest.mark.parametrize(("data", "eos_token"), [("pysource", 256), ("fineweb10B", 50256), ("markov", None)])
def test_a_source_knows_the_token_before_each_document(data, eos_token):
    config = compose.compose([f"data={data}", "track=free"], CPU)
    assert datasets.chosen(config.data).eos_token == eos_token
