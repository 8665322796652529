"""What may be asked: derivations worked out by hand, and refusals that say what, the value, and what to try."""

import pytest
import yaml
from kept_records import changed

from bench.config import compose, identity, schema, stages
from bench.config.identity import config_id
from bench.config.resolve import estimated_gib, resolve
from bench.config.schema import Config, Machine, build, to_dict

LAPTOP, NODE = Machine(num_gpus=0, num_cpus=8), Machine(num_gpus=8, num_cpus=64)


@pytest.fixture
def values():
    optim = {"name": "adamw", "lr": 0.003, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    return {
        "model": {"arch": "gpt2", "num_layers": 4, "num_heads": 4, "width": 128},
        "data": {"source": "pysource", "seq_len": 128, "batch_tokens": 1024},
        "optim": optim | {"schedule": {"name": "trapezoid", "cooldown_frac": 0.4, "final_lr_frac": 0.0}},
        "goal": {"num_steps": 100, "val_tokens": 4096, "val_every_steps": 50},
        "track": {"name": "free", "about": "no rules", "repeats": 3, "p_value": 0.01},
    }


def resolved(values, machine=LAPTOP, **changes):
    return resolve(build(Config, changed(values, **changes)), machine, vocab_size=257)


def test_a_laptop_gets_one_process_with_all_its_cores_in_float32_uncompiled(values):
    hardware = resolved(values).hardware
    assert (hardware.device, hardware.num_processes, hardware.num_threads) == ("cpu", 1, 8)
    assert (hardware.dtype, hardware.compile, hardware.micro_batch_seqs) == ("float32", False, 8)


def test_a_node_gets_one_process_per_gpu_in_bfloat16_compiled(values):
    hardware = resolved(values, NODE).hardware
    assert (hardware.device, hardware.num_processes, hardware.num_threads) == ("cuda", 8, 8)
    assert (hardware.dtype, hardware.compile, hardware.micro_batch_seqs) == ("bfloat16", True, 1)
    with pytest.raises(ValueError, match=r"hardware.num_processes=9: this machine has 8 GPU"):
        resolved(values, NODE, hardware__num_processes=9)


def num_micro_steps_of(config):
    """Of a run without stages."""
    return stages.num_micro_steps(config, *stages.stages_of(config))


def test_fewer_processes_accumulate_gradients_for_the_same_batch(values):
    def micro_steps(num_processes):
        data = {"data__seq_len": 1024, "data__batch_tokens": 524288, "goal__val_tokens": 1048576}
        hardware = {"hardware__num_processes": num_processes, "hardware__micro_batch_seqs": 64}
        config = resolved(values, NODE, **data, **hardware)
        return config.hardware.micro_batch_seqs, num_micro_steps_of(config)

    assert micro_steps(8) == (64, 1)
    assert micro_steps(4) == (64, 2)
    assert micro_steps(1) == (64, 8)


@pytest.mark.parametrize(
    ("gpu", "num_gpus", "memory_gib", "track", "micro_batch_seqs", "num_micro_steps"),
    [
        ("RTX 4090", 1, 23.99, "gpt2_small", 32, 16),  # (0.9 * 24 - 3.0) / 0.44 = 42 sequences
        ("RTX 4090", 1, 23.99, "gpt2_short", 32, 4),
        ("RTX 4090", 2, 23.99, "gpt2_medium", 8, 32),  # (0.9 * 24 - 6.6) / 1.01 = 14.8
        ("A100 40 GB", 1, 39.5, "gpt2_small", 64, 8),
        ("H100 80 GB", 1, 79.6, "gpt2_small", 128, 4),  # and not 256: 0.44 * 256 + 3 = 116 GiB
        ("H100 80 GB", 8, 79.6, "gpt2_small", 64, 1),  # the whole batch
        ("H200", 1, 139.8, "gpt2_small", 256, 2),
        ("H200", 1, 139.8, "gpt2_short", 128, 1),
        ("T4, 9 GiB left", 1, 9.0, "gpt2_medium", 1, 512),  # 6.6 + 1.0 GiB of 0.9 * 9
        ("silent driver", 1, None, "gpt2_small", 16, 32),
    ],
)
def test_the_micro_batch_follows_the_gpus_memory(gpu, num_gpus, memory_gib, track, micro_batch_seqs, num_micro_steps):
    machine = Machine(num_gpus, 64, memory_gib)
    config = resolve(compose.compose([f"track={track}"], machine), machine, 50257)
    assert (config.hardware.micro_batch_seqs, num_micro_steps_of(config)) == (micro_batch_seqs, num_micro_steps)


def test_what_takes_more_memory_gets_a_smaller_micro_batch():
    def seqs(*extra):
        machine = Machine(1, 64, 79.6)
        return resolve(compose.compose(["track=gpt2_small", *extra], machine), machine, 50257).hardware.micro_batch_seqs

    assert (seqs(), seqs("data.seq_len=2048"), seqs("hardware.compile=false")) == (128, 64, 32)
    assert seqs("hardware.dtype=float32", "model/size=medium") == 32  # (71.6 - 6.6) / 2.02
    assert seqs("hardware.micro_batch_seqs=4") == 4  # as asked
    assert seqs("model.activation_checkpointing=true") == 256  # the logits stay
    assert seqs("data.batch_tokens=98304") == 96  # all of a step: nothing is accumulated
    assert seqs("data.batch_tokens=393216") == 128  # 384 = 3 * 128


def test_a_gpu_that_is_too_small_for_one_sequence_is_refused_before_the_start_with_what_it_needs():
    def seqs(memory_gib, *extra):
        machine = Machine(1, 64, memory_gib)
        config = compose.compose(["track=gpt2_small", "data.seq_len=65536", *extra], machine)
        return resolve(config, machine, 50257).hardware.micro_batch_seqs

    assert seqs(79.6) == 2  # 2 * 28.1 + 3.0 GiB
    with pytest.raises(ValueError, match="^data.seq_len=65536: one sequence needs an estimated 31.1 GiB") as refusal:
        seqs(31.7)  # 64 * 0.4387 + 3.02
    assert "has 31.7 GiB, 28.5 of them usable: try sequences of 59" in str(refusal.value)
    assert seqs(31.7, "model.activation_checkpointing=true") == 2  # 2 * 64 * 0.16 + 3.0
    assert seqs(31.7, "data.seq_len=32768") == 1
    assert seqs(31.7, "hardware.micro_batch_seqs=1") == 1  # as asked, whatever the estimate
    assert seqs(None) == 1  # a GPU that does not say how much memory it has
    with pytest.raises(ValueError, match=r"^stages\[1\].seq_len=65536: one sequence needs"):
        seqs(31.7, "data.seq_len=1024", "stages=[{until_step:10},{seq_len:65536}]")
    with pytest.raises(ValueError, match="try a smaller model,"):
        seqs(4.0, "model/size=medium")


def test_a_validation_that_does_not_fit_is_refused_before_the_start():
    """r26 validates in sequences of 262,144 tokens: 4.5 bytes * 50,304 logits of each are 55.3 GiB."""
    machine = Machine(8, 64, 23.99)
    config = compose.compose(["experiment=r26", "data.seq_len=8192"], machine)
    message = "^goal.val_seq_len=262144: one sequence needs an estimated 57.1 GiB"
    with pytest.raises(ValueError, match=message) as refusal:
        resolve(config, machine, 50257)
    assert "activation_checkpointing" not in str(refusal.value)
    config.goal.val_seq_len = 65536
    assert resolve(config, machine, 50257).hardware.micro_batch_seqs


@pytest.mark.parametrize(
    ("choice", "num_layers", "step_gib", "validation_gib"),
    [  # live at the peak with 64 K tokens at once, of r26 and r53 48 K, of r45 32 K, as doctor --rehearse-gpu counts
        ("model=gpt2", 12, 27.93, 7.11),
        ("model=gpt2", 4, 14.06, 6.87),
        ("experiment=r01", 12, 28.53, 7.70),
        ("model=modern", 12, 30.86, 7.53),
        ("experiment=simple", 12, 53.99, 32.21),
        ("experiment=r12", 8, 23.37, 7.21),
        ("experiment=r26", 8, 21.64, 26.45),
        ("experiment=r45", 8, 13.44, 25.78),
        ("experiment=r53", 8, 19.36, 25.78),
    ],
)
def test_the_estimate_is_within_a_tenth_of_what_a_rehearsal_counts(choice, num_layers, step_gib, validation_gib):
    machine = Machine(8, 64, 79.6)
    overrides = ["track=gpt2_small", choice, f"model.num_layers={num_layers}"]
    config = resolve(compose.compose(overrides, machine), machine, 50257)
    longest = max(stages.stages_of(config), key=lambda stage: stage.seq_len)
    fixed_gib, seq_gib = estimated_gib(config, longest.seq_len)
    assert fixed_gib + longest.micro_batch_seqs * seq_gib == pytest.approx(step_gib, rel=0.1)
    val_seq_len = stages.val_seq_len(config)
    val_seqs = max(1, longest.micro_batch_seqs * longest.seq_len // val_seq_len)
    fixed_gib, seq_gib = estimated_gib(config, val_seq_len, trains=False)
    assert fixed_gib + val_seqs * seq_gib == pytest.approx(validation_gib, rel=0.1)


def test_a_micro_batch_that_does_not_divide_becomes_the_next_smaller_that_does(values):
    assert resolved(values, hardware__micro_batch_seqs=5).hardware.micro_batch_seqs == 4  # of 8 sequences


def test_vocabulary_is_padded_to_a_multiple_of_64(values):
    assert resolved(values).model.vocab_size == 320  # 257 -> 5 * 64
    values["model"]["vocab_size"] = 257
    assert resolved(values).model.vocab_size == 257


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data__batch_tokens": 1000}, r"data.batch_tokens=1000: .* = 128 \* 1 = 128; try data.batch_tokens=1024"),
        ({"goal__val_tokens": 100}, r"goal.val_tokens=100: .*try goal.val_tokens=128"),
        ({"hardware__device": "tpu"}, "hardware.device=tpu: use auto, cpu or cuda"),
        ({"hardware__device": "cuda"}, "shows no NVIDIA GPU"),
        ({"hardware__num_processes": 0}, "hardware.num_processes=0: use a whole number of 1 or more"),
        ({"hardware__dtype": "fp8"}, "hardware.dtype=fp8: use float32 or bfloat16"),
        ({"model__width": 130}, r"model.width=130: it must be a multiple of 2 \* num_heads = 8"),
        ({"model__vocab_size": 256}, "model.vocab_size=256: the data uses tokens up to 256: use 257 or more"),
        ({"optim__muon_lr": 0.02}, "unknown setting optim.muon_lr=0.02: optim has name, lr, .*eps"),
        ({"optim__schedule__name": "constant"}, "unknown setting optim.schedule.cooldown_frac=0.4: optim.schedule has"),
        ({"optim__schedule": {"name": "cosine"}}, "optim.schedule.final_lr_frac is not set"),
        ({"optim__schedule": {"name": "wavy"}}, "optim.schedule.name=wavy: .*; choose from constant, cosi"),
        ({"optim__schedule": "cosine"}, "optim.schedule=cosine: use a group of settings, KEY: VALUE"),
        ({"optim__lr": -1.0}, "optim.lr=-1.0: use a number above 0"),
        ({"optim__schedule__warmup_frac": 0.7}, "optim.schedule.warmup_frac=0.7: with cooldown_frac=0.4 it is"),
        ({"model__residual_dtype": "bfloat16"}, "model.residual_dtype=bfloat16: hardware.dtype is float32"),
        ({"hardware__tf32": True}, "hardware.tf32=True: a CPU has no TF32"),
        ({"hardware__sdpa": "cudnn"}, "hardware.sdpa=cudnn: a CPU has flash and math"),
        ({"goal__num_steps": 0}, "goal.num_steps=0: use a whole number above 0"),
        ({"goal__stop_at_target": True}, "there is no target"),
        ({"goal__target_gap_nats": 0.1}, "only data=markov has a known floor, this is data=pysource"),
        ({"seed": -1}, "seed=-1: use a whole number of 0 or more"),
        ({"name": "a/b"}, "name=a/b: use letters, digits, .* part of a folder's name"),
        ({"model__depth": 3}, "unknown setting model.depth=3: model has arch, num_layers"),
        ({"goal__num_steps": True}, "goal.num_steps=True: use a whole number above 0"),
    ],
)
def test_refusals_say_what_the_value_and_what_to_try(values, change, message):
    with pytest.raises(ValueError, match=message):
        resolved(values, **change)


def test_a_value_that_is_not_set_is_named(values):
    del values["goal"]["num_steps"]
    with pytest.raises(ValueError, match="goal.num_steps is not set"):
        resolved(values)


def test_runs_that_differ_only_in_name_and_seed_share_their_config_id(values):
    config = build(Config, values)
    resolved_config = resolve(config, LAPTOP, 257)
    assert config.hardware.num_processes is None  # what was asked stays as it was
    assert build(Config, yaml.safe_load(yaml.safe_dump(to_dict(resolved_config)))) == resolved_config
    assert config_id(resolved_config) == config_id(resolved(values, seed=7, name="other"))
    assert config_id(resolved_config) != config_id(resolved(values, optim__lr=0.004))
    assert config_id(resolved_config) != config_id(resolved(values, instruments={"regions": {}}))
    assert len(config_id(resolved_config)) == 8


def test_the_shape_of_a_config_is_all_but_its_floats_and_these_are_compared_one_by_one(values):
    shape = identity.shape(build(Config, values))
    assert shape == identity.shape(build(Config, values | {"name": "other", "seed": 7}))
    assert values["optim"]["lr"] in shape["floats"]

    def changed(**optim):
        return identity.shape(build(Config, values | {"optim": values["optim"] | optim}))

    lr = values["optim"]["lr"]
    close, far = changed(lr=lr * 1.009), changed(lr=lr * 1.02)
    assert close["shape_id"] == far["shape_id"] == shape["shape_id"] and close != shape
    assert (identity.are_near(shape, close), identity.are_near(shape, far)) == (True, False)
    other = identity.shape(build(Config, values | {"goal": values["goal"] | {"num_steps": 7}}))
    assert other["shape_id"] != shape["shape_id"] and not identity.are_near(shape, other)
    validated = {"val_tokens": 2 * values["goal"]["val_tokens"], "val_every_steps": 3, "target_val_loss": 9.0}
    assert (
        identity.shape(build(Config, values | {"goal": values["goal"] | validated}))["effective"] == shape["effective"]
    )
    validated["stop_at_target"] = True
    assert (
        identity.shape(build(Config, values | {"goal": values["goal"] | validated}))["effective"] != shape["effective"]
    )


def test_what_does_not_reach_a_script_does_not_change_its_shape(tmp_path):
    """Else its race could be repeated with the whole alpha, whatever it lost before."""
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text("print()\n")

    def shape(*settings, folder="one"):
        config = compose.compose(["track=free", "hardware=cpu", f"script={tmp_path}/{folder}/train.py", *settings])
        return identity.shape(resolve(config, LAPTOP, 257))["effective"]

    without_effect = ["goal.num_steps=77", "goal.val_tokens=2048", "goal.target_val_loss=3", "hardware.dtype=bfloat16"]
    without_effect += ["data.batch_tokens=512", "script.dialect=nanogpt", "script.sandbox=true"]
    for setting in without_effect:
        assert shape(setting) == shape(), setting
    assert shape(folder="other") == shape()
    with_effect = ["script.data=else/where", "script.raw_data=true", "script.args=['--n=2']", "script.env={A: x}"]
    for setting in [*with_effect, "hardware.num_threads=1", "goal.token_budget=99"]:
        assert shape(setting) != shape(), setting


def test_numbers_within_a_scripts_arguments_are_floats_of_its_config():
    arguments = ["--lr=0.01", "--eps 1e-8", "--n=3", "a12e5f"]
    floats = {}
    assert identity._without_floats(arguments, "", floats) == ["--lr=", "--eps ", "--n=3", "a12e5f"]
    assert list(floats.values()) == [0.01, 1e-8]


def test_a_knob_that_is_off_does_not_change_the_config_id(values):
    """A version that adds a knob must still find its old runs to be repeats of their likes."""
    config = resolved(values)
    assert config.optim.grad_clip_norm is None
    assert config_id(config) != config_id(resolved(values, optim__grad_clip_norm=1.0))
    assert '"grad_clip_norm"' not in str(schema.without_none(to_dict(config)))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.activation_checkpointing=true", "r09 does not know it: gpt2, modern"),
        ("model.residual_dtype=bfloat16", "r09 chooses its dtypes itself"),
    ],
)
def test_what_the_model_does_not_know_is_refused(setting, message):
    overrides = ["experiment=r09", "track=free", "model/size=nano", "hardware=cpu", "hardware.dtype=bfloat16", setting]
    with pytest.raises(ValueError, match=f"{setting}: {message}"):
        resolve(compose.compose(overrides), Machine(0, 2), 257)


def test_no_activation_checkpointing_is_the_default_with_its_id():
    config = compose.compose(["track=cpu_nano", "model.activation_checkpointing=false"])
    assert resolve(config, Machine(0, 2), 257).model.activation_checkpointing is None
