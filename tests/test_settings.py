"""What `run --help KEY` and `--cfg job` say of a setting is what its code, its yaml and its refusals say."""

import dataclasses

import pytest
import yaml

from bench.base.paths import CONF
from bench.cli import main as program
from bench.cli import run
from bench.config import compose, explain, meanings, overrides, schema, typed
from bench.config.typed import leaves
from bench.launch import cluster as job
from bench.launch.prepare import requested_config
from bench.training.instruments import registry

COMPOSITIONS = [
    [],
    ["model=modern", "optim=muon", "optim/schedule=cosine"],
    ["track=gpt2_small", "profile=modded", "exporters=[wandb,mlflow]"],
    ["track=cpu_floor", "profile=window", "hardware=h100x8"],
    ["track=free", "experiment=smoke", "profile=stages", "data=text", "optim/schedule=constant"],
    ["track=free", "instruments=[regions,memory_history]", "data=fineweb10B", "model/size=medium", "goal=target"],
]


def test_a_value_that_an_experiment_inherits_is_from_the_yaml_that_it_stands_on():
    origins = explain.Origins(["experiment=r06"])
    assert origins.of("optim.groups.matrices.scale")[0] == "conf/experiment/r04.yaml"
    assert origins.of("goal.num_steps")[0] == "conf/experiment/r05.yaml"
    assert origins.of("model.arch")[0] == "conf/experiment/r06.yaml"


@pytest.mark.parametrize("key", meanings.settings())
def test_every_setting_has_a_meaning_and_says_what_it_may_be(key):
    setting = meanings.settings()[key]
    assert setting.meaning, f"{key} has no comment beside it"
    assert setting.allowed


@pytest.mark.parametrize("overrides", COMPOSITIONS, ids=" ".join)
def test_every_value_comes_from_where_it_is_said_to_come_from(overrides):
    values, origins = dict(leaves(schema.to_dict(requested_config(overrides)))), explain.Origins(overrides)
    for key, setting in meanings.settings().items():
        if key not in values:
            continue
        origin = origins.of(key)
        if origin is None:
            assert values[key] == setting.default, key
        else:
            assert _value_in(origin[0], key) == values[key], (key, origin)


def _value_in(name, key):
    """The value of the last part of a key in a yaml that has it only once at that place."""
    config = yaml.safe_load((CONF.parent / name).read_text())
    parts = key.split(".")
    for start in range(len(parts)):
        try:
            return typed.get(config, ".".join(parts[start:]))
        except (KeyError, TypeError):
            continue
    raise AssertionError(f"{name} has no {key}")


def test_what_is_typed_wins_over_every_file():
    origins = explain.Origins(["optim.lr=0.3", "optim.schedule={warmup_frac: 0.1}"])
    assert origins.of("optim.lr") == ("optim.lr=0.3 on the command line", "")
    assert origins.of("optim.schedule.warmup_frac")[0].endswith("on the command line")
    assert origins.of("optim.beta1")[0] == "conf/optim/adamw.yaml"


@pytest.mark.parametrize("overrides", COMPOSITIONS, ids=" ".join)
def test_the_commented_config_reads_as_the_plain_one(overrides, printed):
    text = printed(run, *overrides, "--cfg", "job")
    assert yaml.safe_load(text) == schema.to_dict(requested_config(overrides))
    assert max(map(len, text.splitlines())) <= 125


def test_the_commented_config_can_be_fed_back(capsys):
    """It can be an experiment, after the line that says where its settings belong."""
    run.main(["optim=muon", "track=free", "optim.lr=0.5", "--cfg", "job"])
    text = capsys.readouterr().out
    assert (
        "  lr: 0.5  # learning rate at the schedule's peak [a number above 0; optim.lr=0.5 on the command line]" in text
    )
    assert schema.build(schema.Config, yaml.safe_load(text)) == compose.compose(
        ["optim=muon", "track=free", "optim.lr=0.5"]
    )


def test_help_of_a_key_says_meaning_unit_range_default_value_and_file(printed, capsys):
    text = " ".join(printed(run, "--help", "optim.lr").split())
    assert "learning rate at the schedule's peak use a number above 0" in text
    assert "default none, set in conf/ now 0.0018, from conf/optim/adamw.yaml: 3 times nanoGPT's" in text
    run.main(["hardware.wall_timeout_s=60", "--help", "wall_timeout_s"])
    text = " ".join(capsys.readouterr().out.split())
    assert "use a number above 0, or null unit seconds default null now 60.0, from hardware.wall_timeout_s=60" in text
    run.main(["--help", "nats_per_100_steps"])
    assert "unit" not in capsys.readouterr().out  # neither steps nor nats


def test_help_of_a_choice_is_that_of_its_group_under_it(printed, capsys):
    assert "track.name = cpu_floor" in printed(run, "--help", "track=cpu_floor")
    with pytest.raises(ValueError, match="did you mean track=cpu_nano[?] groups are model, "):
        explain.help_of("cpu_nano", [])


def test_help_of_the_last_part_shows_every_setting_that_ends_in_it():
    text = explain.help_of("max_mib", [])
    assert [f"instruments.{name}.max_mib" in text for name in ("stages", "trace", "window")] == [True] * 3


def test_help_of_a_setting_that_this_run_lacks_says_what_has_it():
    text = " ".join(explain.help_of("muon_lr", []).split())
    assert "only with optim=muon now not a setting of this run; with optim=muon it is 0.02" in text
    assert "now 0.02, from conf/optim/muon.yaml" in " ".join(explain.help_of("muon_lr", ["optim=muon"]).split())


def test_help_of_a_group_lists_its_choices_and_settings():
    text = explain.help_of("optim", [])
    assert "optim=muon" in text and "optim.lr = 0.0018" in text and "only with optim=muon: muon_lr, " in text
    assert "optim/schedule=cosine" in explain.help_of("optim/schedule", [])


@pytest.mark.parametrize(
    ("key", "guess"),
    [("lerning_rate", "optim.lr"), ("optim.learning_rate", "optim.lr"), ("goal.num_step", "goal.num_steps")],
)
def test_help_of_an_unknown_key_guesses(key, guess):
    with pytest.raises(ValueError, match=f"--help {key}: there is no such setting or group; did you mean {guess}[?]"):
        explain.help_of(key, [])


BOUNDED = {
    key: setting
    for key, setting in meanings.settings().items()
    if setting.key.startswith("instruments.") and setting.allowed not in ("true or false", "a list")
}


@pytest.mark.parametrize("key", BOUNDED)
def test_an_instrument_refuses_what_its_yaml_says_it_may_not_be(key):
    """The words in [] in conf/instruments/ are those of the refusal."""
    group, name, last = key.split(".")
    allowed = BOUNDED[key].allowed
    lowest = allowed.split(" or more")[0].rsplit(" ", 1)[-1] if " or more" in allowed else None
    wrong = (
        int(lowest) - 1 if lowest else [-1] if "a list" in allowed else -1 if "number" in allowed else "no such / word!"
    )
    values = dict(compose.compose([f"instruments=[{name}]"]).instruments[name]) | {last: wrong}
    with pytest.raises(ValueError) as refusal:
        compose._check_settings(group, {name: dict(values)})
        registry.check({name: values})
    assert key in str(refusal.value) and str(wrong).strip("[]") in str(refusal.value)
    assert not lowest or allowed.removeprefix("a whole number ") in str(refusal.value)


def test_a_comment_is_read_wherever_it_stands(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("# @package _global_\n# What it is.\n# More.\na:  # of a\n  b: 'x # y'  # of b\n  c: [1, 2]\n")
    assert meanings.file_comments(file) == ("What it is. More.", {"a": "of a", "a.b": "of b", "a.c": ""})
    expected = "level of the one-sided t test of the mean val_loss against the target"
    assert meanings.class_comments(schema.TrackConfig)["p_value"] == expected


# ---- the cluster's


def test_the_cluster_has_help_and_its_values_are_checked():
    assert "minutes until SLURM ends the job" in explain.help_of("cluster.time_min", [])
    text = " ".join(explain.help_of("time_min", ["cluster=slurm", "cluster.time_min=30"]).split())
    assert "now 30, from cluster.time_min=30 on the command line" in text
    text = explain.help_of("cluster", [])
    assert all(f"cluster.{key.name}, only with cluster=slurm" in text for key in dataclasses.fields(overrides.Cluster))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster=slurm", "cluster.time_min=abc"], "cluster.time_min=abc: use a whole number above 0, or null"),
        (["cluster=slurm", "cluster.tim=3"], "unknown setting cluster.tim=3: cluster has partition, account, nodes"),
        (["cluster.name=x"], "cluster.name=x: write cluster=slurm"),
        (["cluster=k8s"], "cluster=k8s: write cluster=slurm, or remove it"),
    ],
)
def test_words_of_a_cluster_that_cannot_be_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        job.request_from(overrides)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("run -m seed=0,1 --budget soon", "--budget soon"),
        ("run --nope", "--nope: there is no such option"),
        ("run hardware.nodes=2 cluster.nodes=1", "cluster.nodes=1: its runs need hardware.nodes=2"),
        ("speedrun model=nope", "model=nope: there is no model 'nope'"),
        ("race A= B=optim.lrr=3", "B: unknown setting optim.lrr=3"),
        ("ladder size=x", "size=x: choose from"),
        ("doctor hardware.devic=cpu", "unknown setting hardware.devic=cpu"),
    ],
)
def test_wrong_words_are_refused_before_a_job_is_submitted(command, message, monkeypatch, capsys):
    monkeypatch.setattr(job, "go", lambda verb, want: pytest.fail("a job was submitted"))
    assert program.main([*command.split(), "cluster=slurm"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["run -m seed=0,1", "speedrun", "race A= B=optim=muon", "ladder", "calibrate", "doctor"]
)
def test_what_can_run_is_submitted(command, monkeypatch):
    submitted = []
    monkeypatch.setattr(job, "go", lambda verb, want: submitted.append([verb, *want.arguments]) or 0)
    assert program.main([*command.split(), "cluster=slurm"]) == 0 and submitted == [command.split()]


def test_what_sbatch_is_asked_for():
    arguments = ["A=x hardware.nodes=2", "cluster=slurm", "cluster.requeue=false", "cluster.gpus_per_node=h100:8"]
    request = job.request_from([*arguments, "cluster.options=--exclusive --qos=high"])
    assert request.arguments == arguments[:1] and request.num_nodes == 2
    assert request.options == [
        *("--job-name=speedrun", "--gpus-per-node=h100:8", "--no-requeue", "--exclusive", "--qos=high")
    ]
    assert job.request_from([*arguments, "cluster.nodes=3"]).num_nodes == 3 and job.request_from(arguments[:1]) is None
    options = {f"cluster.{name}" for name in [*job.SBATCH, "nodes", "requeue", "options"]}
    assert options == {f"cluster.{field.name}" for field in dataclasses.fields(overrides.Cluster)}


def test_help_beside_a_cluster_submits_nothing(monkeypatch, printed):
    monkeypatch.setattr(job, "go", lambda verb, want: pytest.fail("a job was submitted"))
    assert "sbatch --job-name" in printed(program, "run", "cluster=slurm", "--help", "cluster.name")


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        ("data.markov_lags", "a list of 1 to 8 different distances of 1 to 1024, such as [1] or [1,3], or null"),
        ("data.shards", "a list, each a number as 3, or numbers as 9-12, or null"),
        ("stages", "a list, each a group of settings, KEY: VALUE, or null"),
    ],
)
def test_what_a_list_may_hold_reads_as_a_sentence(key, allowed):
    assert meanings.settings()[key].allowed == allowed
