"""Which steps may be profiled: what the settings mean, and what is refused before a race starts."""

import subprocess
import sys

import pytest

from bench.base.paths import CONF
from bench.config import compose, overrides, window_settings
from bench.config.window_settings import kempner_window
from bench.config.windows import ProfilerWindow, described
from bench.launch.prepare import requested_config
from bench.training.instruments import registry


def chosen(**changes):
    """chosen(trace={"first_step": 5}): {"trace": all its settings, that one changed}, checked as a race's are."""
    compose._check_settings("instruments", changes)
    registry.check(changes)
    return changes


def windows(**changes):
    return window_settings.trace_windows(chosen(trace=changes)["trace"])


def composed(*overrides):
    """The instruments of these overrides, checked as a run's are."""
    return requested_config([*overrides]).instruments


def span(window):
    return window.begin_step, window.first_step, window.last_step


def test_a_window_is_its_warmup_and_then_exactly_its_active_steps():
    (window,) = windows(first_step=6, warmup_steps=2, active_steps=3)
    assert span(window) == (4, 6, 8)
    assert described(window) == "steps 6 to 8 after warm-up from step 4"
    assert described(ProfilerWindow(name="one", first_step=3, active_steps=1)) == "step 3"


def test_listed_windows_differ_from_the_common_settings_in_what_they_name():
    listed = "[{name:early,first_step:5},{name:late,first_step:20,active_steps:1,ranks:[1,0,1],with_stack:true}]"
    settings = composed("instruments=[trace]", f"instruments.trace.windows={listed}")
    early, late = window_settings.trace_windows(settings["trace"])
    assert (early.name, span(early), early.ranks, early.options.with_stack) == ("early", (3, 5, 7), None, False)
    assert (late.name, span(late), late.ranks, late.options.with_stack) == ("late", (18, 20, 20), (0, 1), True)


def test_the_modded_recipe_waits_5_warms_up_5_and_records_4():
    (window,) = window_settings.trace_windows(composed("profile=modded")["trace"])
    assert (window.name, span(window), window.ranks, window.gzip) == ("modded", (6, 11, 14), None, True)
    assert window.options.record_shapes and not window.options.with_stack


@pytest.mark.parametrize(
    ("start_step", "end_step", "expected"), [(5, 8, (5, 6, 8)), (2, 5, (2, 3, 5)), (1, 3, (1, 2, 3)), (0, 2, (1, 1, 2))]
)
def test_kempners_window_records_from_start_plus_1_to_end(start_step, end_step, expected):
    window = kempner_window(chosen(window={"start_step": start_step, "end_step": end_step})["window"])
    assert span(window) == expected
    options = window.options
    assert (options.record_shapes, options.profile_memory) == (True, True)
    assert (options.with_stack, options.with_flops) == (False, True)


def test_a_profile_adds_its_instrument_to_those_that_are_chosen():
    assert set(composed("profile=window")) == {*composed(), "window"}
    assert list(composed("profile=stages", "instruments=[]")) == ["stages"]
    assert composed("profile=window", "instruments.window.end_step=9")["window"]["end_step"] == 9


@pytest.mark.parametrize("profile", compose.choices("profile"))
def test_every_profile_composes_with_all_settings_of_its_instrument(profile):
    import yaml

    ((name, settings),) = composed(f"profile={profile}", "instruments=[]").items()
    assert set(settings) == set(yaml.safe_load((CONF / "instruments" / f"{name}.yaml").read_text())[name])


@pytest.mark.parametrize(
    ("typed", "spelled"),
    [
        (["--enable_profiling=True", "seed=3"], ["profile=stages", "seed=3"]),
        (["enable_profiling=true"], ["profile=stages"]),
        (["--enable-profiling"], ["profile=stages"]),
        (["--enable_profiling=False", "seed=3"], ["seed=3"]),
        (["model=modern"], ["model=modern"]),
    ],
)
def test_nanochats_word_is_understood(typed, spelled):
    assert overrides.spelled(typed) == spelled


def test_nanochats_word_is_not_quietly_overruled():
    with pytest.raises(ValueError, match="--enable_profiling=maybe: use True or False"):
        overrides.spelled(["--enable_profiling=maybe"])
    with pytest.raises(ValueError, match="it means profile=stages, and profile=window is given too"):
        overrides.spelled(["--enable_profiling=True", "profile=window"])


def test_both_programs_take_nanochats_word(printed):
    from bench.cli import run

    assert "stages:" in printed(run, "--enable_profiling=True", "--cfg", "job")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trace": {"first_step": 2}}, "first_step=2: its warmup_steps=2 come before it: use first_step=3 or more"),
        ({"trace": {"first_step": 0}}, "first_step=0: use a whole number of 1 or more"),
        ({"trace": {"active_steps": "two"}}, "active_steps=two: use a whole number"),
        ({"trace": {"record_shapes": 1}}, "record_shapes=1: use true or false"),
        ({"trace": {"gzip": None}}, "gzip=None: use true or false"),
        ({"trace": {"ranks": 0}}, r"ranks=0: use a list of ranks, e.g. \[0\], or null"),
        ({"trace": {"ranks": [-1]}}, r"ranks=\[-1\]: use a list of ranks"),
        ({"trace": {"activities": ["gpu"]}}, r"activities=\['gpu'\]: use a list of cpu and cuda"),
        ({"trace": {"name": "a/b"}}, "name=a/b: use letters, .* part of a file's name"),
        ({"trace": {"max_mib": 0}}, "max_mib=0: use a number of MiB above 0"),
        ({"trace": {"windows": [5]}}, r"trace.windows=\[5\]: use a list of windows, e.g. \[{name:early,"),
        ({"trace": {"windows": [{"frist_step": 5}]}}, r"unknown setting instruments.trace.windows\[0\].frist_step=5"),
        ({"trace": {"windows": [{"first_step": 5}, {"first_step": 50}]}}, "name=trace: two windows have this name"),
        (
            {"trace": {"windows": [{"name": "a", "first_step": 5}, {"name": "b", "first_step": 9}]}},
            "window b, steps 9 to 11 after warm-up from step 7: "
            "it overlaps with window a, steps 5 to 7 after warm-up from step 3",
        ),
        ({"window": {}, "trace": {"first_step": 10}}, "window trace, steps 10 to 12 .* overlaps with window window"),
        ({"window": {"end_step": 5}}, "end_step=5: it must be greater than start_step=5"),
        ({"window": {"classifier": "old"}}, "classifier=old: use fixed or kempner_v0"),
        ({"window": {"trace_dir": "/tmp/x"}}, "trace_dir=/tmp/x: use letters, .* part of a file's name inside the run"),
        ({"window": {"trace_dir": "../x"}}, "trace_dir=../x: use letters, digits"),
        ({"window": {}, "stages": {}}, "instruments.window: instruments.stages profiles too"),
        ({"trace": {}, "stages": {}}, "instruments.trace: instruments.stages profiles too"),
        ({"stages": {"step": 0}}, "step=0: use a whole number of 1 or more"),
        ({"stages": {"stacks": "c"}}, "stacks=c: use python or all"),
        ({"stages": {"with_stack": None}}, "with_stack=None: use true or false"),
    ],
)
def test_what_cannot_run_is_refused_with_what_the_value_and_what_to_try(changes, message):
    with pytest.raises(ValueError, match=message):
        chosen(**changes)


def test_windows_side_by_side_are_no_overlap():
    early, late = windows(windows=[{"name": "a", "first_step": 5}, {"name": "b", "first_step": 10}])  # 3 to 7, 8 to 12
    assert early.last_step + 1 == late.begin_step
    chosen(window={}, trace={})  # 5 to 8, 9 to 13


def test_windows_of_different_ranks_are_no_overlap():
    assert len(windows(windows=[{"name": "a", "ranks": [0]}, {"name": "b", "ranks": [1]}])) == 2
    with pytest.raises(ValueError, match="overlaps"):
        windows(windows=[{"name": "a", "ranks": [0]}, {"name": "b"}])


def test_a_window_that_is_not_enabled_disturbs_no_other():
    assert kempner_window(chosen(window={"enable": False}, stages={})["window"]) is None


def test_an_experiment_may_name_some_settings_only():
    """Settings that it omits are filled in from the instrument's yaml, so that the record has all of them."""
    settings = chosen(trace={"first_step": 7})["trace"]
    assert settings["first_step"] == 7 and settings["warmup_steps"] == 2


def test_checking_any_instrument_needs_no_torch(repo):
    """So the launcher can ask each what it refuses, and a race which of them flag steps."""
    program = (
        "import sys\n"
        "from bench.training.instruments import registry\n"
        "from bench.config import compose\n"
        "names = compose.choices('instruments')\n"
        "for name in names:\n"
        "    registry.check(compose.compose([f'instruments=[{name}]']).instruments)\n"
        "print(registry.flagging([*names, 'wandb']), 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=repo, capture_output=True, text=True)
    assert done.stdout == "['memory_history', 'nsys', 'stages', 'trace', 'window'] False\n", done.stderr


@pytest.mark.parametrize(
    ("overrides", "step"),
    [
        (["profile=modded"], 14),
        (["profile=window", "instruments.window.end_step=9"], 9),
        (["profile=stages", "instruments.stages.step=3"], 3),
        (["profile=memory", "+instruments=trace"], 13),
    ],
)
def test_what_is_looked_at_ends_with_the_last_window(overrides, step):
    assert registry.last_step(composed(*overrides)) == step


def test_a_run_without_a_window_cannot_stop_after_it():
    overrides = ["track=cpu_nano", "profile.stop_after_window=true"]
    with pytest.raises(ValueError, match="stop_after_window=true: no chosen instrument has a window of steps: choose"):
        requested_config(overrides)
