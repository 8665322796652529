"""A run over two nodes, started by hand on each: one record, one node's losses, and honest ends."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types

import hosts
import pytest
import real_runs

from bench.cli import main as program
from bench.config import schema
from bench.launch import ranks
from bench.launch.nodes import carried, facts, joining, leader, store
from bench.launch.nodes import member as member_module
from bench.machine import environment, gpus, leases
from bench.machine.signals import Interrupted
from bench.record import ledger

NODES = ("hardware.nodes=2", "hardware.num_threads=1")
SOON_LOST = {f"bench.launch.nodes.{module}.LOST_AFTER_S": 6.0 for module in ("store", "leader")}
SOON_LOST |= {"bench.launch.nodes.store.ALIVE_EVERY_S": 1.0}


@pytest.fixture
def pair(tmp_path):
    with hosts.Pair(tmp_path) as pair:
        yield pair


def command(pair, num_processes, *overrides, run=real_runs.SHORT):
    where = (f"hardware.num_processes={num_processes}", f"hardware.rendezvous={pair.rendezvous}")
    return ("bench", "run", *run, *NODES, *where, *overrides)


def only_record(pair):
    (folder,) = real_runs.folders(pair.results(0))
    assert real_runs.folders(pair.results(1)) == []
    assert not (pair.results(1) / carried.FOLDER).exists()
    return folder, real_runs.run_json(folder)


# ---- clocks and files


def test_the_offset_is_that_of_the_soonest_answer():
    now_ns = iter([0, 900, 1000, 1100, *range(2000, 2000 + 20 * 500, 500)])  # asked, back, asked, back ...
    other_ns = {0: 7000, 1: 6050}
    clock = facts.measured(
        lambda number: {"t_ns": other_ns.get(number, 9000), "utc_s": 50.0}, lambda: next(now_ns), lambda: 20.0
    )
    assert clock["round_trip_ns"] == 100
    assert clock["offset_ns"] == 6050 - 1050
    assert clock["utc_offset_s"] == pytest.approx(30.0, abs=1e-6)


def test_what_a_killed_node_left_is_cleared_by_the_next_command_and_no_other(tmp_path):
    names = ("mine", "killed", "foreign", "foreign-old")
    folders = {name: carried.folder_of(tmp_path, name, 1) for name in names}
    for name, folder in folders.items():
        carried.make(folder, {"config.yaml": "", "run.json": ""}, {})
        changes = {"killed": {"start_ticks": 1}, "mine": {}}.get(name, {"boot_id_hash": "of another machine"})
        owner = json.loads((folder / carried.OWNER).read_text()) | changes
        (folder / carried.OWNER).write_text(json.dumps(owner))
    for path in (folders["foreign-old"], *folders["foreign-old"].rglob("*")):
        os.utime(path, (0, 0))
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / carried.FOLDER).symlink_to(tmp_path / carried.FOLDER)
    carried.clear(tmp_path / "linked")
    assert all(folder.exists() for folder in folders.values())
    carried.clear(tmp_path)
    assert [name for name in names if folders[name].exists()] == ["mine", "foreign"]


@pytest.mark.parametrize("name", ["../run.json", "/etc/passwd", ".launch.tmp", "", "logs/../../x"])
def test_a_file_of_another_node_stays_in_the_record(tmp_path, name):
    with pytest.raises(ValueError, match="is not a file's name"):
        carried.Incoming(tmp_path, set()).add(name, b"x", is_last=True)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_node_overwrites_none_and_a_part_of_one_is_taken_back(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b"ours\n")
    incoming = carried.Incoming(tmp_path, set())
    for name, pieces in {"logs/rank1.log": (b"one", b"two"), "events.jsonl": (b"theirs\n",)}.items():
        for piece in pieces:
            incoming.add(name, piece, is_last=piece == pieces[-1])
    assert incoming.undo() is None
    with pytest.raises(ValueError, match="the record has this file already"):
        incoming.add("logs/rank1.log", b"three", is_last=False)
    incoming.add("logs/rank1.log", b"four", is_last=True)
    for name in ("logs/cut.log", "events.jsonl"):
        incoming.add(name, b"half", is_last=False)
        assert incoming.undo() == name
    assert (tmp_path / "logs" / "rank1.log").read_bytes() == b"onetwo" and not (tmp_path / "logs" / "cut.log").exists()
    assert (tmp_path / "events.jsonl").read_bytes() == b"ours\ntheirs\n"


def test_a_later_segment_continues_a_nodes_logs_and_replaces_its_other_files(tmp_path):
    for name in ("logs/rank1.log", "telemetry.node1.csv", "steps.csv"):
        carried.Incoming(tmp_path, set()).add(name, b"first\n", is_last=True)
    incoming = carried.Incoming(tmp_path, carried.of_earlier_segments(tmp_path))
    for name in ("logs/rank1.log", "telemetry.node1.csv"):
        incoming.add(name, b"second\n", is_last=True)
        with pytest.raises(ValueError, match="the record has this file already"):
            incoming.add(name, b"twice\n", is_last=True)
    with pytest.raises(ValueError, match="the record has this file already"):
        incoming.add("steps.csv", b"theirs\n", is_last=True)
    assert (tmp_path / "logs" / "rank1.log").read_bytes() == b"first\nsecond\n"
    assert (tmp_path / "telemetry.node1.csv").read_bytes() == b"second\n"


ALIKE = {"source_sha256": "a" * 64, "torch": "2.13.0", "python": "3.11.7", "data_sha256": ["b" * 64], "config_id": "c"}
ALIKE |= {"copy": f"{'9' * 32}-cpython-311", "seed": 0}


@pytest.mark.parametrize(
    "changed, sentence",
    [
        ({"source_sha256": "d" * 64}, f"code, {'d' * 12} instead of {'a' * 12}: check out the same commit"),
        ({"torch": "2.12.1"}, "torch, 2.12.1 instead of 2.13.0: install the same requirements.lock"),
        ({"torch": None}, "torch, none instead of 2.13.0"),
        ({"data_sha256": ["e" * 64]}, "the shards differ: ./run.sh data show"),
        ({"seed": 7}, "seed, 7 instead of 0: give the same seed= on every node"),
        ({"config_id": "f"}, "config, f instead of c: give the same settings"),
        ({"copy": f"{'8' * 32}-cpython-311"}, f"code, {'8' * 12} instead of {'9' * 12}: check out the same commit"),
    ],
)
def test_what_a_node_has_of_its_own_is_named_with_what_to_do(changed, sentence):
    assert sentence in facts.difference(ALIKE | changed, ALIKE)
    assert facts.difference(ALIKE | {"commit": "of documents only"}, ALIKE) is None


# ---- what the launchers tell each other, over a real store


@pytest.fixture
def met(monkeypatch):
    """(leader's store, member's store)"""
    for name, value in {"LOST_AFTER_S": 3.0, "ALIVE_EVERY_S": 0.2, "TICK_S": 0.05}.items():
        monkeypatch.setattr(store, name, value)
    monkeypatch.setattr(leader, "COLLECT_S", 1.0)
    listener = store.listen("127.0.0.1", [0])
    port = listener.getsockname()[1]
    leading = store.LeaderStore(listener, "key")
    member = store.MemberStore("127.0.0.1", [port], "key", 10.0)
    member.send("hello")
    assert wait_for_take(leading) == [(1, {"kind": "hello"})]
    yield leading, member
    member.close()
    leading.close()


def wait_for_take(leading):
    return real_runs.wait_for(leading.take, 5, every_s=0.02)


def leader_of(leading, folder):
    """A Leader whose run has ended, with one node that is to send its files."""
    created = object.__new__(leader.Leader)
    state = {"failures": [], "_lost": None, "_interrupted": None, "_own_is_known": False, "_bad_files": []}
    vars(created).update(_store=leading, _folder=folder, _group=None, _has_begun=True, **state)
    files = carried.Incoming(folder, set())
    where = {"folder": "/nowhere", "clock": {"offset_ns": 0}, "files": files, "has_ended": True}
    created._peers = {1: facts.Peer(1, 1, 1, 1, 0, {}, **where)}
    return created


def test_a_file_that_cannot_be_read_is_named_and_the_others_arrive(met, tmp_path, monkeypatch):
    leading, member = met
    for name in ("a.log", "b.log", "c.log"):
        (tmp_path / name).write_bytes(b"x" * 3)
    pieces = store._pieces

    def broken(path):
        for piece, is_last in pieces(path):
            yield piece, is_last and path.name != "b.log"
        if path.name == "b.log":
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(store, "_pieces", broken)
    member.send_files({f"logs/{name}": tmp_path / name for name in ("a.log", "b.log", "gone.log", "c.log")})
    member.send("left", why="it ended")
    leading_run = leader_of(leading, tmp_path / "record")
    leading_run._collect()
    assert sorted(path.name for path in (tmp_path / "record" / "logs").iterdir()) == ["a.log", "c.log"]
    first, second = leading_run._bad_files
    assert first == "node 1, logs/b.log: not in the record: Input/output error"
    assert second.startswith("node 1, logs/gone.log: not in the record: No such file")


@pytest.mark.parametrize("end, why", [("left", "it left"), (None, "it sent no part of a file for 1 s")])
def test_a_node_that_ends_while_its_files_travel_is_a_warning_and_no_cut_file(met, tmp_path, end, why):
    leading, member = met
    member._put(lambda: member._push_piece(b"half", name="logs/a.log", is_last=False))
    if end:
        member.send(end, why="it ended")
    run = {"warnings": [], "nodes": []}
    leading_run = leader_of(leading, tmp_path)
    leading_run._collect()
    leading_run.complete(run)
    assert not (tmp_path / "logs" / "a.log").exists()
    cut, lost = (warning["error"] for warning in run["warnings"])
    assert cut == "node 1, logs/a.log: not in the record: only a part of it arrived"
    assert lost.startswith("node 1 was lost after its ranks had ended") and lost.endswith(why)


@pytest.mark.parametrize(
    "message",
    [{"kind": "piece", "name": "logs/a.log", "is_last": True}, {"kind": "ended", "ends": [[1, float("inf")]]}]
    + [{"kind": "ready", "folder": "/run"}, {"kind": "ended", "ends": 3}, {"kind": "interrupted"}],
)
def test_a_message_that_makes_no_sense_is_a_lost_node(met, tmp_path, message):
    leading, member = met
    leading_run = leader_of(leading, tmp_path)
    leading_run._peers[1].files = None  # no run has begun
    member.send(**message)
    real_runs.wait_for(lambda: leading_run._take(0.0) or leading_run._lost, 5, every_s=0.02)
    assert leading_run._lost == f"node 1, rank 1 is lost: its message '{message['kind']}' is malformed"


def test_a_node_that_does_not_say_what_it_is_is_refused(met, tmp_path):
    leading, member = met
    member.send("hello", node=float("inf"), facts=None)
    leading_run = leader_of(leading, tmp_path)
    with pytest.raises(ValueError, match="a node cannot join: its first message is malformed"):
        real_runs.wait_for(leading_run._join, 5, every_s=0.02)


def waiting(member):
    """A Member that has said hello."""
    created = member_module.Member.__new__(member_module.Member)
    vars(created).update(_store=member, _waiting=[], _group=None)
    return created


@pytest.mark.parametrize(
    "kind, why",
    [("stop", "the run ended before it began"), ("bye", "the run ended before it began"), ("refuse", "starts no run")],
)
def test_what_ends_a_run_that_has_not_begun_is_a_refusal(met, kind, why):
    leading, member = met
    leading.tell(1, kind)
    with pytest.raises(member_module.Refused, match=why):
        waiting(member)._wait_for("start")


class _ClosedGroup:
    """Ranks that have ended; their guard's pipe is closed with the block."""

    def __init__(self, *args):
        self.is_open = True

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.is_open = False

    def stop(self):
        if not self.is_open:
            raise ValueError("write to closed file")

    def has_ended(self, within_s):
        return True

    def ends(self):
        return []


@pytest.mark.parametrize("are_ready", [False, True])
def test_a_group_is_stopped_once_and_a_signal_on_a_member_after_it_stops_nothing(met, tmp_path, monkeypatch, are_ready):
    leading, member = met
    hardware = types.SimpleNamespace(nodes=2, num_processes=2, ranks_of_node=1)
    run = leader_of(leading, tmp_path)
    run._peers[1].facts = {"environment": {}, "address": "127.0.0.1"}
    run._peers[1].has_ended = are_ready
    job = types.SimpleNamespace(config=types.SimpleNamespace(hardware=hardware))
    vars(run).update(_has_begun=False, _job=job, _adopted=None, _own_ranks=1, _stack=contextlib.ExitStack())
    monkeypatch.setattr(run, "_are_ready", lambda folder: are_ready)
    monkeypatch.setattr(run, "_start_members", lambda folder, place: None)
    monkeypatch.setattr(leader.ranks, "Group", _ClosedGroup)
    with run.started(tmp_path, {}, None, survives=False):
        assert (run._group is not None) == are_ready
    if not are_ready:
        assert arrived(member) == {"kind": "stop"}
    assert member.arrived() is None and run._bad_files == []  # no files were asked for
    member.send("interrupted", signal="SIGTERM")
    real_runs.wait_for(lambda: run._take(0.02) or run._interrupted, 5, every_s=0)
    assert run._interrupted == "node 1, rank 1 got SIGTERM"


@pytest.mark.slow
def test_a_clock_that_nobody_tells_is_a_refusal(met):
    _, member = met
    inputs = {"kind": "inputs", **INPUTS}
    node = waiting(member)
    node._waiting = [inputs]
    with pytest.raises(member_module.Refused, match=r"did not send its clock \(it does not answer\)"):
        node._make_folder(types.SimpleNamespace())
    assert arrived(member) == {"kind": store.GONE, "why": "it sent nothing for 3 s"}


def test_ranks_are_not_told_the_launchers_secret(monkeypatch):
    monkeypatch.setenv(store.KEY, "theirs")
    assert store.KEY not in ranks.environment(schema.HardwareConfig(device="cpu", num_processes=1, num_threads=1))


def stranger(leading):
    return store._opened("127.0.0.1", leading._whole.port, "key", is_master=False)[1]


@pytest.mark.parametrize("value", [b"{", b'{"kind": "bye"}', b"x" * 40, b"[" * 100_000])
def test_what_a_stranger_writes_is_a_lost_node_on_either_end_and_no_exception(met, value):
    leading, member = met
    other = stranger(leading)
    for number in (0, 7, 1):
        other.queue_push("inbox", number.to_bytes(4, "big") + value)
    other.queue_push("inbox", value)
    assert wait_for_take(leading) == [(1, {"kind": store.GONE, "why": store.NOT_VERIFIED})]
    assert leading.take() == [] and leading.members == []
    other.queue_push("to/1", value)
    assert arrived(member) == {"kind": store.GONE, "why": store.NOT_VERIFIED}


def test_a_message_that_a_stranger_takes_or_repeats_is_a_lost_node(met):
    leading, member = met
    member.send("one")
    real_runs.wait_for(lambda: leading._store.queue_len("inbox"), 5, every_s=0)
    value = stranger(leading).queue_pop("inbox", False)
    if b'"kind": "one"' in value:  # not a sign of life
        member.send("two")
    assert wait_for_take(leading) == [(1, {"kind": store.GONE, "why": store.NOT_VERIFIED})]


def test_a_count_that_a_stranger_writes_keeps_nobody_busy(met):
    leading, _ = met
    stranger(leading).set("members", "9" * 15)
    began_s = time.monotonic()
    assert leading.take() == []
    assert time.monotonic() - began_s < 2.0


def arrived(member):
    return real_runs.wait_for(member.arrived, 5, every_s=0)


def test_a_message_verifies_with_the_same_secret_session_and_number_alone():
    def channel(key="key", secret="secret", sessions=(b"a", b"b"), own="a", other="b"):
        return store.Channel(key, secret, sessions, own, other)

    first, second = (made := channel(own="b", other="a")).closed({"kind": "one"}, b"xy\n"), made.closed({"kind": "two"})
    same = channel()
    assert same.opened(first) == {"kind": "one", "data": b"xy\n"} and same.opened(second) == {"kind": "two"}
    odd = [channel(secret="other"), channel(sessions=(b"c", b"b")), channel(sessions=(b"a", b"c")), channel(key="k")]
    for other, value in [*((channel, first) for channel in odd), (same, second), (channel(), second)]:
        with pytest.raises(ValueError, match="signature of a message is wrong"):
            other.opened(value)


def test_a_node_with_another_secret_is_refused_in_a_sentence(monkeypatch):
    listener = store.listen("127.0.0.1", [0])
    port = listener.getsockname()[1]
    with leader.Leader(listener, "key", 1, None, secret="mine") as leading:
        monkeypatch.setenv(store.KEY, "theirs")
        member = store.MemberStore("127.0.0.1", [port], "key", 10.0)
        member.send("hello", num_ranks=1, local_rank=0)
        with pytest.raises(ValueError, match=f"cannot join: .* set {store.KEY} alike on every node"):
            while True:
                leading._join()
        assert arrived(member) == {"kind": store.GONE, "why": store.NOT_VERIFIED}
        member.close()


def listening(num_members=1):
    listener = store.listen("127.0.0.1", [0])
    port = listener.getsockname()[1]
    return leader.Leader(listener, "key", num_members, None), lambda timeout_s: store.MemberStore(
        "127.0.0.1", [port], "key", timeout_s
    )


def refusal(why):
    raise ValueError(why)


def test_a_node_that_refuses_while_it_prepares_itself_is_heard_by_all_the_others():
    leading, reach = listening(2)
    why = "train.bin: sha256 8abe instead of a2e9: damaged or changed"
    with leading:
        other = reach(5.0)
        with pytest.raises(ValueError, match="8abe instead of a2e9"):
            member_module._take_part(reach, 5.0, "", lambda: refusal(why), {})
        with pytest.raises(ValueError, match=f"another node refuses: {why}"):
            while True:
                leading._join()
        assert arrived(other) == {"kind": "refuse", "why": f"another node refuses: {why}", "exit_code": None}
        other.close()


LEASE = "import sys; from bench.machine.leases import lease; print(lease(sys.argv[1]), flush=True); input()"


def test_a_node_whose_gpu_another_process_has_refuses_with_75_and_so_do_all_the_others(monkeypatch):
    own = gpus.Device(0, f"GPU-{os.getpid()}", 80.0, 0, frozenset())
    monkeypatch.setattr(gpus, "devices", lambda: [own])
    monkeypatch.setattr(member_module, "frozen", contextlib.nullcontext)
    hardware = types.SimpleNamespace(device="cuda", ranks_of_node=1)
    job = types.SimpleNamespace(code=real_runs.REPO, config=types.SimpleNamespace(hardware=hardware))
    leading, reach = listening(2)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", LEASE, own.name], cwd=real_runs.REPO, **pipes) as owner, leading:
        assert owner.stdout.readline() == "None\n"
        other = member_module.Member(reach(5.0), None, real_runs.REPO)
        why = f"GPU 0: process {owner.pid} of user {os.geteuid()} has it"
        with pytest.raises(leases.Busy, match=why) as refusal:
            member_module._take_part(reach, 5.0, "", lambda: job, {})
        with pytest.raises(leases.Busy, match=f"another node refuses: {why}") as on_node_zero:
            while True:
                leading._join()
        with pytest.raises(member_module.Refused, match=f"another node refuses: {why}") as elsewhere:
            other._wait_for("start")
        assert {error.value.exit_code for error in (refusal, on_node_zero, elsewhere)} == {75}
        other._store.close()
        owner.kill()
    assert own.name not in leases._held


def test_a_node_zero_that_refuses_is_heard_by_those_that_still_prepare_themselves():
    leading, reach = listening()
    with leading:
        member = reach(5.0)  # and has said nothing yet
        leading.refuse(ValueError("optim.lr=fast: it is no number"))
        assert arrived(member) == {"kind": "refuse", "why": "optim.lr=fast: it is no number", "exit_code": None}
        member.close()


def test_a_node_whose_clock_is_far_off_is_warned_of():
    peer = facts.Peer(1, 1, 1, 1, 0, {}, clock={"utc_offset_s": -300.0})
    assert facts.clock_fault(peer).startswith("node 1's clock is 300 s ahead of node 0's: set both by NTP")
    peer.clock = {"utc_offset_s": 0.2}
    assert facts.clock_fault(peer) is None


def test_a_signal_to_a_node_is_one_line_and_no_traceback(monkeypatch, capsys):
    def interrupted(self, where):
        raise Interrupted("SIGTERM")

    monkeypatch.setattr(member_module.Member, "run", interrupted)
    monkeypatch.setattr(member_module.Member, "__init__", lambda self, *args: None)
    assert member_module._take_part(lambda timeout_s: "a store", 1.0, "", None, {}) == 1
    assert capsys.readouterr().err == "run: SIGTERM ended this node's part of the run: node 0's record says so\n"


INPUTS = {"run_id": "20261121T031500Z-gpt2-adamw-1a2b3c4d-s0", "node": 1, "launch": {}}
INPUTS |= {"texts": {"config.yaml": "", "run.json": ""}}
GIVEN = f"{store.KEY},{leases.INHERITED}"


@pytest.mark.parametrize("exported, wanted", [("NONE", GIVEN), ("A,B=c", f"A,B=c,{GIVEN}"), ("ALL", "ALL")])
def test_srun_gives_its_tasks_the_key_and_the_leases(monkeypatch, exported, wanted):
    monkeypatch.setenv("SLURM_EXPORT_ENV", exported)
    monkeypatch.setenv("SLURM_LABELIO", "1")  # its output is read
    env = joining._exported({store.KEY: "secret"})
    assert (env["SLURM_EXPORT_ENV"], env[store.KEY]) == (wanted, "secret") and "SLURM_LABELIO" not in env
    assert environment.env_variables(env).keys().isdisjoint({store.KEY})


# ---- runs


@pytest.mark.slow
def test_two_nodes_make_one_record_with_the_losses_of_one(pair, ranks_run):
    per_node = 2
    for host in (0, 1):
        pair.start(host, *command(pair, 2 * per_node, "seed=5", "look=on"))
    (code, out), (other, other_out) = pair.end(0), pair.end(1)
    assert (code, other) == (0, 0), out + other_out
    folder, run = only_record(pair)
    look = run["look"]
    assert look["status"] == "recorded" and look["next"] and run["warnings"] == []
    assert all((folder / file).is_file() for file in look["files"])
    traces = {f"traces/look_rank{rank}.pt.trace.json.gz" for rank in range(2 * per_node)}
    assert traces <= set(look["files"]) and f"memory/look_rank{2 * per_node - 1}.html" in look["files"]
    assert real_runs.losses(folder) == real_runs.losses(ranks_run(2 * per_node))
    assert run["world_size"] == 2 * per_node and run["launched_by"] == {"by": "nodes", "job_id": None}
    first, second = run["nodes"]
    assert (first["ranks"], second["ranks"]) == (list(range(per_node)), list(range(per_node, 2 * per_node)))
    assert first["host_hash"] != second["host_hash"]
    assert abs(second["clock"]["offset_ns"]) < 5e6 and second["clock"]["round_trip_ns"] > 0
    assert second["fabric"]["interface"] == pair.links[1]
    assert (folder / "telemetry.csv").exists() and (folder / "telemetry.node1.csv").exists()
    assert f"node 1, rank {per_node}\n" in (folder / "logs" / f"rank{per_node}.log").read_text()
    assert json.loads((folder / "environment.node1.json").read_text())["packages"]["torch"]
    everything = "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())
    assert "10.99.0" not in everything.replace((folder / "logs" / "agent.log").read_text() or "\0", "")
    assert real_runs.bench(pair.results(0), "verify", str(folder)).returncode == 0


@pytest.mark.slow
def test_a_node_that_is_killed_is_named_and_nothing_stays(pair):
    for host in (0, 1):
        pair.start(host, *command(pair, 2, run=real_runs.ENDLESS))
    pair.wait_for_step(3)
    pair.processes[1].kill()
    code, out = pair.end(0)
    assert code == 1
    folder, run = only_record_of_failed(pair)
    assert (run["status"], run["failure"]["kind"]) == ("aborted", "node_lost"), out
    assert run["failure"]["message"].startswith("node 1, rank 1 is lost: ")
    assert pair.all_gone()
    # this machine sees the lost node's folder, as where results are shared; the next command there removes it
    assert "logs/rank1.log" in {file["path"] for file in run["artifacts"]} and (folder / "logs" / "rank1.log").exists()
    assert list((pair.results(1) / carried.FOLDER).iterdir())
    carried.clear(pair.results(1))
    assert not (pair.results(1) / carried.FOLDER).exists()


@pytest.mark.slow
def test_a_cable_that_is_cut_ends_both_sides(pair):
    for host in (0, 1):
        pair.start(host, *command(pair, 2, run=real_runs.ENDLESS), changed=SOON_LOST)
    pair.wait_for_step(3)
    pair.cut()
    code, out = pair.end(0, timeout_s=90)
    other, output = pair.end(1, timeout_s=90)
    assert (code, other) == (1, 2)
    _, run = only_record_of_failed(pair)
    assert run["failure"]["kind"] == "node_lost", out
    assert "node 0 is gone" in output
    assert pair.all_gone()


def only_record_of_failed(pair):
    (folder,) = real_runs.folders(pair.results(0))
    return folder, real_runs.run_json(folder)


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_sigterm_on_either_node_is_an_honest_abort(pair, host):
    for node in (0, 1):
        pair.start(node, *command(pair, 2, run=real_runs.ENDLESS))
    pair.wait_for_step(3)
    os.kill(pair.processes[host].pid, signal.SIGTERM)
    assert pair.end(0)[0] == 1
    pair.end(1)
    _, run = only_record_of_failed(pair)
    assert (run["status"], run["failure"]["kind"]) == ("aborted", "interrupted")
    assert run["failure"]["message"] == ("the launcher got SIGTERM", "node 1, rank 1 got SIGTERM")[host]
    assert pair.all_gone()


@pytest.mark.slow
def test_a_node_with_other_code_is_refused_on_both(pair, tmp_path):
    other = tmp_path / "checkout"
    subprocess.run(["git", "clone", "-q", "--shared", str(real_runs.REPO), str(other)], check=True)
    for name in ("bench", "models", "conf"):  # what is not committed yet too
        shutil.copytree(real_runs.REPO / name, other / name, dirs_exist_ok=True)
    model = other / "models" / "gpt2.py"
    model.write_text(model.read_text() + "\nCHANGED = 1\n")
    pair.start(0, *command(pair, 2))
    pair.start(1, *command(pair, 2), repo=other, SPEEDRUN_DATA=str(real_runs.REPO / ".data"))
    for host in (0, 1):
        code, out = pair.end(host)
        assert code == 2
        assert "a node has another code, " in out and "check out the same commit" in out
    assert not real_runs.folders(pair.results(0)) and not real_runs.folders(pair.results(1))
    assert pair.all_gone()


@pytest.mark.slow
def test_a_damaged_shard_on_one_node_is_said_on_both_at_once(pair, tmp_path):
    data = {host: tmp_path / f"data{host}" for host in (0, 1)}
    variables = {**os.environ, "SPEEDRUN_DATA": str(data[0])}
    run = tuple(override for override in real_runs.SHORT if not override.startswith("data="))
    subprocess.run(
        ["./run.sh", "data", "make", "markov"], cwd=real_runs.REPO, env=variables, check=True, capture_output=True
    )
    shutil.copytree(data[0], data[1])
    shard = next(path for path in data[1].rglob("*train*") if path.is_file() and path.suffix != ".json")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    began_s = time.monotonic()
    for host in (0, 1):
        pair.start(host, *command(pair, 2, "data=markov", run=run), SPEEDRUN_DATA=str(data[host]))
    for host in (0, 1):
        code, out = pair.end(host)
        assert code == 2 and "instead of" in out and "damaged or changed" in out, out
    assert time.monotonic() - began_s < 60
    assert not real_runs.folders(pair.results(0)) and pair.all_gone()


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_a_rendezvous_that_never_completes_says_so(pair, host):
    pair.start(host, *command(pair, 2, "hardware.rendezvous_timeout_s=3"))
    code, out = pair.end(host)
    assert code == 2
    wanted = ("1 of 2 nodes joined within 3 s", "no run answered there within 3 s")[host]
    assert wanted in out
    assert not pair.results(0).exists() or not real_runs.folders(pair.results(0))
    assert pair.all_gone()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (NODES, "hardware.nodes=2: where do they meet?"),
        ((*NODES, "hardware.rendezvous=here"), "hardware.rendezvous=here: use HOST:PORT"),
        (("hardware.rendezvous=a:1",), "give hardware.nodes=NUMBER"),
    ],
)
def test_nodes_without_a_place_to_meet_are_refused(results, capsys, settings, message):
    assert program.main(["run", *real_runs.SHORT, *settings]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_two_torchruns_on_two_nodes_are_one_run(pair):
    for host in (0, 1):
        launch = ("--nnodes=2", f"--node_rank={host}", "--nproc_per_node=1", "--master_addr=10.99.0.1")
        interface = {"GLOO_SOCKET_IFNAME": pair.links[host]}
        launch += ("--master_port=29700", f"--log_dir={pair.results(host)}.torchrun")
        torchrun = ("torch.distributed.run", *launch, "-m", "bench", "run")
        pair.start(host, *torchrun, *real_runs.SHORT, **interface)
    (code, out), (other, other_out) = pair.end(0), pair.end(1)
    assert (code, other) == (0, 0), out + other_out
    _, run = only_record(pair)
    assert run["launched_by"]["by"] == "torchrun" and [node["ranks"] for node in run["nodes"]] == [[0], [1]]


# ---- runs that survive

LASTS = ["track=free", *real_runs.SMALL, *real_runs.SLIGHT, "goal.num_steps=1200", "goal.val_every_steps=300"]
LASTS += ["goal.val_tokens=1024", "hardware=cpu", "hardware.num_threads=1", "instruments=[]"]
OFTEN = "checkpoint.every_min=0.002"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The folder of a run with the two ranks on one node."""
    results = tmp_path_factory.mktemp("unbroken")
    real_runs.bench(results, "run", *LASTS, "hardware.num_processes=2", code=0)
    (folder,) = real_runs.folders(results)
    return folder


def start_both(pair, *overrides):
    """Starts a run that survives on both hosts, which see one results folder."""
    for host in (0, 1):
        pair.start(host, *command(pair, 2, "resume=auto", *overrides, run=LASTS), SPEEDRUN_RESULTS=str(pair.results(0)))


def has_saved(pair, step):
    lines = ledger.read(pair.results(0)).lines
    return any(line["event"] == "checkpoint" and line["step"] > step for line in lines)


@pytest.mark.slow
def test_a_run_over_two_nodes_that_is_warned_and_loses_one_goes_on_as_one_record_to_the_bit(pair, unbroken):
    start_both(pair)
    pair.wait_for_step(100)
    os.kill(pair.processes[1].pid, signal.SIGUSR1)
    assert (pair.end(0)[0], pair.end(1)[0]) == (1, 1)
    start_both(pair, OFTEN)
    real_runs.wait_for(lambda: has_saved(pair, 400), timeout_s=240)
    pair.kill(1)
    assert (pair.end(0)[0], pair.end(1)[0]) == (1, -signal.SIGKILL)
    start_both(pair)
    (code, out), (other, other_out) = pair.end(0), pair.end(1)
    assert (code, other) == (0, 0), out + other_out
    (folder,) = real_runs.folders(pair.results(0))
    assert real_runs.losses(folder) == real_runs.losses(unbroken)
    run = real_runs.run_json(folder)
    parts = run["segments"]
    assert [part["status"] for part in parts] == ["preempted", "aborted", "complete"]
    assert parts[0]["reason"].startswith("the run got SIGUSR1") and "node 1" in parts[1]["reason"]
    assert sum(part["train_s"] for part in parts) == pytest.approx(run["metrics"]["train_s"], rel=1e-9)
    assert run["warnings"] == [] and not (folder / "checkpoint").exists()
    assert (folder / "logs" / "rank1.log").read_text().count("node 1, rank 1\n") == 3
    assert not (pair.results(0) / carried.FOLDER).exists()
    real_runs.bench(pair.results(0), "verify", str(folder), code=0)


@pytest.mark.slow
def test_a_run_that_survives_is_refused_where_the_nodes_share_no_folder(pair):
    for host in (0, 1):
        pair.start(host, *command(pair, 2, "resume=auto"))
    for host in (0, 1):
        code, out = pair.end(host)
        assert code == 2 and "has another results folder, but checkpoints need one that all nodes share" in out, out
        assert not real_runs.folders(pair.results(host)) and not (pair.results(host) / carried.FOLDER).exists()


@pytest.mark.slow
@pytest.mark.parametrize("may_shrink", [True, False])
def test_an_elastic_torchrun_that_loses_a_node_goes_on_with_the_other_where_the_track_allows(
    pair, unbroken, may_shrink
):
    track = real_runs.track_with(pair.base / "conf", "{may_shrink: true}" if may_shrink else "{}")
    for host in (0, 1):
        launch = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=r")
        launch += ("--rdzv-endpoint=10.99.0.1:29710", f"--local-addr={pair.addresses[host]}")
        launch += (f"--rdzv-conf=is_host={host == 0},last_call_timeout=20,keep_alive_interval=1",)
        launch += (f"--log-dir={pair.results(host)}.torchrun",)
        env = {"GLOO_SOCKET_IFNAME": pair.links[host], "SPEEDRUN_RESULTS": str(pair.results(0))}
        torchrun = ("torch.distributed.run", *launch, "-m", "bench", "run", *LASTS, *track, "resume=auto", OFTEN)
        pair.start(host, *torchrun, **env)
    real_runs.wait_for(lambda: has_saved(pair, 100) or pair.processes[0].poll(), timeout_s=240)
    pair.kill(1)
    code, out = pair.end(0)
    pair.end(1)
    assert code == 0, out
    first, *others = map(real_runs.run_json, real_runs.folders(pair.results(0)))
    if may_shrink:
        (folder,) = real_runs.folders(pair.results(0))
        assert [part.get("world_size") for part in first["segments"]] == [None, 1] and first["world_size"] == 2
        assert first["segments"][0]["status"] == "aborted" and first["status"] == "complete"
        ours, theirs = ([float(row[1] or 0) for row in real_runs.losses(path)] for path in (folder, unbroken))
        assert ours == pytest.approx(theirs, abs=0.005)  # training amplifies rounding
        real_runs.bench(pair.results(0), "verify", str(folder), code=0)
    else:
        assert (first["status"], first["failure"]["kind"], first["world_size"]) == ("aborted", "node_lost", 2)
        assert [(run["status"], run["world_size"]) for run in others] == [("complete", 1)]
