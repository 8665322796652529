"""Memory snapshots: read as data only, added up to the byte as torch does, shown on a page, and what memory was for."""

import pickle
import re

import pytest
import snapshots
from browser import Browser, needs_browser
from snapshots import FORWARD, LOGITS, MIB, WEIGHTS, Allocator, frames

from bench.analysis.memory import lives, page, pickles
from bench.cli import memory as cli


def saved(folder, snapshot, protocol=4):
    path = folder / "steps_rank0.pickle"
    path.write_bytes(pickle.dumps(snapshot, protocol=protocol))
    return path


# ---- reading


@pytest.mark.parametrize("protocol", range(6))
def test_a_snapshot_is_read_as_it_was_written_in_any_protocol(tmp_path, protocol):
    shot = snapshots.training()
    assert pickles.load(saved(tmp_path, shot, protocol)) == shot


class Evil:
    def __reduce__(self):
        return print, ("this was run",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_would_run_something_is_refused_and_nothing_runs(tmp_path, capsys, protocol):
    path = saved(tmp_path, {"segments": [], "device_traces": [], "x": Evil()}, protocol)
    with pytest.raises(ValueError, match=r"is not a memory snapshot \(it asks for (builtins|__builtin__).print"):
        pickles.load(path)
    assert capsys.readouterr().out == ""


def pickled(segments=(), *entries):
    return pickle.dumps({"segments": list(segments), "device_traces": [list(entries)]})


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", r"is not a memory snapshot \(it is no pickle, or a damaged one\): give what"),
        (b"\x80\x04\x95", "it is no pickle, or a damaged one"),
        (b"not a pickle", "it is no pickle, or a damaged one"),
        (pickle.dumps(3), "x.pickle: expected object, got int: give what"),
        (pickle.dumps({"segments": {}, "device_traces": []}), "segments: expected array, got object: give what"),
        (pickled([{"blocks": []}]), "segment 0: lacks total_size"),
        (pickled([{"total_size": 1, "blocks": [{"size": "1"}]}]), r"blocks\[0\].size: expected int, got str"),
        (pickled((), {"action": "alloc"}), "entry 0 of device 0: lacks size"),
        (pickled((), {"action": "alloc", "size": 1, "frames": 5}), "device 0: frames: expected array, got int"),
        (pickled((), {"action": "alloc", "size": 1, "addr": [1]}), "device 0: addr: expected int, got array"),
    ],
)
def test_what_is_no_snapshot_is_refused_with_what_is_wrong(tmp_path, content, says):
    path = tmp_path / "x.pickle"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=says):
        pickles.load(path)


def test_a_list_is_taken_for_the_segments_alone(tmp_path):
    shot = snapshots.training()
    assert pickles.load(saved(tmp_path, shot["segments"])) == {"segments": shot["segments"], "device_traces": []}


# ---- adding up


def test_who_held_what_when_memory_was_fullest():
    """Weights 6 MiB before the recording; then activations 2 and 3, logits 5 (the peak: 16), all freed, then 1 more."""
    gpu = Allocator()
    gpu.recording = False
    gpu.alloc(6 * MIB, WEIGHTS)
    gpu.recording = True
    kept = [gpu.alloc(2 * MIB, FORWARD), gpu.alloc(3 * MIB, FORWARD), gpu.alloc(5 * MIB, LOGITS)]
    for address in kept:
        gpu.free(address)
    gpu.alloc(1 * MIB, LOGITS)
    held = snapshots.held(gpu.snapshot())
    assert held.peak_bytes == 16 * MIB and held.peak_entry == 2
    assert held.at_peak == {
        "models/gpt2.py:12 __init__": 6 * MIB,
        "models/gpt2.py:45 forward": 5 * MIB,
        "models/gpt2.py:70 forward": 5 * MIB,
    }
    assert held.initial == {"models/gpt2.py:12 __init__": 6 * MIB}
    assert held.end_bytes == 7 * MIB and held.unexplained_bytes == 0
    assert held.allocated == {"models/gpt2.py:45 forward": [2, 5 * MIB], "models/gpt2.py:70 forward": [2, 6 * MIB]}


def test_what_was_freed_without_having_been_allocated_was_there_before():
    gpu = Allocator()
    gpu.recording = False
    old = gpu.alloc(4 * MIB)
    gpu.alloc(100, WEIGHTS)  # stays; the allocator gives 512 bytes, and 100 were asked for
    gpu.recording = True
    gpu.alloc(1 * MIB, FORWARD)
    gpu.free(old)
    held = snapshots.held(gpu.snapshot())
    assert held.initial == {lives.BEFORE: 4 * MIB, "models/gpt2.py:12 __init__": 100}
    assert (held.peak_bytes, held.end_bytes) == (5 * MIB + 100, 1 * MIB + 100)


def test_a_history_whose_beginning_was_overwritten_still_adds_up():
    whole = snapshots.training()
    for lost in (1, 7, 40, 100):
        cut = whole | {"device_traces": [whole["device_traces"][0][lost:]]}
        held, all_of_it = snapshots.held(cut), snapshots.held(whole)
        assert held.end_bytes == all_of_it.end_bytes and held.unexplained_bytes == 0
        assert held.lives.reserved_initial + sum(change for _, change in held.lives.reserved_changes) == 60 * MIB


def test_memory_that_waits_for_another_stream_is_still_held():
    gpu = Allocator()
    waiting = gpu.alloc(2 * MIB, FORWARD)
    gpu.free(gpu.alloc(1 * MIB, LOGITS))
    gpu.free(waiting, completed=False)
    snapshot = gpu.snapshot()
    assert snapshots.held(snapshot).end_bytes == 2 * MIB
    assert lives.segment_totals(snapshot, 0)["waiting"] == 2 * MIB


def test_without_segments_as_from_a_cpu_profiler_it_begins_at_nothing():
    actions = (("alloc", 1.0), ("free_completed", 2.0))
    trace = [{"action": action, "addr": 1, "size": 10, "time_us": time_us} for action, time_us in actions]
    held = snapshots.held({"segments": [], "device_traces": [trace]})
    assert (held.initial, held.peak_bytes, held.end_bytes, held.unexplained_bytes) == ({}, 10, 0, 0)
    assert held.at_peak == {lives.NO_STACK: 10}


def test_a_snapshot_that_contradicts_itself_is_reported():
    snapshot = snapshots.training()
    snapshot["segments"] = snapshot["segments"][1:]  # where the weights are, and blocks of the trace
    assert snapshots.held(snapshot).unexplained_bytes == 0  # the weights are not known, and the rest was freed
    gpu = Allocator()
    gpu.alloc(3 * MIB)
    lacking = gpu.snapshot()
    lacking["segments"][0]["blocks"][0]["state"] = "inactive"
    assert snapshots.held(lacking).unexplained_bytes == 3 * MIB


def test_sampling_keeps_the_peak_and_the_sums():
    gpu = Allocator()
    for number in range(500):
        size = (300 if number == 321 else 1 + number % 7) * MIB // 64
        gpu.free(gpu.alloc(size, FORWARD if number % 2 else LOGITS))
    memory = snapshots.held(gpu.snapshot())
    points = lives.sampled(memory, ["models/gpt2.py:45 forward"], 40)
    assert len(points) <= 40 + 2
    assert max(total for _, _, total, _ in points) == memory.peak_bytes == 300 * MIB // 64
    assert all(sum(held.values()) == total for _, held, total, _ in points)
    assert [entry for entry, *_ in points] == sorted(entry for entry, *_ in points)
    assert points[-1][2] == memory.end_bytes == 0


def test_fullness_separates_rounding_gaps_and_whole_free_segments():
    """20 MiB segments: one with 12 MiB, a gap of 4, 3 MiB + 100 bytes (rounded up by 412); one freed altogether."""
    gpu = Allocator()
    gpu.alloc(12 * MIB)
    gap = gpu.alloc(4 * MIB)
    gpu.alloc(3 * MIB + 100)
    gpu.free(gpu.alloc(15 * MIB))
    gpu.free(gap)
    totals = lives.segment_totals(gpu.snapshot(), 0)
    tail = 20 * MIB - 19 * MIB - 512
    expected = {"num_segments": 2, "reserved": 40 * MIB, "used": 15 * MIB + 100, "rounding": 412, "waiting": 0}
    expected |= {"free": 24 * MIB + tail, "in_gaps": 4 * MIB + tail, "largest_gap": 4 * MIB}
    assert totals == expected | {"largest_free": 20 * MIB}


def test_torchs_own_reader_takes_these_snapshots_and_finds_the_same_sums():
    from torch.cuda import _memory_viz

    for shot in (snapshots.training(), snapshots.training(num_steps=1, num_layers=9, weights_before=False)):
        full = lives.segment_totals(shot, 0)
        text = _memory_viz.segsum(shot)
        totals = re.search(r"total_reserved: (.*)\ntotal_allocated: (.*)\ntotal_free: (\S*)", text).groups()
        sizes = (full["reserved"], full["used"], full["rounding"] + full["free"])
        assert totals == tuple(map(_memory_viz._format_size, sizes)) and full["used"] == snapshots.held(shot).end_bytes
        assert f"{len(shot['device_traces'][0])} entries" in _memory_viz.trace(shot)


# ---- names of places

TORCH, GPT2 = "/x/site-packages/torch", "/x/models/gpt2.py:45 forward"


@pytest.mark.parametrize(
    "stack, name",
    [
        (
            (f"{TORCH}/nn/functional.py:9 linear", GPT2, "/x/bench/training/worker.py:1 main"),
            "models/gpt2.py:45 forward",
        ),
        ((f"{TORCH}/optim/adamw.py:9 step", "<frozen runpy>:1 run"), "optim/adamw.py:9 step (torch)"),
        (("/tmp/torchinductor/ab/cabc.py:33 call", GPT2), "compiled cabc.py:33 call"),
        (("??:0 malloc", "/x/c10/cuda/CUDACachingAllocator.cpp:0 alloc"), lives.NO_STACK),
        ((), lives.NO_STACK),
    ],
)
def test_a_place_is_the_innermost_line_outside_of_torch(stack, name):
    assert lives.Sites().of(frames(*stack)) == name


# ---- the page


def test_an_out_of_memory_says_when_it_was_the_gaps():
    gpu = Allocator()
    held = [gpu.alloc(4 * MIB, FORWARD) for _ in range(5)]
    gpu.free(held[1])
    gpu.free(held[3])
    gpu.oom(6 * MIB, device_free=1 * MIB, stack=FORWARD)
    html = page.document_of_snapshot(gpu.snapshot(speedrun={"where": "step 3", "limit_bytes": 80 * MIB}), "oom").html()
    assert "where step 3, limit 80.0 MiB" in html
    assert "Out of memory: 6.0 MiB were asked for, 1.0 MiB were free on the GPU" in html
    assert "8.0 MiB are free, 4.0 MiB of them in one piece. It is in pieces too small: try PYTORCH_ALLOC_CONF=" in html
    facts = page.document_of_snapshot(gpu.snapshot(), "oom").data["devices"][0]
    assert facts["ooms"] == [{"size_bytes": 6 * MIB, "device_free_bytes": 1 * MIB}]


def test_an_empty_snapshot_has_a_page():
    empty = page.document_of_snapshot({"segments": [], "device_traces": [[], []]}, "nothing")
    assert "The snapshot is empty" in empty.html()


def test_nothing_in_a_snapshot_becomes_markup():
    nasty = "<script>alert(1)</script>\"&'"
    gpu = Allocator()
    gpu.alloc(1 * MIB, [{"filename": f"{nasty}.py", "line": nasty, "name": nasty}])
    about = {"what": nasty, "window": nasty, "marks": [[gpu.now_us, nasty], [1.5], "x"]}
    html = page.document_of_snapshot(gpu.snapshot(speedrun=about, allocator_settings={nasty: nasty}), nasty).html()
    assert "<script>alert" not in html and "&lt;script&gt;alert(1)" in html
    assert "http://" not in re.sub(r"https?://www\.w3\.org/\S*", "", html)


@needs_browser
def test_the_page_opens_offline_in_light_and_dark_and_shows_the_peak_and_its_places(tmp_path):
    path = saved(tmp_path, snapshots.training())
    assert cli.main([str(path)]) == 0
    with Browser() as browser:
        for dark in (False, True):
            shown = browser.open(path.with_suffix(".html"), dark=dark)
            shown.until("document.querySelectorAll('.chart canvas').length === 3")
            assert shown.errors == []
            assert all(url.startswith(("file:", "data:")) for url in shown.requests)
            assert "Who held memory" in shown.text and "models/gpt2.py:45 forward" in shown.text
            assert "42.0 MiB" in shown.text
            assert "free, whole segments" in shown.text
        shown = browser.open(path.with_suffix(".html"), width=390)
        assert shown.js("document.documentElement.scrollWidth") <= 390  # a phone: nothing sticks out


# ---- the verb


def test_the_verb_prints_the_largest_holders_and_as_json_the_bytes(tmp_path, printed):
    path = saved(tmp_path, snapshots.training())
    output = printed(cli, path, "--out", str(tmp_path / "out" / "page.html"))
    assert "device 0: largest 42.0 MiB, reserved 60.0 MiB" in output
    assert re.search(r"models/gpt2.py:12 __init__ +18.00", output)
    assert (tmp_path / "out" / "page.html").read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(ValueError, match="--out with --json: they cannot be combined"):
        cli.main([str(path), "--json", "--out", "x.html"])
    assert '"peak_bytes": 44041692' in printed(cli, path, "--json")


def test_of_a_run_all_snapshots_get_a_page_and_a_run_without_one_says_how_to_record_it(tmp_path, capsys):
    run = tmp_path / "run"
    (run / "memory").mkdir(parents=True)
    with pytest.raises(ValueError, match="no memory snapshot: record one on a GPU, instruments="):
        cli.main([str(run)])
    saved(run / "memory", snapshots.training())
    samples = '{"marks": [[1e15, "step 3"], [1.0e15, "end"]], "rss_bytes": [1048576, 3145728]}'
    (run / "memory" / "steps_rank1.rss.json").write_text(samples)
    (linked := next(run.rglob("*.pickle")).with_suffix(".html")).symlink_to(tmp_path / "new.html")
    with pytest.raises(ValueError, match="is a link, through which no page is written: remove it"):
        cli.main([str(run)])
    linked.unlink()
    assert cli.main([str(run)]) == 0 and not (tmp_path / "new.html").exists()
    assert sorted(path.name for path in (run / "memory").glob("*.html")) == ["steps_rank0.html", "steps_rank1.rss.html"]
    assert "resident set of the process" in capsys.readouterr().out
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "run.json").write_text("{}")
    (tmp_path / "theirs" / "memory").symlink_to(run / "memory")  # of a stranger's, to one of ours
    with pytest.raises(ValueError, match="a link leads to it, out of its record: name the file itself"):
        cli.main([str(tmp_path / "theirs")])
    with pytest.raises(ValueError, match="there are 2 snapshots; name one"):
        cli.main([str(run), "--out", "x.html"])


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"marks": [[1, "a"]], "rss_bytes": []}', '{"marks": [], "rss_bytes": []}']
)
def test_samples_that_are_none_are_refused(tmp_path, text):
    path = tmp_path / "x.rss.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x.rss.json: (is not|lacks|expected|holds no samples)"):
        pickles.load_rss(path)


MIB = 2**20


CALL = ("torch/nn/modules/module.py:1780 _call_impl", "torch/nn/modules/module.py:1769 _wrapped_call_impl")
STEP = "bench/training/trainer.py:85 step"
INNER = "models/gpt2.py:45 forward"
LINEAR = ("torch/nn/modules/linear.py:125 forward", *CALL)
FORWARD = snapshots.frames(*LINEAR, INNER, *CALL, "elsewhere/net.py:40 forward", *CALL, STEP)
BUILD = snapshots.frames("torch/nn/modules/linear.py:100 __init__", "elsewhere/net.py:12 __init__", STEP)
STATE = snapshots.frames("torch/optim/adamw.py:150 _init_group", "torch/optim/adamw.py:220 step", STEP)
BACKWARD = snapshots.frames("torch/autograd/__init__.py:360 backward", "torch/_tensor.py:630 backward", STEP)


def trained(with_marks, backward=()):
    """Weights of 8 MiB, activations of 6 and a piece of 1 that forward frees, gradients of 8, state of 16."""
    gpu, marks = snapshots.Allocator(segment_bytes=64 * MIB), []

    def mark(name):
        marks.append([gpu.now_us, name])

    gpu.alloc(8 * MIB, BUILD)
    mark("step 1"), mark("forward")
    kept = gpu.alloc(6 * MIB, FORWARD)
    gpu.free(gpu.alloc(MIB, FORWARD))
    mark("backward")
    gradient = gpu.alloc(8 * MIB, backward)
    gpu.free(gpu.alloc(2 * MIB, backward))
    gpu.free(kept)
    mark("optimizer")
    gpu.alloc(16 * MIB, STATE)
    gpu.free(gpu.alloc(3 * MIB, STATE))
    mark("step 2"), mark("forward")
    gpu.free(gradient)
    return gpu.snapshot(**({"speedrun": {"marks": marks}} if with_marks else {}))


@pytest.mark.parametrize("with_marks", [True, False])
@pytest.mark.parametrize("backward", [(), BACKWARD])
def test_each_piece_of_memory_is_counted_under_its_use(with_marks, backward):
    snapshot = trained(with_marks, backward)
    (device,) = lives.devices(snapshot)
    allocations = lives.from_snapshot(snapshot, device)
    held = lives.held_by(allocations, lives.Uses(allocations).of)
    mib = {use: num_bytes / MIB for use, (_, num_bytes) in held.allocated.items()}
    assert mib == {"parameters": 8, "activations": 6, "gradients": 8, "optimizer state": 16, "temporary": 1 + 2 + 3}
    assert held.peak_bytes == (8 + 8 + 16 + 3) * MIB  # activations are gone when the optimizer works
    expected = {"parameters": 8, "gradients": 8, "optimizer state": 16, "temporary": 3}
    assert {use: num_bytes / MIB for use, num_bytes in held.at_peak.items()} == expected


def test_weights_and_state_of_before_the_recording_are_known_by_the_stacks_of_their_blocks():
    gpu = snapshots.Allocator()
    gpu.recording = False
    gpu.alloc(4 * MIB, BUILD), gpu.alloc(5 * MIB, STATE), gpu.alloc(MIB)
    gpu.recording = True
    gpu.free(gpu.alloc(MIB, FORWARD))
    allocations = lives.from_snapshot(gpu.snapshot(), 0)
    held = lives.held_by(allocations, lives.Uses(allocations).of)
    initial = {"parameters": 4 * MIB, "optimizer state": 5 * MIB, "other": MIB}  # the last has no stack: not guessed
    assert held.initial == initial


def test_the_page_and_the_facts_show_uses():
    snapshot = trained(with_marks=True)
    document = page.document_of_snapshot(snapshot, "x")
    html, (facts,) = document.html(), document.data["devices"]
    assert "What memory was for" in html and "Judged from where" in html and 'data-chart="memory-use-0"' in html
    assert facts["uses_at_peak"]["optimizer state"] == 16 * MIB
