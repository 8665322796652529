"""A user's own model, optimizer, instrument and groups: found, checked before a run, part of what is raced."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import real_runs
import yaml

import models
from bench.analysis.diagnosis import code_diff
from bench.base import atomic, paths
from bench.base.paths import REPO
from bench.claims.rules import runs
from bench.cli import init
from bench.cli.main import main
from bench.config import compose, explain, groups, identity, resolve, schema, user_code
from bench.data.sources import datasets
from bench.launch import own_model, prepare
from bench.machine import code_state
from bench.plans.race import arm_process
from bench.plans.replay import rebuilding, recorded
from bench.record import step_files, verification
from bench.record.rows import row_of
from bench.training.instruments import registry

NET = """
from models.gpt2 import GPT2
class Net(GPT2):
    def __init__(self, ratio=4, **shape):
        super().__init__(**shape)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder that ./run.sh init has been in, where the user stands."""
    monkeypatch.setenv("SPEEDRUN_CWD", str(tmp_path))
    monkeypatch.delenv(groups.VARIABLE, raising=False)
    monkeypatch.setattr(sys, "path", sys.path[:])
    modules = set(sys.modules)
    assert init.main([]) == 0
    yield tmp_path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def faults(arch, args=None, methods=()):
    """What the process that has torch answers."""
    shape = {"num_layers": 2, "num_heads": 2, "width": 16, "vocab_size": 64, "seq_len": 8}
    return own_model.faults_of({"arch": arch, "args": args, "methods": methods, **shape})


# ---- groups


def test_init_writes_what_can_be_chosen_and_never_overwrites(project, printed, capsys):
    assert compose.compose(["model=mine", "track=mine"]).model.args == {"mlp_ratio": 4}
    (project / "my_model.py").write_text("mine")
    (project / "conf/track/mine.yaml").unlink()
    capsys.readouterr()
    assert "optim=mine  The class Config of my_optim.py" in " ".join(explain.help_of("optim", []).split("  "))
    shown = printed(init)
    assert "kept  my_model.py" in shown and "wrote  conf/track/mine.yaml" in shown
    assert (project / "my_model.py").read_text() == "mine"


def test_a_yaml_of_ones_own_that_is_not_utf8_is_named(project):
    (project / "conf" / "experiment" / "bad.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(ValueError, match="bad.yaml: byte 9 is not UTF-8"):
        compose.compose(["experiment=bad"])


def test_init_leaves_no_half_of_a_file_and_writes_through_no_link(project, printed, monkeypatch):
    file = project / "conf" / "track" / "mine.yaml"
    whole = file.read_text()
    file.unlink()
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="mine.yaml: cannot be written .No space left"):
        patch.setattr(
            atomic.os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        init.main([])
    assert "wrote  conf/track/mine.yaml" in printed(init) and file.read_text() == whole
    file.unlink()
    file.symlink_to(project / "elsewhere")
    assert "kept  conf/track/mine.yaml" in printed(init) and not (project / "elsewhere").exists()
    for linked in ("conf/optim", "conf"):  # one that came with a folder of somebody else's
        shutil.rmtree(project / linked)
        (project / linked).symlink_to("elsewhere")
        (project / "elsewhere").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=f"yaml: cannot be written: .*{linked}: it is a link, through"):
            init.main([])
        assert not list((project / "elsewhere").iterdir())
        (project / linked).unlink()


def test_init_refuses_the_harnesss_own_folder(monkeypatch):
    monkeypatch.setenv("SPEEDRUN_CWD", str(REPO / "docs"))
    with pytest.raises(ValueError, match="the harness's own folder"):
        init.main([])


def test_a_conf_folder_of_some_other_program_is_left_alone(project):
    assert paths.project_folder() == project and "mine" in compose.choices("model")
    (project / "conf" / paths.MARK).unlink()
    assert paths.project_folder() == REPO and "mine" not in compose.choices("model")
    assert groups.introduction() is None


def test_a_command_says_first_which_folders_it_uses(project, capsys):
    assert main(["run", "--cfg", "job", "track=free"]) == 0
    out, err = capsys.readouterr()
    assert (
        err == "    conf  conf/ adds model=mine, optim=mine, track=mine, experiment=mine\n" and "\nname: null\n" in out
    )


def test_config_dir_adds_a_folder_for_this_process_and_those_it_starts(project, monkeypatch, capsys):
    monkeypatch.setenv(groups.VARIABLE, "")
    write(project / "it's shared/goal/short.yaml", "num_steps: 3\nval_tokens: 1024\nval_every_steps: 3\n")
    assert main(["run", "--cfg", "job", "--config-dir", "it's shared", "track=free", "goal=short"]) == 0
    assert "num_steps: 100" in capsys.readouterr().out  # a track wins over groups, as ever
    assert arm_process.environment(project)[groups.VARIABLE] == "it's shared"
    assert groups.as_typed() == ["--config-dir", "it's shared"]
    assert compose.compose(["model=mine", "goal=short", "track=free"]).goal.val_tokens == 16384


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config-dir=nowhere"], "there is no folder of that name"),
        (["--config-dir", "empty"], "it has none of the groups model, "),
        (["--config-dir"], "name a folder"),
    ],
)
def test_a_config_dir_without_groups_is_refused(project, monkeypatch, capsys, arguments, message):
    monkeypatch.setenv(groups.VARIABLE, "")
    write(project / "empty/models/mine.yaml", "")
    assert main(["race", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_pipe_and_a_hidden_file_in_a_group_are_no_choices(project, capsys):
    os.mkfifo(project / "conf/model/pipe.yaml")  # a read of it would wait for ever
    (project / "conf/model/._mine.yaml").write_bytes(b"\0\5\26\7")  # as macOS leaves beside mine.yaml on other disks
    groups._by_group.cache_clear()
    assert main(["run", "--help", "model"]) == 0
    shown = capsys.readouterr().out
    assert "mine" in shown and "pipe" not in shown and "._" not in shown


def test_a_name_in_two_folders_is_refused_with_both_files(project):
    own = write(project / "conf/model/gpt2.yaml", "arch: my_model.py:MyModel\n")
    groups._by_group.cache_clear()
    with pytest.raises(ValueError, match="model=gpt2 is in two folders") as refused:
        compose.compose([])
    assert str(own) in str(refused.value) and str(REPO / "conf/model/gpt2.yaml") in str(refused.value)


def test_an_installed_package_brings_groups_by_its_entry_point(tmp_path):
    write(tmp_path / "my_plugin/__init__.py", "raise ImportError('it is not imported for that')")
    write(tmp_path / "my_plugin/conf/model/theirs.yaml", "defaults: [size: nano, _self_]\narch: my_plugin.net:Net\n")
    write(tmp_path / "my_plugin-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: my-plugin\nVersion: 1\n")
    write(tmp_path / "my_plugin-1.dist-info/entry_points.txt", "[speedrun.conf]\ntheirs = my_plugin.conf\n")
    lines = "from bench.config import compose; print(compose.compose(['model=theirs']).model.arch)"
    env = {"PYTHONPATH": f"{REPO}:{tmp_path}", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "my_plugin.net:Net\n", done.stderr


# ---- settings


def test_the_arguments_of_a_model_are_free_and_part_of_the_config_id(project):
    def config_of(*overrides):
        return resolve.resolve(compose.compose(["model=mine", "track=free", *overrides]), schema.Machine(0, 2), 257)

    config = config_of("model.args.mlp_ratio=2", "model.args.rope.base=500")
    assert config.model.args == {"mlp_ratio": 2, "rope": {"base": 500}} and config.name == "MyModel-adamw"
    assert identity.config_id(config) != identity.config_id(config_of())
    with pytest.raises(ValueError, match=r"unknown setting model\.argz\.x=1"):
        compose.compose(["model.argz.x=1"])
    with pytest.raises(
        ValueError, match="model.arch=gpt2 cannot be trained:\n  - it cannot be made with .*argument 'x'"
    ):
        own_model.check(compose.compose(["model.args.x=1"]))
    with pytest.raises(ValueError, match=r"trained:\n  - model.args.width is given by the harness: remove it"):
        own_model.check(compose.compose(["model.args.width=1"]))


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=mine", "optim=mine", "model.args.mlp_ratio=2", "track=cpu_nano"],
        ["track=mine", "optim=cosy", "model/size=small", "+instruments=ticks"],
        ["experiment=mine", "optim/schedule=half", "track=free", "instruments=[regions,ticks]", "ticks.every=3"],
    ],
)
def test_what_a_record_chose_of_own_yamls_is_composed_from_its_config(project, tmp_path, monkeypatch, overrides):
    write(project / "half.py", "from models import schedules\nclass Config(schedules.Config):\n    pass\n")
    write(project / "conf/optim/schedule/half.yaml", "name: half.py:Config\nwarmup_frac: 0.3\n")
    mine = (project / "conf/optim/mine.yaml").read_text()
    write(project / "conf/optim/cosy.yaml", mine.replace("trapezoid", "half"))
    write(project / "conf/instruments/ticks.yaml", "ticks:\n  class: ticks.py:Ticks\n  every: 2\n")
    overrides = [override.replace("ticks.every", "instruments.ticks.every") for override in overrides]
    groups._by_group.cache_clear()
    config = compose.compose(overrides)
    record = recorded.Recorded(tmp_path, {"command": ["run"]}, schema.to_dict(config), overrides)
    assert rebuilding.own_choices(record, REPO)
    conf = tmp_path / "rebuilt"
    rebuilt = rebuilding.without_choices(record, overrides, REPO, conf)
    shutil.rmtree(project / "conf")
    monkeypatch.setenv(groups.VARIABLE, str(conf))
    assert identity.config_id(compose.compose(rebuilt)) == identity.config_id(config)


@pytest.mark.parametrize("part", ["instruments", "track"])
def test_a_yaml_that_stands_for_a_records_own_is_written_below_conf_alone(project, tmp_path, part):
    config = schema.to_dict(compose.compose(["model=mine", "track=mine"]))
    config[part] |= {"../../mine": {"every": 1}} if part == "instruments" else {"name": "../../mine"}
    record = recorded.Recorded(tmp_path, {"command": ["run"], "track": "mine", "run_id": "a"}, config, [])
    with pytest.raises(ValueError, match=f"mine/a: its config.yaml names a file outside of conf/: {part}/../../mine"):
        rebuilding.without_choices(record, [], REPO, tmp_path / "code" / "conf")
    assert not (tmp_path / "code" / "mine.yaml").exists()


def test_a_record_is_read_and_hashed_without_the_optimizer_of_ones_own(project, tmp_path, monkeypatch):
    config = compose.compose(["optim=mine", "track=cpu_nano"])
    write(tmp_path / "run" / "config.yaml", yaml.safe_dump(schema.to_dict(config)))
    (project / "my_optim.py").write_text("raise SystemExit('somebody else's code runs')")
    monkeypatch.delitem(sys.modules, "own_my_optim_py")
    assert identity.config_id(schema.recorded(tmp_path / "run")) == identity.config_id(config)


def test_an_own_optimizer_and_schedule_are_settings_like_the_programs_own(project):
    text = "from dataclasses import dataclass\nfrom models import optimizers, schedules\n@dataclass(kw_only=True)\n"
    fields = "    mix: float  # of both\n    weight_decay: float = 0  # of all\n"
    write(project / "opt.py", f"{text}class Config(optimizers.Config):\n{fields}class Other: pass\n")
    write(project / "half.py", f"{text}class Config(schedules.Config):\n    def lr_frac(self, s, n): return 0.5\n")
    lines = ["defaults: [schedule: mine, _self_]", "name: opt.py:Config", "lr: 0.1", "mix: 0.2"]
    write(project / "conf/optim/mine.yaml", "\n".join(lines))
    write(project / "conf/optim/schedule/mine.yaml", "name: half.py:Config\n")
    groups._by_group.cache_clear()
    optim = compose.compose(["optim=mine", "optim.mix=0.3"]).optim
    assert (optim.mix, optim.schedule.lr_frac(3, 9)) == (0.3, 0.5)
    shown = lambda key, *words: " ".join(explain.help_of(key, words).split())  # noqa: E731
    known = "optim.mix of both use a number default none, set in conf/ only with optim=mine now "
    assert shown("mix", "optim=mine") == f"{known}0.2, from conf/optim/mine.yaml"
    assert shown("optim.mix").startswith(f"{known}not a setting of this run; with optim=mine it is 0.2, from")
    assert "only with optim=mine: mix" in shown("optim")
    origins = explain.Origins(["optim=mine"])
    job = explain.commented(compose.compose(["optim=mine"]), origins)
    optim = re.search(r"\noptim:\n((?:  .*\n)+)", job)[1]
    assert "# of both [a number; " in optim and "# of all [a number" in optim and "AdamW" not in optim
    both = "rate; with optim=mine: of all use a number of 0 or more; with optim=mine: a number default"
    assert both in shown("optim.weight_decay")  # of AdamW and of one's own
    with pytest.raises(ValueError, match="optim.mixx=0.3: did you mean mix[?] optim.name=opt.py:Config takes name, lr"):
        compose.compose(["optim=mine", "optim.mixx=0.3"])
    write(project / "conf/optim/bare.yaml", "\n".join(lines[:-1]))
    write(project / "conf/optim/wrong.yaml", "\n".join([*lines, "mixx: 0.2"]))
    groups._by_group.cache_clear()
    with pytest.raises(ValueError, match="; conf/optim/wrong.yaml may set no other"):
        compose.compose(["optim=wrong"])
    with pytest.raises(ValueError, match="give optim.mix=VALUE, or a line of its yaml or a default in its class"):
        compose.compose(["optim=bare"])
    write(project / "clash.py", f"{text}class Config(optimizers.Config):\n    warmup_frac: float = 0.0\n")
    write(project / "conf/optim/clash.yaml", "defaults: [schedule: constant]\nname: clash.py:Config\nlr: 0.1\n")
    groups._by_group.cache_clear()
    with pytest.raises(ValueError, match="optim.warmup_frac: the optimizer and its schedule both have it"):
        identity.config_id(compose.compose(["optim=clash"]))
    with pytest.raises(ValueError, match="opt.py has no class Other that extends models.optimizers.Config; it"):
        compose.compose(["optim=mine", "optim.name=opt.py:Other"])
    with pytest.raises(
        ValueError, match=r"unknown setting optim.alpha=1: optim.name=clash.py:Config takes .*warmup_frac"
    ):
        compose.compose(["optim.name=clash.py:Config", "optim.alpha=1"])  # and not what the yaml of AdamW has


def test_an_own_instrument_is_loaded_by_its_class_and_one_that_flags_steps_is_known(project):
    text = "from bench.training.instruments.base import Instrument\nclass Odd(Instrument):\n    flags_steps = True\n"
    write(
        project / "odd.py",
        text + "    def __init__(self, context, every):\n        self.every = every\nclass No: pass\n",
    )
    write(project / "conf/instruments/odd.yaml", "odd: {class: 'odd.py:Odd', every: 5}\n")
    groups._by_group.cache_clear()
    chosen = compose.compose(["instruments=[odd,regions]", "instruments.odd.every=2"]).instruments
    registry.check(chosen)
    assert registry.flagging(chosen) == ["odd"]
    (odd,), warnings = registry.load({"odd": chosen["odd"]}, None)
    assert (odd.every, odd.name, warnings) == (2, "odd", [])
    with pytest.raises(
        ValueError, match=r"odd\.class=odd.py:No: odd.py has no class No that extends .*base.Instrument; it has .*Odd"
    ):
        registry.check({"odd": {"class": "odd.py:No"}})
    (project / "odd.py").unlink()
    assert registry.flagging({"odd": {"class": "gone.py:Odd"}}) == []


def test_an_own_source_makes_other_data_after_an_edit(project, monkeypatch):
    monkeypatch.setenv("SPEEDRUN_DATA", str(project / "data"))
    text = "from bench.data.sources.source import Made\nclass Few(Made):\n    vocab_size = 9\n"
    text += "    def recipe(self): return {}\n"
    write(project / "few.py", text)
    data = schema.DataConfig(source="few.py:Few", seq_len=1, batch_tokens=1)
    before = datasets.chosen(data).folder()
    assert before.name.startswith("Few-")
    write(project / "few.py", text + "# other bytes\n")
    assert datasets.chosen(data).folder() != before
    with pytest.raises(ValueError, match="few.py has no class Many.*; it has Made, Few"):
        datasets.chosen(schema.DataConfig(source="few.py:Many", seq_len=1, batch_tokens=1))


# ---- what is raced


def test_the_files_of_an_own_class_are_raced_with_all_that_they_import(project):
    write(project / "net.py", "import lib.deep\nfrom blocks import a\nimport torch\nKERNEL = 'fast.cu'\n" + NET)
    for name in ("blocks.py", "lib/__init__.py", "lib/deep.py", "lib/more.py", "fast.cu", "other.py"):
        write(project / name, "")
    write(project / "lib/deep.py", "from . import more\nfrom models import gpt2\nimport models.other\n")
    write(project / "models/other.py", "")  # the harness's own models/ is what a run imports
    sources = user_code.sources(["net.py:Net"])
    assert list(sources) == [
        f"own/{name}" for name in ("blocks.py", "fast.cu", "lib/__init__.py", "lib/deep.py", "lib/more.py", "net.py")
    ]
    assert user_code.sources([f"../{project.name}/net.py:Net"]) == sources
    assert user_code.sources(["lib.deep:Net"]).keys() == {"own/lib/__init__.py", "own/lib/deep.py", "own/lib/more.py"}

    def identity():
        return code_state.source_sha256(own=user_code.sources(["net.py:Net"]))

    before = identity()
    assert before != code_state.source_sha256()
    write(project / "lib/more.py", "# a comment\n")
    write(project / "other.py", "x = 1")
    assert identity() == before
    write(project / "lib/more.py", "x = 1")
    assert identity() != before


def test_an_installed_package_is_raced_alone():
    assert set(user_code.sources(["hydra.version:Net"])) >= {"own/hydra/version.py", "own/hydra/__init__.py"}
    assert all(name.startswith("own/hydra/") for name in user_code.sources(["hydra.version:Net"]))


def test_a_record_keeps_the_files_and_a_race_knows_an_edit(project, tmp_path):
    write(project / "net.py", NET)
    job = prepare.Job(compose.compose(["model=mine", "model.arch=net.py:Net"]), None, [], [])
    code_state.write(REPO, tmp_path / "code", job.own_sources)
    assert (tmp_path / "code/own/net.py").read_text() == NET
    assert "own/net.py" in json.loads((tmp_path / "code/commit.json").read_text())["files"]
    before = job.source_sha256
    assert arm_process.source_sha256(REPO, job.own) == before
    write(project / "net.py", NET + "x = 1\n")
    assert arm_process.source_sha256(REPO, job.own) != before


# ---- checked before a run


def test_one_message_names_all_that_a_model_lacks(project):
    write(project / "net.py", "import torch\nclass Net(torch.nn.Module):\n    def __init__(self, width, depth): pass\n")
    message = "\n".join(faults("net.py:Net", {"dept": 1}, ["hidden_matrices"]))
    lacking = ("forward", "init_weights", "flops_per_token", "flops_per_token_causal", "hidden_matrices")
    assert [name for name in lacking if f"it lacks {name}(" not in message] == []
    assert "it cannot be made with " in message and "TypeError: Net.__init__() got an unexpected keyword" in message


WITHOUT_LOGITS = """
import torch
class Net(torch.nn.Module):
    def __init__(self, **shape):
        super().__init__()
        self.table = torch.nn.Embedding(512, 512)
    def forward(self, tokens_BT, targets_BT):
        return torch.nn.functional.cross_entropy(self.table(tokens_BT).flatten(0, 1), targets_BT.flatten())
    def init_weights(self, generator): torch.nn.init.zeros_(self.table.weight)
    def flops_per_token(self, seq_len): return 1
    def flops_per_token_causal(self, seq_len): return 1
"""


def test_a_model_without_logits_is_for_track_free_alone(project):
    write(project / "net.py", WITHOUT_LOGITS)
    settings = ["model.arch=net.py:Net", "hardware=cpu"]
    assert prepare.prepare([*settings, "track=free"]).config.model.arch == "net.py:Net"
    with pytest.raises(ValueError, match=r"lacks logits\(tokens_BT\): .* track=free accepts models without it"):
        prepare.prepare([*settings, "track=cpu_nano"])
    narrow = "    def logits(self, tokens_BT): return self.table(tokens_BT)[..., :9]\n"
    write(project / "net.py", WITHOUT_LOGITS + narrow)
    with pytest.raises(ValueError, match=r"logits must return \(1, 128, 64\) .*; it returns \(1, 128, 9\)"):
        prepare.prepare([*settings, "track=cpu_nano"])


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("gone.py:Net", "", "there is no file"),
        ("net.py:Net", "import nowhere", "ModuleNotFoundError: No module named 'nowhere' (net.py, line 1)"),
        ("net.py:Net", "from bench.mine import x", "bench is the harness's own package here"),
        ("net.py:Net", "from .x import y", "write my_package.my_model:NAME"),
        ("net.py:Net", "class Nett: pass", "net.py has no class Net; it has Nett"),
        ("net.py:Net", "def Net(): pass", "net.py has no class Net; it has none"),
        ("net.py:Net", "class Net: pass", "Net is not a torch.nn.Module"),
        ("/home/me/net.py:Net", "", "write it relative to the current folder"),
        ("~/net.py:Net", "", "write it relative to the current folder"),
        ("net.py:Net()", "", "write my_model.py:Net"),
        ("net.py:Net", NET + "        raise KeyError('depth')", "KeyError: 'depth' (net.py, line 6)"),
        ("net.py:Net", NET + "    def logits(self, t): return self.blocks[0](t.float())", "a forward pass fails"),
        ("net.py:Net", NET + "    def forward(self, t, y): return self.logits(t)", "it returns (1, 8, 64)"),
        (
            "net.py:Net",
            NET + "        del self.blocks",
            "a forward pass fails: AttributeError: 'Net' object has no attr",
        ),
        (
            "net.py:MetaFormer",
            NET.replace("Net", "MetaFormer").replace("=4, **shape", ", **shape"),
            "TypeError: MetaFormer.__init__() missing 1 required positional argument: 'ratio'",
        ),
        ("net.py:Net", NET.replace("ratio=4", "meta"), "missing 1 required positional argument: 'meta'"),
    ],
)
def test_a_fault_is_one_sentence(project, name, text, fault):
    write(project / "net.py", text)
    (message,) = faults(name)
    assert fault in message


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("def build(self, model, rank, world_size, device_type)", "def build(self, model)",
         "its build(self, model) does not take what a run gives it: make it build(self, model, rank, world_size, "),
        ("def build(", "def built(", "Config lacks build(self, model, rank, world_size, device_type)"),
        ("add_(direction, alpha=-lr)", "add_(directions)", "NameError: name 'directions' is not defined"),
        ("alpha=-lr", "alpha=float('nan')", "not finite in "),
        ('lr = group["lr"]', "lr = 0.0", "do not change token_embedding.weight, "),
        ("p.ndim >= 2]", "p.ndim > 2]", "it does not train token_embedding.weight, "),
        ("state = self.state[weight]", "state = self.__dict__.setdefault(f'of{id(weight)}', {})", "is not restored by"),
        ("return SignMomentum(", "return (SignMomentum)(", None),
        ("import torch\n", "import torch\nimport nowhere\n", "No module named 'nowhere'"),
        ("@dataclass(kw_only=True)\n", "", r"Config needs @dataclass(kw_only=True) above it"),
    ],
)  # fmt: skip
def test_an_optimizer_of_ones_own_is_tried_before_any_run(project, old, new, fault):
    text = (project / "my_optim.py").read_text()
    assert text.count(old) == 1
    write(project / "my_optim.py", text.replace(old, new))
    overrides = ["optim=mine", "track=free", "goal.num_steps=2", "model.num_layers=1"]
    if fault is None:
        assert own_model.refusals([compose.compose(overrides)]) == [""]
        return
    with pytest.raises(ValueError, match=re.escape(fault)) as refused:
        own_model.check(compose.compose(overrides))
    assert str(refused.value).startswith("optim.name=my_optim.py:Config: ") and "\n" not in str(refused.value)


def test_an_optimizers_yaml_without_a_schedule_is_told_the_line_to_add(project):
    yaml = (project / "conf/optim/mine.yaml").read_text()
    write(project / "conf/optim/bare.yaml", yaml[yaml.index("name:") : yaml.index("schedule:\n")])
    groups._by_group.cache_clear()
    for overrides in (["optim=bare"], ["optim=bare", "optim/schedule=trapezoid"]):
        with pytest.raises(ValueError, match=r"begin it with `defaults: \[schedule: trapezoid, _self_\]`$"):
            compose.compose(overrides)


def test_an_own_optimizer_needs_no_peak_lr_and_its_runs_bear_its_files_name(project):
    config = resolve.resolve(compose.compose(["optim=mine", "track=free"]), schema.Machine(0, 2), 257)
    assert config.name == "gpt2-my_optim"
    model = models.load("gpt2")(vocab_size=64, seq_len=8, num_layers=1, num_heads=2, width=16)
    optimizer = config.optim.optimizer(model, 0, 1, "cpu")
    config.optim.set_step(optimizer, 99, 100)
    lrs = {(group["peak_lr"], round(group["lr"], 9)) for group in optimizer.param_groups}
    assert lrs == {(0.0003, 0.000005)}  # the last of 60 steps of the cooldown


@pytest.mark.parametrize(
    "line",
    ["float(weight.sum())", "weight.tolist()", "weight.detach().numpy()", "weight + torch.ones(16, device='cpu')"]
    + ["weight.to('cpu')", "weight.unique()", "assert torch.isfinite(weight).all()"],
)
def test_a_model_that_the_meta_device_cannot_make_is_tried_by_the_run(project, line):
    text = f"import torch{NET}        weight = self.token_embedding.weight\n        {line}\n"
    write(project / "net.py", text)
    assert faults("net.py:Net") == []


def test_the_models_of_init_are_fine_and_the_refusal_comes_before_any_run(project):
    assert faults("my_model.py:MyModel", {"mlp_ratio": 2}, ["hidden_matrices"]) == []
    with pytest.raises(ValueError, match=r"model.arch=my_model.py:MyModel cannot be trained:\n  - .* 'mlp_ratioo'"):
        prepare.prepare(["model=mine", "track=free", "model.args.mlp_ratioo=2"])
    assert not (project / "results").exists()


@pytest.mark.slow
def test_an_own_model_and_instrument_run_in_two_ranks(project):
    text = "import os\nfrom bench.training.instruments.base import Instrument\n"
    text += "class Count(Instrument):\n    steps = 0\n"
    text += "    def on_step_end(self, step): self.steps += 1\n    def summary(self):\n"
    text += "        at, key = os.path.expanduser('~/x'), 'hf_' + 36 * 'a'\n"
    text += "        self.who = f\"denied for user {os.environ['USER']}\"\n"
    text += "        self.context.emit('note', at=at, key=key)\n"
    text += "        return {'steps': self.steps, 'at': at, 'key': key, at: 1, self.who: self.who}\n"
    text += "    def flags(self): return {1: os.environ['USER'], 2: 'hf_' + 36 * 'a'}\n"
    text += "    def columns(self): return {'hf_' + 36 * 'a': {1: 0.5}}\n"
    write(project / "count.py", text)
    write(project / "conf/instruments/count.yaml", "count: {class: 'count.py:Count'}\n")
    overrides = ["model=mine", "track=free", "experiment=smoke", "instruments=[count]", "hardware.num_processes=2"]
    real_runs.bench(project / "results", "run", *overrides, code=0, USER="zeldaland")
    (folder,) = real_runs.folders(project / "results")
    record = real_runs.run_json(folder)
    assert record["model"]["arch"] == "my_model.py:MyModel"
    assert record["instrument_summaries"]["count"] == {"steps": 10, "at": "~/x", "key": "SECRET", "~/x": 1} | {
        "denied for user USER": "denied for user USER"
    }
    assert {row["flags"] for row in real_runs.steps(folder)} == {"", "USER", "SECRET"}
    assert {row["SECRET"] for row in real_runs.steps(folder)} == {"", "0.5"}
    notes = [event for event in step_files.read_events(folder) if event["event"] == "note"]
    assert [(note["at"], note["key"]) for note in notes] == [("~/x", "SECRET")] * 2
    assert {"own/count.py", "own/my_model.py"} <= record["code"]["files"].keys()
    assert (Path(folder) / "code/own/my_model.py").is_file()


def test_compare_shows_what_changed_in_the_users_files_without_git(project, tmp_path):
    for name, text in (("a", NET), ("b", NET.replace("ratio=4", "ratio=2"))):
        write(project / "net.py", text)
        code_state.write(REPO, tmp_path / name / "code", user_code.sources(["net.py:Net"]))
    diff = code_diff.diff_folders(tmp_path / "a", tmp_path / "b", repo=tmp_path)
    assert diff["files"] == [{"path": "own/net.py", "added": 1, "removed": 1}] and diff["unknown"] is None
    assert "-    def __init__(self, ratio=4, **shape):\n+    def __init__(self, ratio=2" in diff["patch"]


@pytest.mark.slow
def test_an_own_model_gets_a_credential_that_no_file_of_its_record_holds(project):
    key = "-".join(("Canary7", "of", "a", "model"))  # in parts: this file may be in a diff that the record holds
    is_key = f"hashlib.sha256(api_key.encode()).hexdigest() == '{hashlib.sha256(key.encode()).hexdigest()}'"
    text = NET.replace("ratio=4", "api_key=''").replace("        super()", f"        assert {is_key}\n        super()")
    write(project / "net.py", "import hashlib\n" + text)
    overrides = ["track=free", "experiment=smoke", "model.arch=net.py:Net", f"model.args={{api_key: {key}}}"]
    real_runs.bench(project / "results", "run", *overrides, code=0)
    (folder,) = real_runs.folders(project / "results")
    record = real_runs.run_json(folder)
    assert record["redacted"] == ["model.args.api_key"]
    assert [path for path in folder.rglob("*") if path.is_file() and key.encode() in path.read_bytes()] == []
    assert verification.report(folder)["passed"]
    claim = SimpleNamespace(is_of_logs=False, kinds={("a", "b")}, runs=[SimpleNamespace(record=record)])
    passed, why = runs.the_runs_share_config_and_code(claim)
    assert not passed and "model.args.api_key: its value is not recorded" in why


@pytest.mark.slow
def test_a_step_of_ones_own_that_raises_is_named_by_step_and_line(project):
    text = (project / "my_optim.py").read_text()
    old = 'lr = group["lr"]  # the schedule has set it for this step\n'
    fails = 'lr, group["num"] = group["lr"], group.get("num", 0) + 1\n            assert group["num"] < 3, "planted"\n'
    write(project / "my_optim.py", text.replace(old, fails))
    overrides = ["optim=mine", "goal.num_steps=8", "seed=0"]
    done = real_runs.bench(project / "results", "run", *real_runs.SHORT, *overrides, code=1)
    (folder,) = real_runs.folders(project / "results")
    failure = real_runs.run_json(folder)["failure"]
    assert failure["step"] == 3 and failure["message"] == "AssertionError: planted (my_optim.py, line 28)"
    assert f"{folder.name}/logs/rank0.log" in done.stdout
    assert [row["step"] for row in real_runs.steps(folder)] == ["0", "1", "2"]


@pytest.mark.parametrize("num_bytes", [2**17, 3])
def test_an_own_model_that_reads_a_file_of_an_earlier_run_makes_its_run_suspect(project, num_bytes):
    """A cheat: trained weights that no check at the first step sees, or a few bytes that an audit finds changed."""
    weights = write(project / "weights.dat", "x" * num_bytes)
    write(project / "elsewhere/helper.py", "x = 1")
    reads = f"        open({str(weights)!r}, 'rb').read()\n"
    reads += f"        import sys; sys.path.insert(0, {str(project / 'elsewhere')!r}); import helper\n"
    write(project / "net.py", NET + reads + "        open('/proc/self/maps').read()\n")
    overrides = ["track=cpu_nano", "experiment=smoke", "model.arch=net.py:Net"]
    real_runs.bench(project / "results", "run", *overrides, code=0)
    (folder,) = real_runs.folders(project / "results")
    record = real_runs.run_json(folder)
    doubts = [doubt["doubt"] for doubt in record["doubts"] if doubt["instrument"] == "files"]
    assert doubts[0] == f"it read a file that is not the track's data: {weights}"
    assert doubts[1].startswith(f"it read a source that its identity lacks: {project}/elsewhere/helper.py")
    assert set(doubts) <= set(record["validity_reasons"]) and row_of(record)["script_doubt"] == doubts[0]
    assert verification.report(folder)["passed"]


@pytest.mark.skipif(not Path("/proc/sysvipc/shm").exists(), reason="needs System V shared memory in /proc")
def test_shared_memory_that_a_run_leaves_makes_it_suspect_and_stays_as_it_may_be_anothers(project):
    """A cheat: weights that a later run finds without opening a file."""
    keeps = "        import ctypes\n        libc = ctypes.CDLL(None)\n        libc.shmat.restype = ctypes.c_void_p\n"
    keeps += "        libc.shmdt(ctypes.c_void_p(libc.shmat(libc.shmget(0x5EED99, 3 << 20, 0o1600), None, 0)))\n"
    write(project / "net.py", NET + keeps)
    overrides = ["track=free", "experiment=smoke", "model.arch=net.py:Net"]
    real_runs.bench(project / "results", "run", *overrides, code=0)
    (folder,) = real_runs.folders(project / "results")
    record = real_runs.run_json(folder)
    doubt = row_of(record)["script_doubt"]
    assert doubt.startswith("3.0 MiB of System V shared memory were used while it ran, and a later run finds data")
    command = doubt.partition("needs them, ")[2].split()
    subprocess.run(command, check=True)
    assert str(0x5EED99) not in Path("/proc/sysvipc/shm").read_text()
