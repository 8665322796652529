"""Attackers in the sandbox: each is held, in bubblewrap and in our own namespaces, and in a script's run."""

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import real_runs
import scripted

from bench.data import shards
from bench.data.sources import datasets
from bench.launch.script import work_folder
from bench.machine import namespaces, processes, sandbox
from bench.machine.sandbox import BUBBLEWRAP, NAMESPACES, Limits
from bench.record import race_folder, verification

NO_LIMITS = Limits()


def works(kind):
    if sys.platform != "linux" or (kind == BUBBLEWRAP and not shutil.which("bwrap")):
        return False
    command, env = sandbox.command(["true"], os.environ, using=kind)
    return subprocess.run(command, env=env, capture_output=True).returncode == 0


needs_one = pytest.mark.skipif(not works(BUBBLEWRAP) and not works(NAMESPACES), reason="no sandbox works here")


@pytest.fixture(params=[BUBBLEWRAP, NAMESPACES])
def confined(request, tmp_path):
    """confined(code, limits) runs code in a sandbox where it may write to work/.  Returns (exit code, output, why)."""
    if not works(request.param):
        pytest.skip(f"{request.param} does not work here")
    work = tmp_path / "work"
    work.mkdir()

    def run(code, limits=NO_LIMITS, env=os.environ, readable=()):
        readable = [*sandbox.python_files(sys.executable), *readable]
        command = [sys.executable, "-I", "-S", "-c", code]
        command, env = sandbox.command(command, env, readable, {work: work}, limits, work, using=request.param)
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        watch, why = sandbox.Watch(process.pid, limits, work), None
        while process.poll() is None and not (why := watch.exceeded()):
            time.sleep(0.02)
        inside = processes.descendants(process.pid)
        process.kill()
        exit_code, out = process.wait(), process.communicate()[0]
        assert real_runs.wait_for(lambda: not any(map(processes.start_ticks, inside)), 10)  # nothing stays
        return exit_code, out, why

    run.work, run.kind = work, request.param
    return run


def test_nothing_of_the_system_can_be_written_and_no_other_file_is_seen(confined, tmp_path):
    secret = tmp_path / "id_rsa"
    secret.write_text("KEY")
    code = f"""
import os
for path in ({str(secret)!r}, "/etc/shadow", os.path.expanduser("~root/.ssh"), "/run", "/var", "/home"):
    assert not os.path.exists(path), path
for path in ("/usr/x", "/x", "/dev/x", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger"):
    try:
        open(path, "a")
    except OSError:
        continue
    raise SystemExit(f"{{path}} can be written")
open("mine", "w"), open({str(tmp_path / "x")!r}, "w")  # the second in memory
print(os.environ["HOME"], len([name for name in os.listdir("/proc") if name.isdigit()]) < 4)
"""
    assert confined(code) == (0, "/tmp/home True\n", None)
    assert [path.name for path in confined.work.iterdir()] == ["mine"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["id_rsa", "work"]


def test_it_reaches_no_network_but_its_own_loopback_and_gets_no_rights_anew(confined):
    with socket.create_server(("127.0.0.1", 0)) as ours:
        code = f"""
import ctypes, socket
with socket.create_server(("127.0.0.1", 0)) as own:
    socket.create_connection(own.getsockname(), timeout=5).close()
for address in (("127.0.0.1", {ours.getsockname()[1]}), ("192.0.2.1", 80)):
    try:
        socket.create_connection(address, timeout=5)
        print("reached", address)
    except OSError:
        pass
libc = ctypes.CDLL(None)
print(libc.unshare(0x10000000), libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), socket.gethostname())
"""
        assert confined(code) == (0, "-1 -1 localhost\n", None)


def test_of_a_link_to_an_interpreter_only_the_link_is_seen(confined, tmp_path):
    """uv puts such links into ~/.local/bin, beside ~/.local/share/keyrings."""
    link, key = tmp_path / "home/.local/bin/python3", tmp_path / "home/.local/share/keyrings/login"
    for path in (link, key):
        path.parent.mkdir(parents=True)
    link.symlink_to(os.path.realpath(sys.executable))
    key.write_text("KEY")
    environment = tmp_path / "environment"
    subprocess.run([link, "-m", "venv", "--without-pip", environment], check=True)
    for python in (link, environment / "bin/python"):
        readable = sandbox.python_files(str(python))
        code = f"import os, subprocess\nprint(os.path.exists({str(key)!r}), end=' ', flush=True)\n"
        code += f"subprocess.run([{str(python)!r}, '-c', 'import json, sys; print(sys.prefix)'], check=True)"
        prefix = environment if python != link else Path(os.path.realpath(link)).parent.parent
        assert confined(code, readable=readable) == (0, f"False {prefix}\n", None)


def test_links_of_a_strangers_folder_show_no_folder_around_it(tmp_path):
    """A cheat: an interpreter two levels below the user's folder, by links that git keeps."""
    clone = tmp_path / "clone"
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/up").symlink_to("../..")
    (clone / ".venv/bin/python").symlink_to("../up/clone/python")
    (clone / "python").write_text(f"#!/bin/sh\nexec {sys.executable}")
    (tmp_path / ".ssh").mkdir()
    (clone / ".venv/pyvenv.cfg").touch()
    (clone / ".venv/lib").symlink_to("../../.ssh")
    (clone / ".venv/include").mkdir()
    (clone / ".venv/lib64").symlink_to("include")  # as venv does
    files = sandbox.python_files(str(clone / ".venv/bin/python"))
    shown = list(map(os.path.realpath, files))
    assert str(clone / "python") in shown and not {str(tmp_path), str(tmp_path / ".ssh")} & set(shown)
    assert {str(clone / ".venv/include"), str(clone / ".venv/lib64")} <= set(files)


def test_what_a_script_sets_for_the_loader_and_for_caches_holds_inside_alone(confined, tmp_path, monkeypatch):
    """A cheat: a program outside of the sandbox, that which makes it, would obey LD_PRELOAD as well."""
    (tmp_path / ".ssh").mkdir()
    env = os.environ | {"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": str(tmp_path / "debug"), "OWN": "a b\n=c"}
    names, folder = ("LD_DEBUG", "OWN", "SANDBOXED_OWN"), str(tmp_path / ".ssh")
    code = f"import os\nprint([os.environ.get(name) for name in {names}], os.path.isdir({folder!r}))"
    seen = ["files", "a b\n=c", None]
    assert confined(code, env=env | {"HF_HUB_CACHE": str(tmp_path / ".ssh")}) == (0, f"{seen} False\n", None)
    assert not list(tmp_path.glob("debug*"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / ".ssh"))  # by the user
    assert confined(code, env=env)[1] == f"{seen} True\n"


def test_it_reaches_neither_the_users_keys_nor_the_machines_host(confined):
    code = f"""
import ctypes, errno, socket
libc = ctypes.CDLL(None, use_errno=True)
for number in {namespaces.REFUSED_CALLS}:
    assert libc.syscall(number, 0, -3, 0, 0) == -1
    print(errno.errorcode[ctypes.get_errno()], end=" ")
for family in (socket.AF_VSOCK, socket.AF_ALG):
    try:
        socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        print(errno.errorcode[error.errno], end=" ")
"""
    refused = "ENOSYS " * len(namespaces.REFUSED_CALLS)
    assert confined(code) == (0, f"{refused}EAFNOSUPPORT EAFNOSUPPORT ", None)


def test_it_leaves_no_program_that_others_could_run_with_its_owners_rights(confined):
    code = f"""
import ctypes, os
paths, bits = ("chmod", "fchmod", "call"), 0o6000
for path in paths:
    open(path, "w").write("x")
os.chmod(paths[0], 0o4755)
os.fchmod(os.open(paths[1], os.O_RDONLY), 0o2755)
fchmodat = min(number for number, place in {namespaces.MODE_CALLS}.items() if place == 2)
assert ctypes.CDLL(None).syscall(fchmodat, -100, paths[2].encode(), 0o6755, 0) == 0
for mode in (0o4705, 0o2705):
    for create in (  # of such a mode; an access control list could make it a program later
        lambda: os.open("made", os.O_CREAT | os.O_WRONLY, mode), lambda: os.mknod("made", mode | 0o100000),
        lambda: os.open(".", os.O_TMPFILE | os.O_RDWR, mode), lambda: os.open("made", os.O_CREAT, mode, dir_fd=3),
    ):
        try:
            create()
        except PermissionError:
            continue
        print("created")
if os.uname().machine == "x86_64":
    for number, name in ((85, "creat"), (133, "mknod")):
        assert ctypes.CDLL(None).syscall(number, b"made", 0o104705, 0) == -1, name
assert ctypes.CDLL(None).syscall(437, -100, b"chmod", ctypes.create_string_buffer(24), 24) == -1  # openat2
os.close(os.open("chmod", os.O_RDONLY, 0o6755))  # creates nothing
os.chmod(".", 0o750)
print([path for path in paths if os.stat(path).st_mode & bits], oct(os.stat(".").st_mode))
"""
    assert confined(code) == (0, "[] 0o40750\n", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "limits", "sentence"),
    [
        (
            "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
            Limits(num_processes=40),
            "processes and threads, and may have 40",
        ),
        ("held = []\nwhile True: held.append(b'x' * 2**24)", Limits(memory_gib=0.2), "GiB of memory, and may hold 0.2"),
        (
            "import mmap, time\nheld = mmap.mmap(-1, 2**28)\nfor at in range(0, 2**28, 4096): held[at] = 1\n"
            "time.sleep(99)",
            Limits(memory_gib=0.2),
            "GiB of memory, and may hold 0.2",
        ),
        (
            "import os, time\nfor _ in range(8): os.write(os.memfd_create('held'), b'x' * 2**25)\ntime.sleep(99)",
            Limits(memory_gib=0.2),
            "GiB of memory, and may hold 0.2",
        ),
        (
            "import time\nheld = []\nfor path in '/dev/shm/held', '/tmp/held':\n with open(path, 'wb') as file:\n"
            "  for _ in range(7): file.write(b'x' * 2**24)\n held.append(b'x' * 2**25)\ntime.sleep(99)",
            Limits(memory_gib=0.25),
            "GiB of memory, and may hold 0.2",
        ),
        (
            "for number in range(10**5): open(str(number), 'wb').write(b'x' * 2**16)\nwhile True: pass",
            Limits(disk_gib=0.01),
            "GiB, and may write 0.0",
        ),
        ("import os\nfor n in range(10**5): os.mkdir(str(n))\nwhile True: pass", Limits(num_files=99), "than 99 files"),
        (
            "import os\nfor _ in range(70): os.mkdir('x'); os.chdir('x')\nwhile True: pass",
            Limits(num_files=999),
            "/x: it has more than 64 folders within each other",
        ),
    ],
)
def test_what_takes_too_much_is_named(confined, code, limits, sentence):
    """Processes, memory, memory as files, disk, inodes."""
    if limits.num_processes and os.geteuid() == 0 and not (confined.kind == NAMESPACES and namespaces.HAS_OWN_PIDS):
        pytest.skip("root's processes are only counted here, too late for this machine")
    _, _, why = confined(code, limits)
    assert why is not None and sentence in why


def test_what_leaves_the_machine_no_memory_is_ended(confined, monkeypatch):
    """Closed files of memfd_create() that wait in a socket do so."""
    monkeypatch.setattr("bench.machine.environment.meminfo_gib", lambda name: 0.4)
    _, _, why = confined("import time; time.sleep(99)", Limits(memory_gib=10))
    assert why == "less than 0.5 GiB of this machine's memory are left"


def test_the_kernel_holds_cpu_time_and_the_size_of_a_file(confined):
    code = "import os\ntry: os.truncate(os.open('sparse', os.O_CREAT | 2), 2**42)\nexcept OSError: print('held')"
    assert confined(code, Limits(disk_gib=1.0)) == (0, "held\n", None)
    assert confined("while True: pass", Limits(cpu_s=1))[0] in (128 + 9, 128 + 24)  # SIGKILL, SIGXCPU


def test_a_daemon_ends_with_what_started_it(confined):
    code = "import subprocess\nsubprocess.Popen('setsid env -i sleep 321.5 & exit', shell=True).wait()"
    assert confined(code)[0] == 0
    assert real_runs.wait_for(lambda: b"321.5" not in b"".join(_command_lines()), 10)


def test_what_is_to_end_hears_of_it(confined):
    """The wrappers around it hand no signal on."""
    code = "import signal, time\nsignal.signal(15, lambda *_: (open('heard', 'w'), exit()))\n"
    code += "open('ready', 'w')\ntime.sleep(99)"
    command = [sys.executable, "-I", "-S", "-c", code]
    command, env = sandbox.command(
        command, os.environ, sandbox.python_files(sys.executable), {confined.work: confined.work}, None, confined.work,
        using=confined.kind,
    )  # fmt: skip
    with processes.child(command, confined.work, env, None, 20, sandbox.WRAPPERS):
        real_runs.wait_for((confined.work / "ready").exists, 30)
    assert (confined.work / "heard").exists()


def _command_lines():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()


@needs_one
def test_where_none_can_be_made_the_refusal_names_the_package():
    """Within a sandbox no further one can be made."""
    code = "from bench.machine import sandbox\nsandbox.kind()"
    command, env = sandbox.command(
        [sys.executable, "-c", code],
        {"PATH": os.defpath, "PYTHONPATH": str(real_runs.REPO)},
        [real_runs.REPO, *sandbox.python_files(sys.executable)],
        using=NAMESPACES if works(NAMESPACES) else BUBBLEWRAP,
    )
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert "Refused: no sandbox can be made here (" in done.stderr
    assert ("apt-get install bubblewrap" in done.stderr) == (not shutil.which("bwrap", path=os.defpath))


# ---- a script's run

SPY = """
import glob, json, os, socket, subprocess
run = os.path.dirname(os.getcwd())
found = {"variables": sorted(name for name in os.environ if "TOKEN" in name), "seen": []}
for path in PATHS + [f"{run}/run.json", f"{run}/../../ledger.jsonl"]:
    if os.path.exists(path):
        found["seen"].append(path)
    try:
        open(path, "a").write("x")  # at most in a folder of its own, or in memory
    except OSError:
        pass
for path in (f"{run}/logs/reading.log", f"{run}/.trace_rank0.raw.tmp", f"{run}/.rank0.facts.tmp", f"{run}/.reserve"):
    os.symlink(PATHS[0], path)
open(f"{run}/.rank0.profiled.tmp", "w").write(json.dumps([{"name": "trace", "raw": PATHS[0], "disturbed": [1, 2]}]))
(val,) = glob.glob("data/fineweb10B/*_val_*.bin")
tokens, kept = open(val, "rb").read()[1024:], 2 * (8192 + 1)
found["held_out"] = tokens != (tokens[:kept] * (len(tokens) // kept + 1))[: len(tokens)]
os.remove("helper.py")
os.mkfifo("helper.py")
try:
    socket.create_connection(("127.0.0.1", PORT), timeout=5)
    found["seen"].append("network")
except OSError:
    pass
subprocess.Popen("setsid env -i sleep 432.5 & exit", shell=True).wait()
deep = "deep"
for _ in range(300):
    os.mkdir(deep)
    deep += "/deep"
json.dump(found, open("found.json", "w"))
for step in range(4):
    end = f"val_loss:{6 - step / 3:.4f} " if step in (0, 3) else ""
    print(f"step:{step}/3 {end}train_time:{60 * step}ms step_avg:60.00ms")
    import time; time.sleep(0.06)
"""


@needs_one
def test_a_script_that_spies_finds_nothing_and_its_run_is_recorded(tmp_path):
    home, program = tmp_path / "home", tmp_path / "program"
    for folder in (home / ".ssh", program):
        folder.mkdir(parents=True)
    (home / ".ssh/id_rsa").write_text("KEY")
    (program / "helper.py").write_text("")
    (program / "notes").symlink_to("nowhere")  # cannot be mounted
    with socket.create_server(("127.0.0.1", 0)) as ours:
        paths = [str(home / ".ssh/id_rsa"), str(program / "train.py"), str(real_runs.REPO / "bench/__init__.py")]
        text = f"PATHS, PORT = {paths}, {ours.getsockname()[1]}\n{SPY}import helper\n"
        (program / "train.py").write_text(text.replace("import helper\n", "if not PORT: import helper\n"))
        env = {"HOME": str(home), "HF_TOKEN": "secret", "XDG_CACHE_HOME": str(tmp_path / "cache")}
        overrides = ["script.sandbox=true", "track=free", "goal.val_tokens=8192"]
        folder = scripted.run(tmp_path / "results", program / "train.py", *overrides, **env)
    run = real_runs.run_json(folder)
    spied = json.loads((folder / "work/found.json").read_text())
    assert spied == {"variables": [], "seen": [], "held_out": False}
    assert not any("shards" in doubt["doubt"] for doubt in run["doubts"] if "train" not in doubt["doubt"])
    assert run["status"] == "complete" and run["script"]["sandbox"] in (BUBBLEWRAP, NAMESPACES)
    assert (home / ".ssh/id_rsa").read_text() == "KEY" and (program / "train.py").read_text().endswith(
        "import helper\n"
    )
    assert not list(folder.glob(".*")) and not (folder / "logs/reading.log").exists()
    assert any("helper.py changed while it ran" in doubt["doubt"] for doubt in run["doubts"])
    assert verification.report(folder)["passed"]
    assert b"432.5" not in b"".join(_command_lines())


@pytest.mark.slow
@needs_one
def test_a_script_names_no_folder_as_its_cache_to_write_there(tmp_path):
    ours, script = tmp_path / ".ssh", tmp_path / "program" / "train.py"
    for folder in (ours, script.parent):
        folder.mkdir()
    line = "print(f'step:{step}/2 val_loss:{9 - step}.0 train_time:{step}ms step_avg:1ms')"
    tries = f"try: open({str(ours / 'key')!r}, 'w').write('x')\nexcept OSError as error: print(error)\n"
    script.write_text(f"{tries}for step in range(3): {line}\n")
    cache = f"script.env={{TRITON_CACHE_DIR: {ours}/{race_folder.CACHES}/../}}"
    words = ["track=free", "script.torchrun=false", "script.sandbox=true", cache]
    folder = scripted.run(tmp_path / "results", script, *words)
    assert not list(ours.iterdir()) and "No such file" in (folder / "logs/rank0.log").read_text()


@pytest.mark.slow
@needs_one
def test_a_strangers_record_of_a_sandboxed_script_is_replayed(tmp_path):
    """The replay as a whole runs in a sandbox, in which no other can be made."""
    line = "print(f'step:{step}/2 val_loss:{9 - step}.0 train_time:{step}ms step_avg:1ms')"
    (tmp_path / "train.py").write_text(f"for step in range(3): {line}\n")
    words = ["track=free", "script.torchrun=false", "script.sandbox=true"]
    folder = scripted.run(tmp_path / "theirs", tmp_path / "train.py", *words)
    (tmp_path / "train.py").unlink()
    done = real_runs.bench(tmp_path / "ours", "replay", str(folder), "--json", code=0)
    (certificate,) = json.loads(done.stdout)
    assert certificate["outcome"] == "identical" and certificate["sandbox"] in (BUBBLEWRAP, NAMESPACES)


@needs_one
def test_a_run_that_passes_a_limit_is_ended_and_says_which(tmp_path):
    (tmp_path / "train.py").write_text("import os, time\nfor n in range(10**4): open(str(n), 'w')\ntime.sleep(99)\n")
    overrides = [*scripted.TRACK, f"script={tmp_path / 'train.py'}", "script.sandbox=true"]
    with real_runs.started(
        tmp_path / "results", "run", *overrides, changed={"bench.machine.sandbox.MAX_FILES": 500}
    ) as process:
        out = process.communicate(timeout=60)[0]
    (folder,) = real_runs.folders(tmp_path / "results")
    failure = real_runs.run_json(folder)["failure"]
    assert (failure["kind"], failure["message"]) == ("over_limit", "it wrote more than 500 files"), out
    failed = [rule for rule in verification.report(folder)["rules"] if not rule["passed"]]
    assert [rule["rule"] for rule in failed] == ["is complete"] and not scripted.pids(tmp_path / "results")


@needs_one
def test_a_sandbox_that_would_let_in_more_than_the_scripts_own_is_refused(tmp_path):
    home = tmp_path / "home"
    (home / "program").mkdir(parents=True)
    for folder in (home, home / "program"):
        (folder / "train.py").write_text("")
    (home / "program/keys.json").symlink_to(home / "keys.json")
    (home / "keys.json").write_text("{}")
    for script, reason in ((home / "train.py", "could be read"), (home / "program/train.py", "keys.json leads out of")):
        words_typed = ["run", *scripted.TRACK, f"script={script}", "script.sandbox=true"]
        done = real_runs.bench(tmp_path / "results", *words_typed, HOME=str(home))
        assert done.returncode == 2 and reason in done.stderr, done.stderr


@pytest.mark.parametrize("root", ["data", "file/data"])
def test_what_a_script_in_a_sandbox_gets_of_the_validation_shards_ends_with_val_tokens(tmp_path, monkeypatch, root):
    """The audit of a keep validates on what is beyond them; a loader still finds as many tokens as there were."""
    (tmp_path / "file").touch()  # nothing can be written below it, even by root
    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path / root))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    val = [shards.write(tmp_path / f"val{number}.bin", range(10 * number, 10 * number + 6)) for number in (1, 2, 3)]
    val = tuple(datasets.ShardFile(shard.path, 6, shard.num_bytes, "", 40) for shard in val)
    dataset = datasets.Dataset("mine", 257, val, val)
    script = SimpleNamespace(raw_data=False, sandbox=True)
    paths = work_folder.shard_paths(script, dataset, "val", val_tokens=8)
    kept = [*range(10, 16), 20, 21, 22]
    tokens = [shards.check(path).tokens().tolist() for path in paths]
    assert tokens == [kept[:6], [20, 21, 22, 10, 11, 12], kept[:6]] and paths[0] == val[0].path
    made_in = tmp_path / ("data" if root == "data" else "cache/speedrun-data")
    assert {path.parent for path in paths[1:]} == {made_in}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match="SPEEDRUN_DATA=/path") if root != "data" else contextlib.nullcontext():
        assert work_folder.shard_paths(script, dataset, "val", val_tokens=8) == paths
    assert work_folder.shard_paths(script, dataset, "train", 8) == [shard.path for shard in val]
    audited = dataclasses.replace(dataset, is_audit=True)
    assert work_folder.shard_paths(script, audited, "val", 8) == [shard.path for shard in val]
    assert work_folder.shard_paths(script, dataset, "val", val_tokens=17) == [shard.path for shard in val]


@pytest.mark.slow
@needs_one
def test_a_script_that_is_ended_hears_of_it_in_its_sandbox(tmp_path):
    overrides = ["goal=budget", "goal.target_val_loss=null", "goal.time_budget_s=1", "script.dialect=modded-nanogpt"]
    run = scripted.odd(tmp_path, "goes_on", *overrides, "script.sandbox=true")
    assert run["status"] == "complete" and run["script"]["ended_at_step"]
    assert run["environment"]["python"]  # what it knew of itself when SIGTERM came


@needs_one
@pytest.mark.slow
def test_ranks_meet_in_a_sandbox_and_are_looked_at_there(tmp_path):
    overrides = ["hardware.num_processes=2", "hardware.num_threads=1", "script.sandbox=true", "look=on"]
    folder = scripted.run(tmp_path, scripted.MODDED, *overrides)
    run = real_runs.run_json(folder)
    assert (run["status"], run["look"]["status"], run["warnings"]) == ("complete", "recorded", [])
    assert run["script"]["opened"] and len(list(folder.glob("traces/look_rank*.pt.trace.json.gz"))) == 2
    assert not any("shards" in doubt["doubt"] or "changed" in doubt["doubt"] for doubt in run["doubts"])


@needs_one
@pytest.mark.slow
def test_arms_in_sandboxes_race_and_share_what_each_compiled(tmp_path):
    """Their compilers' caches are the race's, and nobody's own."""
    for arm in "ab":
        (tmp_path / arm).mkdir()
        keeps = "import os\nfor name in 'TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR':\n"
        keeps += "    if name in os.environ: open(os.path.join(os.environ[name], 'kept'), 'a').write('x')\n"
        keeps += "    else: print('none', name)\n"
        text = scripted.ODD.read_text().replace("WHAT = sys.argv[1]", "WHAT = 'well'")
        (tmp_path / arm / "train.py").write_text(text + keeps)
    own = str(tmp_path / "own_cache")
    arguments = [f"A=script={tmp_path}/a/train.py", f"B=script={tmp_path}/b/train.py", "script.sandbox=true", "n=2"]
    arguments += [*scripted.TRACK, "compilations=2", "--anyway"]
    done = real_runs.bench(tmp_path / "results", "race", *arguments, TORCHINDUCTOR_CACHE_DIR=own)
    runs = [real_runs.run_json(folder) for folder in real_runs.folders(tmp_path / "results")]
    assert {run["status"] for run in runs} == {"complete"} and len(runs) >= 4, done.stdout + done.stderr
    assert all(run["script"]["sandbox"] for run in runs) and not Path(own).exists()
    logs = [(folder / "logs/rank0.log").read_text() for folder in real_runs.folders(tmp_path / "results")]
    assert not any("none TORCHINDUCTOR" in log for log in logs)
