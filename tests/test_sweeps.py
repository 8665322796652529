"""Sweeps: Hydra's whole grammar, sweeps stored in yaml, roots and groups of one's own, what Hydra says of itself."""

import pytest
import yaml

from bench.cli import run
from bench.config import compose, groups, multirun


def points(*overrides):
    return multirun.points(list(overrides))


def values(*overrides):
    """Returns what stands behind the equals sign in every point of a sweep of one setting."""
    return [point[0].partition("=")[2] for point in points(*overrides)]


def test_a_sweep_is_every_combination_in_order():
    assert points("model=gpt2,modern", "seed=range(0,2)", "track=cpu_nano") == [
        ["model=gpt2", "seed=0", "track=cpu_nano"],
        ["model=gpt2", "seed=1", "track=cpu_nano"],
        ["model=modern", "seed=0", "track=cpu_nano"],
        ["model=modern", "seed=1", "track=cpu_nano"],
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed=3", "3"),
        ("seed=choice(3,1)", "3 1"),
        ("seed=range(0,5,2)", "0 2 4"),
        ("optim.lr=range(0.5,1.5,0.5)", "0.5 1.0"),
        ("track=glob(cpu*)", "cpu_floor cpu_nano"),
        ("model=glob([gpt*,mod*],exclude=*2)", "modern"),
        ("seed=sort(3,1,2)", "1 2 3"),
        ("seed=sort(choice(3,1,2),reverse=true)", "3 2 1"),
        ("seed=tag(any,words,choice(3,1))", "3 1"),
        ("seed=int(choice(3.0,1.0))", "3 1"),
        ("optim.lr=float(1,2)", "1.0 2.0"),
        ("hardware.deterministic=bool(0,1)", "False True"),
        ("name=str(1,2)", "1 2"),
        ("instruments=[regions],[]", "[regions] []"),
        ("+instruments=memory_history,trace", "memory_history trace"),
        ("data.markov_lags=[1],[1,3]", "[1] [1,3]"),
        ("data.train_glob=my folder/*.txt", "'my folder/*.txt'"),
    ],
)
def test_a_sweep_takes_the_whole_grammar(override, expected):
    assert " ".join(values(override)) == expected


def test_a_shuffle_has_every_value_once():
    assert sorted(values("seed=shuffle(range(0,9))")) == [str(seed) for seed in range(9)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "there is nothing to sweep: give values, e.g. -m seed=0,1,2"),
        (["seed=range(0)"], r"seed=range\(0\): it has no value: range\(3\) is 0, 1, 2"),
        (["optim.lr=interval(0.1,1)"], r"an interval has infinitely many .*or search in it: hydra/sweeper=optuna"),
        (["optim.lr=tag(x,interval(0.1,1))"], "an interval has infinitely many values"),
        (["model=glob(zzz*)"], r"model=glob\(zzz\*\): it matches none of gpt2, modern"),
        (["seed=glob(*)"], r"seed=glob\(\*\): it matches nothing: seed is not a group"),
        (["model=sort(glob(*))"], "while evaluating 'sort"),
        (["name=str(range(1,3))"], "Range can only be cast to int or float"),
        (["seed=jsn(1)"], "Unknown function 'jsn', Available: bool,choice,float,glob,int,interval,range"),
        (["optim.lr=choice(0.1,0.2"], "a bracket is not closed"),
        (
            ["hydra.run.dir=x", "seed=0,1"],
            "hydra.run.dir=x: of Hydra's settings a sweep takes only hydra.launcher, hydra.sweeper",
        ),
        (["hydra/launcher=joblb", "seed=0,1"], "Available options in 'hydra/launcher': basic"),
        (["hydra.launcher.nope=1", "seed=0,1"], "Could not override 'hydra.launcher.nope'"),
        (["hydra/launcher=basic,joblib", "seed=0,1"], "Sweeping over Hydra's configuration is not supported"),
        (["+optim=muon,adamw"], r"\+ and ~ work on lists only"),
    ],
)
def test_what_cannot_be_swept_is_one_line(overrides, message):
    with pytest.raises(ValueError, match=message):
        multirun.points(overrides)


@pytest.mark.parametrize("extra", [["hydra/launcher=submitit_slurm"], ["hydra/launcher=joblib"], ["hydra/sweeper=ax"]])
def test_a_plugin_that_is_absent_says_what_to_install(extra):
    group, _, name = extra[0].partition("=")
    if name in compose.app().config_loader.get_group_options(group):
        pytest.skip(f"{name} is installed here")
    with pytest.raises(ValueError, match=f"{extra[0]} is not installed here: pip install hydra-"):
        multirun.points([*extra, "seed=0,1"])


@pytest.mark.parametrize("points", [["seed=0,1"], ["seed=range(0,2)"]])
def test_the_composed_config_of_a_sweep_is_that_of_each_point(points, printed):
    text = printed(run, "-m", *points, "--cfg", "job")
    assert [config["seed"] for config in yaml.safe_load_all(text)] == [0, 1]
    assert text.startswith("---\n# seed=0\n")


# ---- a folder of one's own: a stored sweep, a root, groups of ours and of Hydra's


@pytest.fixture
def own(tmp_path, monkeypatch):
    files = {
        "experiment/lr.yaml": "# @package _global_\n"
        "hydra: {sweeper: {params: {optim.lr: '0.1,0.2', seed: 'range(0,2)'}}}\n",
        "mine.yaml": "defaults: [config, override model: modern, override track: free, _self_]\nseed: 7\n",
        "hydra/launcher/four.yaml": "defaults: [basic]\n",
        "optim/schedule/slow.yaml": "name: cosine\nwarmup_frac: 0.5\n",
        "model/size/tiny.yaml": "# @package model\nnum_layers: 1\nnum_heads: 1\nwidth: 32\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv(groups.VARIABLE, str(tmp_path))
    return tmp_path


def test_a_sweep_stored_in_an_experiment_is_made_and_what_is_typed_wins(own):
    assert points("experiment=lr", "track=free") == [
        [f"optim.lr={lr}", f"seed={seed}", "experiment=lr", "track=free"] for lr in (0.1, 0.2) for seed in (0, 1)
    ]
    assert points("experiment=lr", "seed=5") == [[f"optim.lr={lr}", "seed=5", "experiment=lr"] for lr in (0.1, 0.2)]
    assert compose.stored_sweep(["experiment=lr"]) == (None, ["optim.lr=0.1,0.2", "seed=range(0,2)"])
    assert compose.stored_sweep([]) == (None, [])


def test_every_group_of_ones_own_stands_beside_ours(own):
    assert {"tiny", "nano"} <= set(groups.choices("model/size"))
    (point,) = points("model/size=tiny", "optim/schedule=slow", "hydra/launcher=four")
    assert point == ["model/size=tiny", "optim/schedule=slow"]


def test_a_run_may_begin_with_a_root_of_ones_own(own, monkeypatch, printed):
    monkeypatch.setenv(groups.NAME_VARIABLE, "mine")
    text = printed(run, "--cfg", "job")
    config = yaml.safe_load(text)
    assert (config["seed"], config["model"]["arch"], config["track"]["name"]) == (7, "modern", "free")
    assert f"{own}/mine.yaml" in text.replace("\n# ", "")
    assert groups.as_typed() == ["--config-dir", str(own), "--config-name", "mine"]
    monkeypatch.setenv(groups.NAME_VARIABLE, "nope")
    with pytest.raises(ValueError, match="--config-name=nope: there is none of that name; .*choose from config, mine"):
        run.main(["--cfg", "job"])


def test_hydra_shows_its_own_settings_and_what_it_found(own, printed):
    shown = yaml.safe_load(printed(run, "--cfg", "hydra", "hydra/launcher=four"))
    assert list(shown) == ["hydra"] and shown["hydra"]["launcher"]["_target_"] == "hydra_plugins.speedrun.Processes"
    shown = yaml.safe_load(printed(run, "--cfg", "all", "seed=3", "goal.num_steps=9"))
    assert (shown["seed"], shown["goal"]["num_steps"]) == (3, 9) and "sweeper" in shown["hydra"]
    assert f"file://{own}" in printed(run, "--info", "searchpath")
