"""A step on more GPUs: links, the parts of the step, records and traces, and the table of errors that docs/ shows."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import traces

from bench.analysis.projection import document, links, pairs, projected
from bench.analysis.projection.projected import Message, Step, expected_maximum, project
from bench.api import traces as api
from bench.cli import main
from bench.record import run_folder

REPO = Path(__file__).resolve().parent.parent
RECORD = REPO / "results" / "published" / "cpu_nano-gpt2-adamw"
NVLINK4 = links.Nccl("nvlink4")
# Figures of NVIDIA/nccl-tests#290: eight H100 of one node
NCCL_TESTS = """
 0: # nThread 1 nGpus 8 all_reduce_perf
 0: # Using devices
{ranks}
 0: #                                                              out-of-place                       in-place
 0: #       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
 0: #        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
 0:    134217728      33554432     float     sum      -1    613.3  218.85  382.99      0    614.3  218.48  382.34      0
 0:    268435456      67108864     float     sum      -1   1139.2  235.63  412.35      0   1134.8  236.56  413.97      0
 0: # Out of bounds values : 0 OK
""".format(
    ranks="\n".join(f" 0: #  Rank {rank:2} Group  0 Pid 1 on node device  {rank} NVIDIA H100" for rank in range(8))
)


class Constant:
    """A link on which every message takes two milliseconds."""

    name = source = "constant"

    def seconds(self, collective, num_bytes, num_gpus, num_nodes):
        return 0.002 if num_gpus > 1 else 0.0


def published():
    return next(folder for folder in sorted(RECORD.rglob("run.json"))).parent


# ---- links


@pytest.mark.parametrize(
    ("link", "collective", "num_bytes", "num_gpus", "num_nodes", "seconds"),
    [
        # among 8: Simple, 8.4 us + 7 hops of 3.4 us, 7/8 of the bytes at 18 * 20.6 GB/s
        (NVLINK4, "all_gather", 80e6, 8, 1, 32.2e-6 + 70e6 / 370.8e9),
        # a small one among 8: LL on a tree, 6.8 us + 14 hops of 0.6 us; on a ring it is 6.6 us + the same
        (NVLINK4, "all_reduce", 800, 8, 1, 15.0e-6 + 1400 / 141e9),
        # 2 nodes of 2 GPUs, whose NICs carry the ring together: 94 GB/s; 3 hops, of which 1 leaves the node: Simple,
        # 8.4 + 2 * 3.4 + 14 us
        (links.Nccl("nvlink4", "ib400"), "all_gather", 4e9, 4, 2, 29.2e-6 + 3e9 / 94e9),
    ],
)
def test_a_message_takes_the_fastest_protocol_of_nccls_model(link, collective, num_bytes, num_gpus, num_nodes, seconds):
    assert link.seconds(collective, num_bytes, num_gpus, num_nodes) == pytest.approx(seconds, rel=1e-3)


def test_a_link_that_ends_at_a_node_is_refused_for_several():
    with pytest.raises(ValueError, match="name what joins 2 nodes too"):
        NVLINK4.seconds("all_gather", 4e9, 4, 2)


def test_printed_tables_of_nccl_tests_are_read_and_lines_lie_between_their_sizes(tmp_path):
    (tmp_path / "log.txt").write_text(NCCL_TESTS)
    curve = links.read(str(tmp_path / "log.txt"), 1)
    assert curve.seconds("all_reduce", 134217728, 8, 1) == pytest.approx(613.3e-6)
    assert curve.seconds("all_reduce", 2**27 * 2**0.5, 8, 1) == pytest.approx((613.3e-6 * 1139.2e-6) ** 0.5)
    assert curve.seconds("all_reduce", 2**29, 8, 1) == pytest.approx(2 * 1139.2e-6)  # at the last one's bandwidth
    assert curve.seconds("all_reduce", 8, 8, 1) == pytest.approx(613.3e-6)  # never less than was measured
    assert curve.seconds("all_gather", 134217728, 8, 1) == pytest.approx(613.3e-6 / 2)  # half of an all-reduce
    with pytest.raises(ValueError, match="tables are of 8 GPUs, none of 4"):
        curve.seconds("all_reduce", 8, 4, 1)


def test_a_passport_has_collectives_as_bus_bandwidth():
    figure = {"name": "all_reduce", "num_bytes": 2**30, "world_size": 2, "value": 2.0}
    rows = list(links._passport_rows({"collectives": [figure, figure | {"name": "broadcast"}]}))
    assert rows == [("all_reduce", 2, 2**30, 0.5)]  # a bus factor of 1 for two ranks


@pytest.mark.parametrize(
    "link, sentence",
    [
        ("nvlink9", "neither a file nor one of nvlink3"),
        ("ib400", "one link in a node"),
        ("nvlink3,nvlink4", "one link in a node"),
    ],
)
def test_a_link_that_is_none_is_refused(link, sentence):
    with pytest.raises(ValueError, match=sentence):
        links.read(link, 2)


def test_a_file_without_a_table_is_refused(tmp_path):
    (tmp_path / "log.txt").write_text(re.sub("# *Rank.*", "", NCCL_TESTS))
    with pytest.raises(ValueError, match="no table of nccl-tests with its # Rank lines"):
        links.read(str(tmp_path / "log.txt"), 1)


# ---- the parts of a step


def test_the_largest_of_eight_normal_values_is_tippetts():
    assert [round(expected_maximum(count), 4) for count in (1, 2, 8, 100)] == [0.0, 0.5642, 1.4236, 2.5076]


def test_work_is_divided_and_the_rest_is_not():
    step = Step(100.0, 1, [Message("all_reduce", 1.0)], replicated_ms=10.0)
    projection = project(step, 4, 1, Constant(), "strong")
    assert (projection.work_ms, projection.replicated_ms, projection.exposed_ms) == (22.5, 10.0, 2.0)
    assert projection.ms == 34.5
    assert project(step, 4, 1, Constant(), "weak").ms == 102.0


def test_messages_beside_the_backward_pass_are_exposed_for_what_is_left_at_its_end():
    step = Step(100.0, 1, [Message("all_reduce", 1.0, 4, is_beside=True)], backward_ms=24.0, num_micro=2)
    # of two GPUs: one micro-batch, whose backward pass takes 12 ms: ready at 3, 6, 9, 12 ms, the last done at 14 ms
    assert project(step, 2, 1, Constant(), "strong").exposed_ms == pytest.approx(2.0)
    # of eight: a quarter of a micro-batch, 3 ms: ready at 0.75 ms ..., done at 8.75 ms
    assert project(step, 8, 1, Constant(), "strong").exposed_ms == pytest.approx(5.75)


def test_a_projection_to_what_was_measured_gives_what_was_measured():
    for pair in pairs.PAIRS:
        if pair.projected_ms is None:
            curve, step = links.read(pair.link, pair.num_nodes), replace(pair.step, spread_ms=0.1)
            same = project(step, step.num_gpus, step.num_nodes, curve, pairs.scaling_of(pair.kind))
            assert same.ms == pytest.approx(step.ms)


def test_the_slowest_of_many_is_waited_for():
    step = Step(100.0, 1, spread_ms=1.0)
    assert project(step, 8, 1, Constant(), "weak").slowest_ms == pytest.approx(1.4236, abs=1e-4)
    # an eighth of the work: chance adds up like the square root
    assert project(step, 8, 1, Constant(), "strong").slowest_ms == pytest.approx(1.4236 / 8**0.5, abs=1e-4)


def test_four_processes_on_two_cores_are_as_slow_as_two():
    step = Step(100.0, 1, replicated_ms=10.0, slots=2)
    two, four = (project(step, count, 1, Constant(), "strong") for count in (2, 4))
    assert (two.work_ms, four.work_ms) == (45.0, 45.0)
    assert (two.replicated_ms, four.replicated_ms) == (10.0, 20.0)


def test_messages_that_take_longer_than_the_step_are_refused():
    step = Step(1.0, 2, [Message("all_reduce", 1.0)])
    with pytest.raises(ValueError, match="messages alone would take 2 of the 1 ms that were measured"):
        project(step, 4, 1, Constant(), "strong")


# ---- what it was checked on


def test_no_pair_of_records_is_further_off_than_the_aim_and_each_kind_beats_dividing():
    by_kind = {}
    for error in pairs.errors():
        by_kind.setdefault(error.pair.kind, []).append(error)
    for kind, limit_pct in (("node", 5.0), ("nodes", 10.0)):
        worst, dividing = by_kind[kind][0].error_pct, max(abs(error.baseline_pct) for error in by_kind[kind])
        assert abs(worst) < limit_pct and abs(worst) < dividing


@pytest.mark.parametrize("kind", ["node", "nodes", "trace"])
def test_leaving_a_pair_out_the_others_interval_holds_it_unless_it_is_the_worst(kind):
    errors = [error for error in pairs.errors() if error.pair.kind == kind]
    outside = [
        error
        for error in errors
        if abs(error.projected_ms - error.pair.measured_ms)
        > error.projected_ms * max(abs(other.error_pct) for other in errors if other is not error) / 100
    ]
    assert len(outside) <= 1


def test_the_table_in_the_documentation_is_what_the_command_prints(printed):
    table = [line for line in printed(main, "project", "--errors", "--md").splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(pairs.PAIRS)
    page = (REPO / "docs" / "profiling.md").read_text().splitlines()
    first = page.index(table[0])
    assert page[first : first + len(table)] == table


def profiles(ranks):
    paths = [traces.SHARED / "files" / "modded_8xh100" / f"rank{rank}.json.gz" for rank in ranks]
    return paths if paths[0].exists() else pytest.skip("no shared traces")


@pytest.mark.parametrize("ranks", [(2, 3, 6, 7), (4, 5, 6, 7)])
def test_a_profile_of_eight_ranks_cut_to_four_gives_the_errors_that_are_kept(ranks):
    job, projection = projected.from_traces("x", profiles(ranks), 8, 1, NVLINK4)
    assert (round(job.step.ms, 3), round(projection.ms, 3)) == pairs.CUTS[ranks]
    assert "the 4 ranks without a trace are as fast as those with one" in job.assumed


def test_fewer_than_half_of_the_ranks_do_not_say_how_late_the_others_are():
    with pytest.raises(ValueError, match="3 of 8 ranks: how late the others come is unknown"):
        projected.from_traces("x", profiles([0, 1, 2]), 8, 1, NVLINK4)


def test_what_no_pair_is_like_is_not_checked():
    like = project(Step(400.0, 1, pairs.PREFIX), 8, 1, NVLINK4, "strong")

    def reason(kind="node", scaling="strong", device=pairs.H100, link="nvlink4", gpus=(1, 8), projection=like):
        errors, about = pairs.checked(kind, scaling, device, link, gpus, projection)
        return None if errors else about

    assert reason() is None
    assert "no pair with weak scaling" in reason(scaling="weak")
    assert "not of NVIDIA A100" in reason(device="NVIDIA A100")
    assert "not of an unknown device" in reason(device=None)
    assert "not by nvlink5" in reason(link="nvlink5")
    assert "begin at 8 GPUs" in reason("nodes", "weak", link="nvlink4+ib400", gpus=(1, 16))
    assert "end at 8 GPUs" in reason(gpus=(1, 16))
    assert "not to fewer" in reason(gpus=(8, 4))
    assert "steps of the pairs take" in reason(projection=replace(like, work_ms=3e4))
    assert "communication is exposed for" in reason(projection=replace(like, exposed_ms=20.0))


# ---- records and traces, as their users project them


def test_a_record_says_what_it_takes_for_granted_and_has_no_interval(tmp_path, monkeypatch):
    log = re.sub(r"# *Rank +[2-7].*", "#", NCCL_TESTS)
    (tmp_path / "log.txt").write_text(log)
    projection = api.project(published(), gpus=2, link=str(tmp_path / "log.txt"))
    facts = projection.to_dict()
    monkeypatch.setenv("SPEEDRUN_CWD", str(tmp_path))
    assert api.project(published(), gpus=2, link="log.txt").step_ms == projection.step_ms
    assert facts["measured"]["step_ms"] == run_folder.read(published())["metrics"]["step_avg_ms"]
    assert projection.interval_ms is None and "Not checked, so without an interval" in str(projection)
    assert facts["job"]["num_steps"] == 120
    assert facts["job"]["train_s"] == pytest.approx(120 * projection.step_ms / 1e3)
    assert sum(facts["parts"].values()) == pytest.approx(projection.step_ms)


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["--gpus", "8"], "a run on a CPU has no such link: name the file of a passport"),
        (["--gpus", "3", "--nodes", "2"], "as many in each"),
        (["--gpus", "0"], "as many in each"),
        ([], "--gpus N"),
    ],
)
def test_what_cannot_be_projected_is_one_sentence(options, sentence, capsys):
    assert main.main(["project", str(published()), *options]) == 2
    assert sentence in capsys.readouterr().err


def test_a_batch_must_divide():
    job = projected.from_record(published())
    with pytest.raises(ValueError, match="does not divide the 8 sequences of a step"):
        projected.check_batch(job, 3)
    projected.check_batch(job, 4)
    assert "micro-batches of 2 sequences take as long for each as those of 8" in job.assumed
    assert job.unlike == "micro-batches get smaller, from 8 to 2 sequences"


def test_traces_of_half_of_the_ranks_are_projected_as_json(answer_of):
    paths = profiles((4, 5, 6, 7))
    projection = answer_of(main, "project", *paths, "--gpus", "8")
    assert projection["scaling"] == "weak" and projection["device"] == pairs.H100 and projection["checked"]
    assert projection["low_ms"] == pytest.approx(projection["step_ms"] * (1 - projection["worst_error_pct"] / 100))
    with pytest.raises(ValueError, match="project the run's record"):
        api.project(*paths, gpus=8, scaling="strong")
    assert api.project(*paths, paths[0], gpus=8).to_dict()["step_ms"] == projection["step_ms"]  # each trace counts once
    with pytest.raises(ValueError, match="ranks: how late the others come is unknown"):
        api.project(*[paths[0]] * 4, gpus=8)


def test_a_trace_without_sizes_of_its_collectives_is_refused():
    folder = traces.SHARED / "files" / "param_dlrm_8rank"
    if not folder.exists():
        pytest.skip("no shared traces")
    with pytest.raises(ValueError, match="says of no collective how large it is"):
        api.project(folder, gpus=16, nodes=2, link="nvlink4,ib400")


def test_traces_that_cannot_be_timed_again_are_refused_for_the_right_reason(tmp_path):
    contrary, empty = "collectives come in orders that contradict each other", "its kernels have no duration"
    for orders, us, sentence in ((("AB", "BA"), 20, contrary), (("A", "A"), 0, empty)):
        for rank, names in enumerate(orders):
            calls = [traces.launched(f"nccl{name}", 30 * at + 5, us, 30 * at, at + 1) for at, name in enumerate(names)]
            traces.write(tmp_path / f"rank{rank}.json", sum(calls, []), distributedInfo={"rank": rank, "world_size": 2})
        with pytest.raises(ValueError, match=sentence):
            api.project(tmp_path, gpus=8)


def test_an_option_that_would_have_no_effect_is_refused(tmp_path, capsys):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "rank0.json").write_text("{}")
    run, trace = str(tmp_path), str(tmp_path / "rank0.json")
    for arguments, why in (
        ([trace, "--gpus", "8", "--usd-per-gpu-hour", "3"], "--usd-per-gpu-hour: a trace does not say"),
        (["--errors", run], "--errors: shows all pairs"),
    ):
        assert main.main(["project", *arguments]) == 2
        assert why in capsys.readouterr().err


def test_the_errors_worst_first_have_sources():
    data = document.table_of_errors().data
    assert [abs(line["error_pct"]) for line in data] == sorted((abs(line["error_pct"]) for line in data), reverse=True)
    assert all(line["source"].startswith(("KellerJordan/", "pytorch/", "this project")) for line in data)
