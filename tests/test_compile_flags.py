"""Flags of torch.compile that a contestant sets: seen wherever they are set, compared, and judged by the track."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import real_runs
import scripted
from comparing import compare, raced

from bench.claims.rules import runs
from bench.config import groups, schema
from bench.training import compile_flags

PROGRAM = """
import json, runpy, sys
flags = runpy.run_path({path!r})
flags["watch"]()
assert "torch" not in sys.modules
import torch
{body}
print(json.dumps(flags["changed"]()))
"""


def changed_by(body, **variables):
    program = PROGRAM.format(path=compile_flags.__file__, body=body)
    command = [sys.executable, "-W", "error::FutureWarning", "-c", program]
    env = real_runs.environment("/tmp") | variables
    return json.loads(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)


SET = """
import torch._inductor.config as inductor, torch._dynamo.config as dynamo
inductor.coordinate_descent_tuning = True
inductor.triton.cudagraphs = True
inductor.epilogue_fusion = inductor.epilogue_fusion  # its default, set again
dynamo.cache_size_limit = 64  # listed under its own name
"""
WHILE_COMPILING = """
import torch._inductor.config as inductor, torch._inductor.compile_fx as compile_fx
compile_fx.compile_fx = lambda graph, *args, **options: graph.forward
with inductor.patch(max_autotune=True):
    torch.compile(lambda x: x + 1)(torch.ones(2))
assert inductor.max_autotune is False
"""
FLAGS = {"dynamo.recompile_limit": 64, "inductor.coordinate_descent_tuning": True, "inductor.triton.cudagraphs": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "flags"),
    [
        ("", {}),
        ("import torch._dynamo, torch._inductor.config; torch.compile(lambda x: x, dynamic=False)", {}),
        (SET, FLAGS),
        (WHILE_COMPILING, {"inductor.max_autotune": True}),
    ],
)
def test_a_flag_is_listed_where_it_is_not_torchs_default(body, flags):
    assert changed_by(body) == flags


@pytest.mark.slow
def test_modes_and_options_of_torch_compile_and_variables_are_flags():
    body = (
        "torch.compile(lambda x: x, mode='max-autotune')\ntorch.compile(lambda x: x, options={'shape_padding': False})"
    )
    flags = changed_by(body, TORCHINDUCTOR_COORDINATE_DESCENT_TUNING="1", TORCHINDUCTOR_CACHE_DIR="/tmp/cache")
    assert flags["compile.max_autotune"] is True and flags["compile.shape_padding"] is False
    assert flags["env.TORCHINDUCTOR_COORDINATE_DESCENT_TUNING"] == "1"
    assert not any("CACHE_DIR" in name for name in flags)


@pytest.fixture
def judged():
    def of(track, *flags):
        settings = groups.values_of("track", track)["track"]
        rules = schema.build(schema.TrackRules, settings["rules"])
        measured = [{} if run_flags is None else {"compile_flags": run_flags} for run_flags in flags]
        records = [
            SimpleNamespace(name=f"run{number}", record={"measured": facts}) for number, facts in enumerate(measured)
        ]
        claim = SimpleNamespace(track=track, track_rules=SimpleNamespace(rules=rules), runs=records)
        return runs.only_allowed_flags_of_torch_compile_were_set(claim)

    return of


def test_the_tracks_rules_are_modded_nanogpts(judged):
    tuned = {"inductor.coordinate_descent_tuning": True}
    assert judged("gpt2_small", {}, {}) == (True, "none set")
    assert judged("gpt2_small", {}, tuned) == (False, "run1: it set inductor.coordinate_descent_tuning=True")
    assert judged("gpt2_medium", {}, tuned) == (True, "all allowed")
    assert judged("gpt2_medium", {"compile.max_autotune": True})[0] is False
    assert judged("gpt2_small", {"dynamo.recompile_limit": 64})[0] is True  # no flag of the kernels
    assert judged("cpu_nano", tuned) == (None, "track cpu_nano allows any")
    assert judged("gpt2_small", {}, None)[0] is None  # a record of before
    assert judged("gpt2_small", tuned, None)[0] is False


def test_compare_shows_flags_that_differ_as_part_of_what_is_raced():
    a, b = raced([10.0, 10.1, 10.2], [9.0, 9.1, 9.2])
    a = [run | {"measured": run["measured"] | {"compile_flags": {}}} for run in a]
    tuned = [run | {"measured": run["measured"] | {"compile_flags": {"inductor.max_autotune": True}}} for run in b]
    remark = "flags of torch.compile differ: none in A, inductor.max_autotune=True in B: part of what is raced"
    comparison = compare(a, tuned)
    assert remark in comparison["reasons"] and comparison["comparable"]
    assert "flags of torch.compile" not in str(compare(a, b))  # of B it is not known


@pytest.mark.slow
def test_a_script_and_a_model_leave_their_flags_in_the_record(tmp_path):
    folder = scripted.odd(tmp_path / "scripts", "sets_inductor_flags")["folder"]
    assert real_runs.run_json(folder)["measured"]["compile_flags"] == {"inductor.max_autotune": True}
    own_run = real_runs.run(tmp_path / "ours")
    assert real_runs.run_json(own_run)["measured"]["compile_flags"] == {}
