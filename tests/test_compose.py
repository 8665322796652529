"""What a user may type, and what each slip of the finger is answered."""

import json
from pathlib import Path

import pytest
import yaml
from cases import slow
from hydra.core.hydra_config import HydraConfig

from bench.base.paths import REPO
from bench.config import compose, groups, identity, overrides, resolve, schema
from bench.config.resolve import deviations_of
from bench.launch.prepare import prepare
from models import ladder
from models.schedules import cosine

RECORDS = Path(__file__).parent / "records"


def test_the_default_is_the_newcomers_run():
    config = compose.compose([])
    assert (config.track.name, config.model.arch) == ("cpu_nano", "gpt2")
    assert (config.optim.name, config.data.source) == ("adamw", "pysource")
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
        ("steps=5", r"unknown setting steps=5: did you mean goal.num_steps\?"),
        ("goal.num_steps=many", "goal.num_steps=many: use a whole number above 0"),
        ("seed=1.5", "seed=1.5: use a whole number of 0 or more"),
        ("+goal.typo=3", r"\+goal.typo=3: \+ and ~ work on lists only, .*: write goal.typo=3$"),
        ("+experiment=smoke", r"\+experiment=smoke: .*: write experiment=smoke$"),
        ("++optim.lr=0.1", r"\+\+optim.lr=0.1: .*: write optim.lr=0.1$"),
        ("~optim", r"~optim: \+ and ~ work on lists only"),
        ("hydra.run.dir=x", "hydra.run.dir=x: settings of Hydra are for sweeps"),
        ("+instruments=wattmetre", r"\+instruments=wattmetre: there is no instrument 'wattmetre'"),
        ("~instruments=trace", "~instruments=trace: the run has no trace: it has regions, memory"),
        ("~instruments", r"~instruments: \+ and ~ work on lists only, .*: write ~instruments=NAME$"),
        ("instruments=[wattmetre]", "instruments=.*there is no instrument 'wattmetre'"),
        ("track=cpu_nono", r"did you mean cpu_nano\?"),
        ("muon", "'muon' is not a setting: write key=value, optim=muon"),
        ("seed", "'seed' is not a setting: write key=value"),
        ("profile=null", "profile=null: there is no profile None; omit it, or choose from memory, modded, nsys"),
        ("model/size=huge", "model/size=huge: there is no model/size 'huge'.*choose from medium, nano, small"),
        ("goal.num_steps=", "goal.num_steps=: "),
        ("seed=1,2", "seed=1,2: "),
        ("seed=1001:1006", r"seed=1001:1006: use .*; for several runs: run -m seed=range\(1,4\) or seed=1,2"),
    ],
)
def test_a_slip_is_refused_with_what_the_value_and_what_to_try(override, message):
    with pytest.raises(ValueError, match=message):
        compose.compose([override])


def test_one_instrument_more_or_less_is_the_list_that_has_it():
    usual = list(compose.compose([]).instruments)
    more = compose.compose(["+instruments=memory_history", "instruments.memory_history.first_step=5"])
    listed = compose.compose([f"instruments=[{','.join([*usual, 'memory_history'])}]"])
    history = listed.instruments["memory_history"] | {"first_step": 5}
    assert more.instruments == listed.instruments | {"memory_history": history}
    listed = compose.compose([f"instruments=[{','.join([*usual, 'memory_history', 'trace'])}]"])
    added = compose.compose(["+instruments=[memory_history,trace]"])
    assert identity.config_id(added) == identity.config_id(listed)
    assert list(compose.compose(["~instruments=telemetry"]).instruments) == [key for key in usual if key != "telemetry"]
    assert compose.compose(["profile=memory"]) == compose.compose(["+instruments=memory_history"])
    assert list(compose.compose(["exporters=[mlflow]", "+exporters=wandb"]).exporters) == ["mlflow", "wandb"]


OWN = {
    "dropout: 0.1": "unknown setting model.dropout=0.1: model has arch, num_layers, ",
    "num_layers: [": r"while parsing a flow node, expected the node content, .*model/mine.yaml., line 6",
    "num_layers: {a: 1}": "model.num_layers={'a': 1}: use a whole number above 0",
    "num_layers: ${hydra:runtime.cwd}": r"model.num_layers: \$\{hydra:...\} has no value yet",
    "num_layers: ${nope}": "Interpolation key 'nope' not found, full_key: model.num_layers",
}


@pytest.mark.parametrize(("line", "cause"), OWN.items())
def test_what_is_wrong_in_a_yaml_of_ones_own_is_said_in_full(line, cause, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(f"defaults:\n  - size: nano\n  - _self_\narch: gpt2\n{line}\n")
    monkeypatch.setenv(groups.VARIABLE, str(tmp_path))
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # a sweep in this process leaves its job's here
    with pytest.raises(ValueError, match=cause):
        compose.compose(["model=mine"])


def test_a_run_that_keeps_the_rules_deviates_in_nothing():
    assert deviations_of(compose.compose(["seed=7", "model=modern", "optim=muon", "hardware.num_processes=2"])) == []


def test_a_run_that_breaks_a_rule_says_which():
    deviations = deviations_of(compose.compose(["goal.num_steps=20", "data=markov"]))
    assert "goal.num_steps: 20 instead of 120" in deviations
    assert "data.source: markov instead of pysource" in deviations


@pytest.mark.parametrize("track", [track for track in compose.choices("track") if track != "nanochat"])
@pytest.mark.parametrize(("model", "optim"), [("gpt2", "adamw"), slow("modern", "muon")])
def test_every_track_takes_every_model_and_optimizer(track, model, optim):
    config = compose.compose([f"track={track}", f"model={model}", f"optim={optim}"])
    resolved = resolve.resolve(config, schema.Machine(num_gpus=8, num_cpus=64), vocab_size=257)
    assert resolved.track.name == track


@pytest.mark.parametrize("experiment", sorted({*compose.choices("experiment")} - {*ladder.CLASSES}))
def test_every_experiment_composes(experiment):
    """The experiments of the ladder's other rungs are composed in tests/test_ladder.py."""
    compose.compose([f"experiment={experiment}", "track=free"])


@pytest.fixture
def compositions(monkeypatch):
    """The groups of every composition that Hydra makes from here on."""
    composed, real = [], compose.refusals
    monkeypatch.setattr(compose, "refusals", lambda groups: composed.append(groups) or real(groups))
    compose._whole.cache_clear()
    compose._composed.cache_clear()
    return composed


def test_preparing_a_run_composes_once_and_other_settings_or_seeds_not_again(compositions):
    job = prepare(["goal.num_steps=8"])
    assert compositions == [["track=cpu_nano"]]
    assert job.deviations == ["goal.num_steps: 8 instead of 120"]
    prepare(["track=cpu_nano", "optim.lr=0.5", "seed=3"])
    assert len(compositions) == 1


def test_another_group_composes_once_more_and_its_track_is_not_composed_again(compositions):
    for number in (1, 2):
        prepare(["track=cpu_nano", "model=modern", f"seed={number}"])
    assert compositions == [["model=modern", "track=cpu_nano"], ["track=cpu_nano"]]
    prepare(["track=cpu_nano", "optim=muon"])
    assert len(compositions) == 3


def test_another_seed_is_the_same_run_but_for_it():
    job = prepare(["track=free", "seed=4", "optim.lr=0.5"])
    again = job.with_seed(7)
    assert again.config == prepare(["track=free", "optim.lr=0.5", "seed=7"]).config
    assert (again.config_id, again.overrides) == (job.config_id, ["track=free", "optim.lr=0.5", "seed=7"])
    assert job.config.seed == 4


def test_an_optimizer_has_its_own_settings_and_any_schedule():
    optim = compose.compose(["optim=muon", "optim/schedule=cosine", "optim.schedule.warmup_frac=0.1"]).optim
    assert (optim.muon_ns_steps, optim.grad_clip_norm) == (5, None)
    assert optim.schedule == cosine.Config(name="cosine", warmup_frac=0.1, final_lr_frac=0.0)
    why = "this run has no such setting; only runs with optim/schedule=stepped or .*=trapezoid have it"
    with pytest.raises(ValueError, match=f"cooldown_frac=0.4: {why}"):
        compose.compose(["optim/schedule=cosine", "optim.schedule.cooldown_frac=0.4"])


def test_an_exporter_and_an_instrument_take_only_the_settings_of_their_yaml():
    with pytest.raises(ValueError, match="instruments.regions.every=3"):
        compose.compose(["instruments.regions.every=3"])
    config = compose.compose(["exporters=[wandb]", "exporters.wandb.project=mine"])
    assert config.exporters == {"wandb": {"project": "mine", "entity": None, "mode": "offline"}}
    assert compose.compose([]).exporters == {}
    with pytest.raises(ValueError, match=r"exporters.wandb.mode=\[5\]: use a word"):
        compose.compose(["exporters=[wandb]", "exporters.wandb.mode=[5]"])


KEPT = sorted(RECORDS.glob("*/config.yaml")) + sorted((REPO / "results" / "published").glob("*/*/*/config.yaml"))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_a_kept_config_of_the_first_version_loads_with_its_id(path):
    """Its optim is flat.  The records in tests/ have an id of older rules, which left nothing out."""
    raw = yaml.safe_load(path.read_text())
    assert raw["optim"]["schedule"] in ("constant", "trapezoid")
    config = schema.read(path.parent)
    assert config.optim.schedule.name == raw["optim"]["schedule"]
    assert config.optim.schedule.warmup_frac == raw["optim"]["warmup_frac"]
    assert config.optim.lr == raw["optim"]["lr"] and not hasattr(config.optim, "muon_lr")
    recorded = json.loads((path.parent / "run.json").read_text())["config_id"]
    assert identity.config_id(config) == {"48623a63": "90007464"}.get(recorded, recorded)
    assert schema.upgraded(schema.to_dict(config)) == schema.to_dict(config)


def test_a_flat_muon_config_loads_with_its_settings():
    optim = compose.compose(["optim=muon", "optim/schedule=cosine"]).optim
    values = schema.to_dict(compose.compose(["optim=muon", "optim/schedule=cosine"]))
    flat = values["optim"] | values["optim"]["schedule"] | {"name": "muon", "schedule": "cosine", "cooldown_frac": None}
    assert schema.build(schema.Config, schema.upgraded(values | {"optim": flat})).optim == optim


def test_no_change_of_the_settings_layout_may_change_an_id():
    """These are ids of config_id's first version, which an old record and a new run of the same settings share."""
    assert id_of("optim=adamw", "optim.fused=null") == "ecc04969"
    assert id_of("optim=muon", "optim.fused=null") == "e704751b"


def id_of(*overrides):
    return identity.config_id(resolve.resolve(compose.compose(list(overrides)), schema.Machine(0, 2), 257))


def test_todays_default_with_adamws_loop_is_a_repeat_of_the_published_runs():
    """They were made before host_interval_ms and optim.fused; results/published/ keeps them as they were."""
    records = (REPO / "results" / "published" / "cpu_nano-gpt2-adamw").glob("*/*/run.json")
    assert {json.loads(path.read_text())["config_id"] for path in records} == {id_of("optim.fused=null")}


def test_an_exporter_and_what_is_outside_the_timed_region_change_no_id():
    assert id_of("exporters=[tensorboard,wandb]", "exporters.wandb.project=mine") == id_of()
    assert id_of("instruments.telemetry.interval_ms=50", "instruments.telemetry.host_interval_ms=500") == id_of()
    for override in ("instruments.garbage.min_event_ms=0", "instruments=[regions]", "optim.lr=0.5"):
        assert id_of(override) != id_of(), override


def test_what_is_untimed_is_a_setting_of_an_instrument():
    for name, untimed in identity.UNTIMED.items():
        assert set(untimed) <= set(yaml.safe_load(compose.path_of("instruments", name).read_text())[name])


def test_a_name_that_looks_like_a_number_stays_as_it_is_typed():
    assert overrides.parsed("name=1.10").value() == "1.10"


@pytest.mark.parametrize("rev", ["90869e8", "1234567", "v1.0", "main"])
def test_a_hash_that_looks_like_a_number_is_a_revision(rev):
    assert overrides.parsed(f"script.rev={rev}").value() == rev
