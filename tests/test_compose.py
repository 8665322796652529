"""What a user may type, and what each slip of the finger is answered."""

import pytest

from bench.config import compose, resolve, schema


def test_the_default_is_the_newcomers_race():
    config = compose.compose([])
    assert (config.track.name, config.model.arch, config.optim.name, config.data.source) == (
        "cpu_nano",
        "gpt2",
        "adamw",
        "pysource",
    )
    assert (config.model.num_layers, config.model.width) == (4, 128)
    assert set(config.instruments) >= {"regions", "garbage", "recompiles", "host"}


def test_where_there_are_gpus_the_default_is_the_reference_track():
    config = compose.compose([], schema.Machine(num_gpus=8, num_cpus=64))
    assert (config.track.name, config.model.arch, config.model.width) == ("gpt2_small", "modern", 768)
    assert compose.compose(["hardware=cpu"], schema.Machine(8, 64)).track.name == "cpu_nano"
    assert compose.compose(["track=free"], schema.Machine(8, 64)).track.name == "free"


def test_what_the_user_types_wins_over_the_track():
    config = compose.compose(["track=gpt2_small", "model=gpt2", "optim=adamw", "model/size=medium", "seed=3"])
    assert (config.model.arch, config.optim.name, config.model.width, config.seed) == ("gpt2", "adamw", 1024, 3)


def test_instruments_are_a_list():
    assert compose.compose(["instruments=[]"]).instruments == {}
    assert compose.compose(["instruments=[regions]"]).instruments == {"regions": {}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=gpt3", r"model=gpt3: there is no model 'gpt3'; did you mean gpt2\? choose from gpt2, modern"),
        ("modle=gpt2", r"unknown setting modle=gpt2: did you mean model\?"),
        ("stepz=5", "unknown setting stepz=5"),
        ("goal.num_step=5", r"unknown setting goal.num_step=5: did you mean goal.num_steps\?"),
        ("num_steps=5", r"unknown setting num_steps=5: did you mean goal.num_steps\?"),
        ("goal.num_steps=many", "goal.num_steps=many: .*'many'.*Integer"),
        ("seed=1.5", "seed=1.5: .*Integer"),
        ("+goal.typo=3", r"\+goal.typo=3: settings are neither added nor deleted"),
        ("~optim", "~optim: settings are neither added nor deleted"),
        ("hydra.run.dir=x", "hydra.run.dir=x: Hydra only composes here"),
        ("instruments=[wattmetre]", "instruments=.*there is no instruments 'wattmetre'"),
        ("track=cpu_nono", r"did you mean cpu_nano\?"),
        ("seed", "'seed' is no override: write key=value"),
        ("model/size=huge", "model/size=huge: there is no model/size 'huge'.*choose from medium, nano, small"),
        ("goal.num_steps=", "goal.num_steps=: "),
        ("seed=1,2", "seed=1,2: "),
    ],
)
def test_a_slip_is_refused_with_what_the_value_and_what_to_try(override, message):
    with pytest.raises(ValueError, match=message):
        compose.compose([override])


def test_an_instrument_takes_only_the_settings_of_its_yaml():
    with pytest.raises(ValueError, match="instruments.regions.every=3"):
        compose.compose(["instruments.regions.every=3"])


def test_a_sweep_is_every_combination_in_order():
    assert compose.sweep(["model=gpt2,modern", "seed=range(0,2)", "track=cpu_nano"]) == [
        ["model=gpt2", "seed=0", "track=cpu_nano"],
        ["model=gpt2", "seed=1", "track=cpu_nano"],
        ["model=modern", "seed=0", "track=cpu_nano"],
        ["model=modern", "seed=1", "track=cpu_nano"],
    ]


def test_a_sweep_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="cannot read the sweep"):
        compose.sweep(["seed=range(0,"])


def test_a_run_that_keeps_the_rules_deviates_in_nothing():
    assert (
        compose.deviations(compose.compose(["seed=7", "model=modern", "optim=muon", "hardware.num_processes=2"])) == []
    )


def test_a_run_that_breaks_a_rule_says_which():
    config = compose.compose(["goal.num_steps=20", "data=markov"])
    found = compose.deviations(config)
    assert "goal.num_steps: 20 instead of 120" in found
    assert "data.source: markov instead of pysource" in found


@pytest.mark.parametrize("track", compose.choices("track"))
@pytest.mark.parametrize("model", ["gpt2", "modern"])
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_every_track_takes_every_model_and_optimizer(track, model, optim):
    asked = compose.compose([f"track={track}", f"model={model}", f"optim={optim}"])
    resolved = resolve.resolve(asked, schema.Machine(num_gpus=8, num_cpus=64), vocab_size=257)
    assert resolved.track.name == track


@pytest.mark.parametrize("experiment", compose.choices("experiment"))
def test_every_experiment_composes(experiment):
    compose.compose([f"experiment={experiment}", "track=free"])
