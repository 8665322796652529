"""Where it ran: facts without private names, GPUs through a stand-in for NVML, ids, code state, CPU meter."""

import errno
import functools
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import types
from importlib import metadata
from importlib.machinery import PathFinder

import pytest
from kept_records import COMPLETE, changed
from real_runs import git, wait_for

from bench.base import private
from bench.base.paths import REPO
from bench.config import schema
from bench.config.schema import HardwareConfig
from bench.launch import prepare, ranks
from bench.machine import code_state, environment, gpus, processes, surroundings
from bench.machine import meters as cpu_meter
from bench.machine.meters import CpuMeter
from bench.record import run_folder

UUIDS = ["GPU-aaaa1111-0000", "GPU-bbbb2222-0000", "GPU-bbbb3333-0000"]


def fake_nvml(names, fails=(), init_error=None, mig=False, processes=0, cuda_driver=12090):
    """A module like pynvml that shows these GPUs; calls named in fails raise NotSupported."""

    class NVMLError(Exception):
        pass

    handles = list(range(len(names)))
    values = {
        "Name": lambda handle: names[handle],
        "UUID": lambda handle: UUIDS[handle],
        "MemoryInfo": lambda handle: types.SimpleNamespace(total=80 * 2**30, used=2**30),
        "CudaComputeCapability": lambda handle: (9, 0),
        "PowerManagementLimit": lambda handle: 700_000,
        "PowerManagementDefaultLimit": lambda handle: 700_000,
        "MaxClockInfo": lambda handle, kind: {1: 1980, 2: 2619}[kind],
        "PersistenceMode": lambda handle: 1,
        "Temperature": lambda handle, sensor: 31,
        "CurrentClocksEventReasons": lambda handle: 0x1 | 0x4 | 0x800,
        "EccMode": lambda handle: [1, 0],
        "TotalEccErrors": lambda handle, kind, since: 3,
        "RemappedRows": lambda handle: (2, 1, 1, 0),
        "MigMode": lambda handle: [int(mig), 0],
        "CurrPcieLinkWidth": lambda handle: 16,
        "MaxPcieLinkWidth": lambda handle: 16,
        "ComputeRunningProcesses": lambda handle: [object()] * processes,
        "Count": lambda: len(handles),
        "HandleByIndex": lambda number: handles[number],
        "HandleByUUID": lambda uuid: ("slice", uuid),
        "DeviceHandleFromMigDeviceHandle": lambda handle: 1,
    }

    def call(name):
        def ask(*args):
            if name in fails:
                raise NVMLError("Not Supported")
            return values[name](*args)

        return ask

    def init():
        if init_error:
            raise NVMLError(init_error)

    module = types.ModuleType("pynvml")
    module.NVMLError, module.nvmlInit, module.nvmlShutdown = NVMLError, init, lambda: None
    module.nvmlSystemGetDriverVersion = lambda: "575.57.08"
    module.nvmlSystemGetCudaDriverVersion_v2 = lambda: cuda_driver
    module.NVML_CLOCK_SM, module.NVML_CLOCK_MEM = 1, 2
    module.NVML_TEMPERATURE_GPU, module.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, module.NVML_VOLATILE_ECC = 0, 1, 0
    for name in values:
        setattr(module, f"nvmlDeviceGet{name}", call(name))
    return module


@pytest.fixture
def machine(monkeypatch):
    """A function: machine(names, ...) puts these GPUs into this machine; visible="1" sets CUDA_VISIBLE_DEVICES."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def build(names=(), visible=None, **facts):
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(names, **facts))
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return build


# ---- the facts


def test_the_environment_names_software_and_machine_and_no_person():
    env = environment.environment()
    assert env["python"].count(".") == 2
    assert env["num_cpus"] == len(os.sched_getaffinity(0))
    assert env["memory_gib"] is None or env["memory_gib"] > 0
    assert env["packages"]["pytest"]
    text = json.dumps(env)
    home, host = os.path.expanduser("~"), os.uname().nodename
    assert len(home) < 2 or home + "/" not in text
    assert len(host) < 5 or host not in text


def test_only_variables_that_matter_are_kept_without_secrets_homes_and_serials():
    home = os.path.expanduser("~")
    environ = {
        "OMP_NUM_THREADS": "2",
        "NCCL_DEBUG": "INFO",
        "CUDA_VISIBLE_DEVICES": "GPU-aaaa1111-2222-3333-4444-555566667777,1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HYDRA_FULL_ERROR": "1",
        "TORCH_HOME": f"{home}/cache",
        "NCCL_SOCKET_IFNAME": "^docker0,Tr0ub4dor",
        "NCCL_TUNER_PLUGIN": "x86_64-linux-gnu/libtuner.so.2 9f86d081884c",
        "LD_LIBRARY_PATH": "/home/bob/env/lib:/usr/local/cuda/lib64",
        "SPEEDRUN_CWD": "/scratch/bob/new-project",
        "SPEEDRUN_HUB_TOKEN": "hf_secret",
        "TORCH_API_KEY": "secret",
        "USER": "ada",
        "HOSTNAME": "box",
        "PATH": "/bin",
    }
    names = ("HYDRA_FULL_ERROR", "NCCL_DEBUG", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF")
    hidden = {
        "CUDA_VISIBLE_DEVICES": f"GPU#{private.salted_hash('GPU-aaaa1111-2222-3333-4444-555566667777')},1",
        "LD_LIBRARY_PATH": f"/#{private.salted_hash('/home/bob/env/lib')}:/usr/local/cuda/lib64",
        "NCCL_SOCKET_IFNAME": f"^docker0,#{private.salted_hash('Tr0ub4dor')}",
        "NCCL_TUNER_PLUGIN": f"x86_64-linux-gnu/libtuner.so.2 #{private.salted_hash('9f86d081884c')}",
        "SPEEDRUN_CWD": f"/#{private.salted_hash('/scratch/bob/new-project')}",
        "TORCH_HOME": "~/cache" if len(home) > 1 else f"{home}/cache",
    }
    assert environment.env_variables(environ) == {name: environ[name] for name in names} | hidden


def test_a_machine_without_a_driver_has_no_gpu_and_says_why(machine):
    machine(init_error="NVML Shared Library Not Found")
    assert gpus.nvml_facts() == {"driver": None, "gpus": [], "nvml": "NVML Shared Library Not Found"}
    assert len(gpus.visible()) == 0


@pytest.mark.parametrize(
    ("version", "cuda", "cuda_driver", "fault"),
    [
        ("2.13.0+cu132", "'13.2'", 13000, None),  # a later minor version
        ("2.13.0+cu126", "'12.6'", 13000, None),
        ("2.13.0+cu130", "'13.0'", 12090, "NVIDIA's driver 575.57.08 supports CUDA 12.9, and torch {} needs CUDA 13.0"),
        ("2.13.0+cpu", "None", 13000, "torch {} is a build for CPUs"),
    ],
)
def test_a_torch_that_cannot_use_the_gpus_is_refused_before_data_are_fetched(
    version, cuda, cuda_driver, fault, machine, monkeypatch, tmp_path
):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('nothing may import torch here')")
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '{version}'\ncuda: Optional[str] = {cuda}\n")
    find, its = importlib.util.find_spec, PathFinder.find_spec("torch", [str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: its if name == "torch" else find(name))
    machine(["NVIDIA H100 80GB HBM3"], cuda_driver=cuda_driver)
    monkeypatch.setattr(prepare.datasets, "prepare", lambda *args, **options: {}["data are fetched"])
    refusal = "data are fetched" if fault is None else f"hardware.device=cuda: {fault.format(version)}: "
    with pytest.raises((ValueError, KeyError)) as raised:
        prepare.prepare(["track=free", "experiment=smoke", "hardware=cuda"])
    assert refusal in str(raised.value)
    with pytest.raises(KeyError, match="data are fetched"):
        prepare.prepare(["track=free", "experiment=smoke", "hardware=cpu"])


def test_a_gpu_is_described_in_our_units(machine):
    machine(["NVIDIA H100 80GB HBM3"])
    facts = gpus.nvml_facts()
    (gpu,) = facts["gpus"]
    assert facts["driver"] == "575.57.08"
    assert gpu["name"] == "NVIDIA H100 80GB HBM3"
    assert (gpu["memory_gib"], gpu["used_memory_gib"]) == (80.0, 1.0)
    assert gpu["power_limit_w"] == 700.0  # NVML said mW
    assert (gpu["max_sm_clock_mhz"], gpu["max_mem_clock_mhz"], gpu["compute_capability"]) == (1980, 2619, "9.0")
    assert (gpu["persistence"], gpu["ecc"], gpu["mig"]) == (True, True, False)
    assert gpu["pcie_width"] == 16
    assert (gpu["temp_c"], gpu["clocks_event_reasons"]) == (31, ["gpu_idle", "sw_power_cap", "0x800"])
    assert (gpu["ecc_uncorrected"], gpu["remap_pending"], gpu["remap_failed"]) == (3, True, False)
    assert gpu["unsupported"] == []
    assert UUIDS[0] not in json.dumps(facts)


def test_what_a_board_does_not_support_is_None_and_noted_once(machine):
    machine(["Tesla T4"], fails=("EccMode", "PowerManagementLimit", "ComputeRunningProcesses"))
    (gpu,) = gpus.nvml_facts()["gpus"]
    assert (gpu["ecc"], gpu["power_limit_w"], gpu["num_compute_processes"]) == (None, None, None)
    assert sorted(gpu["unsupported"]) == ["ComputeRunningProcesses", "EccMode", "PowerManagementLimit"]


@pytest.mark.parametrize(
    ("visible", "order"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        ("0, 1", [0, 1]),
        ("0,7,1", [0]),  # CUDA stops at the first that does not exist
        ("1,1", []),  # twice: none
        ("GPU-bbbb3333-0000,0", [2, 0]),
        ("GPU-aaaa", [0]),
        ("GPU-bbbb", []),  # fits two
        ("NoDevFiles", []),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_show(visible, order, machine):
    assert gpus.visible_order(UUIDS, visible) == order
    machine(["A", "B", "C"], visible=visible)
    assert len(gpus.visible()) == len(order)


def test_a_mig_slice_counts_as_the_gpu_it_is_part_of(machine):
    machine(["A", "B"], visible="MIG-1234abcd-0", mig=True)
    assert [gpu["visible"] for gpu in gpus.nvml_facts()["gpus"]] == [None, 0]
    assert prepare.this_machine().gpu_memory_gib is None  # the slice's, which NVML's GPU does not have


# ---- the summary of a run


@pytest.mark.parametrize(
    ("gpus_here", "device", "num_processes", "names"),
    [
        ({"names": ["A", "B", "C"], "visible": "2,0,1"}, "cuda", 2, ["C", "A"]),  # by rank
        ({"names": ["A"]}, "cpu", 1, []),
        ({"names": ["NVIDIA H100"], "mig": True}, "cuda", 1, ["NVIDIA H100 MIG"]),  # so that no peak is found for it
    ],
    ids=["ranks", "a CPU run on a machine with a GPU", "a slice of a GPU"],
)
def test_the_summary_has_the_gpus_that_the_run_used(machine, gpus_here, device, num_processes, names):
    machine(**gpus_here)
    hardware = schema.HardwareConfig(device=device, num_processes=num_processes, num_threads=1)
    summary = environment.summary(environment.environment(), hardware)
    assert [gpu["name"] for gpu in summary["gpus"]] == names
    assert (summary["driver"], summary["num_threads"]) == ("575.57.08", 1)


def test_the_instruction_set_and_what_limits_it_are_in_a_record(finished_run):
    limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI_2"}
    limits |= {"DNNL_MAX_CPU_ISA": "AVX512_CORE_AMX_FP16", "MKL_CBWR": "AVX2,STRICT"}
    limits |= {"MKL_ENABLE_INSTRUCTIONS": "AVX512_E1"}
    assert environment.env_variables(limits) == limits
    run = json.loads((finished_run / "run.json").read_text())
    env = json.loads((finished_run / "environment.json").read_text())["env"]
    variables = environment.env_variables(os.environ)
    assert run["environment"]["cpu_capability"] == environment.torch_facts()["cpu_capability"]
    for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR"):
        assert env.get(name) == variables.get(name)


def test_code_compiled_for_one_instruction_set_is_not_run_with_another(monkeypatch):
    hardware = schema.HardwareConfig(device="cpu", num_processes=1, num_threads=1)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    caches = []
    for capability in (None, "default", "avx2"):
        monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
        if capability is not None:
            monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
        caches.append(ranks.environment(hardware).get("TORCHINDUCTOR_CACHE_DIR"))
    assert caches[0] is None and len(set(caches)) == 3  # None: torch's own folder
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/scratch/cache")
    assert ranks.environment(hardware)["TORCHINDUCTOR_CACHE_DIR"] == "/scratch/cache"


# ---- ids


@pytest.fixture
def run():
    return run_folder.read(COMPLETE)


def with_gpu(run, **facts):
    run["environment"]["gpus"] = [{"name": "NVIDIA H200", "memory_gib": 141.0, "power_limit_w": 700.0} | facts]
    return run


@pytest.mark.parametrize(
    "change",
    [
        {"environment__cpu_model": "Another CPU"},
        {"environment__num_cpus": 4},
        {"environment__num_threads": 2},
        {"environment__torch": "2.12.0"},
        {"environment__cuda": "13.0"},
        {"environment__nccl": "2.28.3"},
        {"environment__driver": "580.1"},
        {"timing_protocol__id": "tp-2"},
        {"timing_protocol__instruments": ["regions", "profiler"]},
        {"data__val": [{"sha256": "0" * 64}]},
        {"world_size": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_times_under_other_conditions_are_not_comparable(run, change):
    assert environment.comparability_id(changed(run, **change)) != environment.comparability_id(run)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 9},
        {"config_id": "ffffffff"},
        {"session_id": "f" * 16},
        {"environment__python": "3.13.0"},
        {"code__dirty": True},
    ],
)
def test_what_does_not_change_how_time_passes_leaves_runs_comparable(run, change):
    assert environment.comparability_id(changed(run, **change)) == environment.comparability_id(run)


def test_on_gpus_their_model_and_power_limit_decide_and_the_cpu_does_not(run):
    base = environment.comparability_id(with_gpu(run))
    assert environment.comparability_id(with_gpu(changed(run, environment__cpu_model="Another CPU"))) == base
    assert environment.comparability_id(with_gpu(run, power_limit_w=500.0)) != base
    assert environment.comparability_id(with_gpu(run, name="NVIDIA H100 PCIe")) != base


def test_a_session_is_one_boot_one_set_of_gpus_and_one_software_image():
    env = {"boot": "b", "python": "3.12.8", "packages": {"torch": "2.13.0"}}
    env["gpus"] = [{"uuid_hash": "1"}, {"uuid_hash": "2"}]
    base = environment.session_id(env)
    assert len(base) == 16
    assert environment.session_id(env | {"gpus": env["gpus"][::-1]}) == base
    for change in ({"boot": "c"}, {"gpus": env["gpus"][:1]}, {"python": "3.13.0"}, {"packages": {"torch": "2.12.0"}}):
        assert environment.session_id(env | change) != base
    assert environment.session_id(env | {"boot": None}) is None  # unknown, never equal


# ---- CPU and memory


def meter(wall_s, busy_s, own_s):
    """A CpuMeter between two readings of each clock, in seconds."""
    now_s, busy, own = (functools.partial(next, iter([0.0, end])) for end in (wall_s, busy_s, own_s))
    return CpuMeter(now_ns=lambda: int(now_s() * 1e9), read_busy_s=busy, own_s=own)


def test_foreign_load_is_what_is_busy_and_not_ours():
    """Of 3 busy CPU seconds in 2 s 1.8 are ours, which leaves (3 - 1.8) / 2 cores."""
    assert meter(2.0, 3.0, 1.8).foreign_cpu_cores() == pytest.approx(0.6)
    assert meter(2.0, 3.0, 0.9).foreign_cpu_cores(own_cpu_s=2.8) == pytest.approx(0.1)  # all ranks together


def test_a_system_that_refuses_to_tell_the_cpus_of_a_process_has_all(monkeypatch):
    """As seccomp filters of containers do."""

    def refuse(pid):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    assert cpu_meter.usable_cpus() == list(range(os.cpu_count())) and environment.usable_cpus() == os.cpu_count()
    assert surroundings.facts()["the CPU cores"] == cpu_meter.usable_cpus()


def test_a_rank_with_more_busy_threads_than_its_setting_is_doubted():
    hardware = HardwareConfig(device="cpu", num_threads=2)
    assert meter(10.0, 30.0, 24.9).doubts_about_threads(hardware) == []
    (doubt,) = meter(10.0, 30.0, 29.0).doubts_about_threads(hardware)
    several = HardwareConfig(device="cpu", num_threads=2, num_processes=2)  # gloo's threads compute, too
    assert meter(10.0, 50.0, 44.9).doubts_about_threads(several) == []
    assert meter(10.0, 50.0, 46.0).doubts_about_threads(several) != []
    assert doubt == "its process kept 2.90 CPU cores busy, but hardware.num_threads is 2"


def test_foreign_load_is_never_negative_and_unknown_without_proc():
    assert meter(2.0, 1.0, 1.1).foreign_cpu_cores() == 0.0  # ticks are coarse
    assert CpuMeter(read_busy_s=lambda: None).foreign_cpu_cores() is None


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="needs /proc")
def test_our_own_work_is_not_foreign():
    """Works for 0.3 s: own_cpu_s subtracts as much as /proc/stat adds."""
    seconds = iter(range(3))  # a held clock: a busy machine stretches the wall time, not the work
    meter = CpuMeter(now_ns=lambda: min(next(seconds), 1) * 10**9)
    while meter.own_cpu_s() < 0.3:
        sum(range(10_000))
    assert cpu_meter._busy_cpu_s() - meter._start[1] >= 0.27  # ticks of 10 ms
    assert meter.foreign_cpu_cores() <= meter.foreign_cpu_cores(own_cpu_s=0.0) - 0.25


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="needs /proc")
def test_a_process_that_moves_to_another_core_is_measured_on_those_that_it_began_with(monkeypatch):
    """A cheat: a helper on the core that the process leaves would be nobody's."""
    before_s = cpu_meter._busy_cpu_s()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set())
    assert cpu_meter._busy_cpu_s() >= before_s > 0


# ---- code


@pytest.fixture
def repo(tmp_path):
    """A tiny repository with one commit of bench/a.py and models/b.py."""
    for name, text in (("bench/a.py", "a = 1\n"), ("models/b.py", "b = 1\n"), ("results/.keep", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def commit(repo):
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "x")


def test_what_git_replace_shows_under_a_commits_name_is_not_taken_for_it(repo):
    before = git(repo, "rev-parse", "HEAD")
    (repo / "models" / "b.py").write_text("b = 2\n")
    git(repo, "commit", "-q", "-a", "-m", "another")
    git(repo, "replace", before, "HEAD")
    git(repo, "reset", "-q", "--hard", before)
    (repo / "models" / "b.py").write_text("b = 2\n")
    assert code_state.state(repo)["commit"] == before and code_state.state(repo)["dirty"]


def test_committed_code_is_clean_and_its_hash_is_over_paths_and_syntax_of_what_is_raced(repo):
    state = code_state.state(repo)
    syntax = b"Module(body=[Assign(targets=[Name(ctx=Store(),id='b',),],value=Constant(1),),],)"
    file_sha256 = hashlib.sha256(syntax).hexdigest()
    expected = hashlib.sha256(f"identity version 2\nmodels/b.py {file_sha256}".encode()).hexdigest()
    raced = {"identity_version": 2, "source_sha256": expected, "files": {"models/b.py": file_sha256[:12]}}
    clean = {"dirty": False, "diff_sha256": None, "untracked": [], "untracked_excluded": {}}
    assert state == raced | clean | {"commit": git(repo, "rev-parse", "HEAD")}


def test_a_change_makes_code_dirty_and_the_patch_brings_it_back(repo, tmp_path_factory):
    clean = code_state.state(repo)["source_sha256"]
    (repo / "bench" / "a.py").write_text("a = 2  # é\n")
    (repo / "models" / "new.py").write_text("c = 3\n")
    (repo / "results" / ".keep").write_text("a record that was replaced")
    state = code_state.state(repo)
    assert (state["dirty"], state["untracked"]) == (True, ["models/new.py"])
    assert state["source_sha256"] != clean
    folder = repo / "results" / "code"
    for name, value in (("diff.noprefix", "true"), ("diff.context", "0"), ("core.fsmonitor", "touch ran.py; false")):
        git(repo, "config", name, value)
    code_state.write(repo, folder)
    assert json.loads((folder / "commit.json").read_text()) == state
    assert "results" not in (folder / "diff.patch").read_text()  # records are no code
    assert hashlib.sha256((folder / "diff.patch").read_bytes()).hexdigest() == state["diff_sha256"]
    assert (folder / "untracked" / "models" / "new.py").read_text() == "c = 3\n" and not (repo / "ran.py").exists()
    copy_of_commit = tmp_path_factory.mktemp("clone")
    git(copy_of_commit, "clone", "-q", str(repo), ".")
    git(copy_of_commit, "apply", str(folder / "diff.patch"))
    assert (copy_of_commit / "bench" / "a.py").read_text() == "a = 2  # é\n"


def test_large_untracked_files_are_data_and_stay_where_they_are(repo):
    (repo / "models" / "big.py").write_text("#" * (2**20 + 1))
    code_state.write(repo, repo / "results" / "code")
    assert not (repo / "results" / "code" / "untracked").exists()


def test_outside_git_only_the_source_hash_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "bench" / "training").mkdir(parents=True)
    (tmp_path / "bench" / "training" / "run.py").write_text("a = 1\n")
    state = code_state.state(tmp_path)
    assert {state[key] for key in ("commit", "dirty", "diff_sha256", "untracked", "untracked_excluded")} == {None}
    assert (list(state["files"]), len(state["source_sha256"])) == (["bench/training/run.py"], 64)
    code_state.write(tmp_path, tmp_path / "code")
    assert (tmp_path / "code" / "diff.patch").read_text() == ""


def test_before_the_first_commit_everything_is_untracked(tmp_path):
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "a.py").write_text("a = 1\n")
    git(tmp_path, "init", "-q")
    state = code_state.state(tmp_path)
    assert (state["commit"], state["dirty"], state["untracked"]) == (None, True, [])
    assert state["untracked_excluded"] == {"bench/a.py": hashlib.sha256(b"a = 1\n").hexdigest()[:12]}


def test_of_untracked_files_that_the_run_does_not_use_only_name_and_hash_are_recorded(repo, monkeypatch):
    used = ["bench/loaded.py", "conf/mine.yaml", "models/new.py"]
    (repo / "conf").mkdir()
    for name in (*used, "launch.sh", "secrets.yaml", "bench/scratch.py", "bench/hf_%s.py" % ("a" * 30)):
        (repo / name).touch()
    loaded = types.SimpleNamespace(__file__=str(repo / "bench" / "loaded.py"))
    monkeypatch.setitem(code_state.sys.modules, "loaded_by_a_test", loaded)
    state = code_state.state(repo, composed_of=lambda: [repo / "conf" / "mine.yaml"])
    assert state["dirty"] and state["untracked"] == used
    scratch = hashlib.sha256(b"").hexdigest()[:12]
    assert state["untracked_excluded"] == {f"bench/{'SECRET'}.py": scratch, "bench/scratch.py": scratch}
    code_state.write(repo, repo / "results" / "code", facts=state)
    kept = repo / "results" / "code" / "untracked"
    assert {path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file()} == set(used)


@pytest.mark.parametrize("hidden_by", ["an ignore file", "info/exclude", "a repository within", "a package"])
def test_a_source_that_git_does_not_see_is_kept_if_it_trains(repo, hidden_by):
    """By the user's global ignore file, for example: the commit would be called clean, and the code were nowhere."""
    name = {"a repository within": "models/mine/net.py", "a package": "models/b/__init__.py"}.get(hidden_by)
    path = repo / (name or "models/my_net.py")
    path.parent.mkdir(exist_ok=True)
    path.write_text("x = 1\n")
    (repo / "conf").mkdir()
    (repo / "conf/my_secrets.yaml").write_text("x: 1\n")
    (repo / ".git/info/exclude").write_text("my_*\nb\n" * (hidden_by in ("info/exclude", "a package")))
    if hidden_by == "an ignore file":
        (repo / ".gitignore").write_text("my_*\n")
        commit(repo)
    if hidden_by == "a repository within":
        git(path.parent, "init", "-q")
        commit(path.parent)
    state = code_state.state(repo)
    assert state["dirty"] and state["untracked"] == [path.relative_to(repo).as_posix()]
    seen = hidden_by == "a repository within"
    assert list(state["untracked_excluded"]) == ["conf/my_secrets.yaml"] * seen  # of what is ignored nothing is said
    code_state.write(repo, repo / "results" / "code", facts=state)
    assert (repo / "results/code/untracked" / path.relative_to(repo)).read_text() == "x = 1\n"


def test_importing_the_room_imports_neither_torch_nor_nvml():
    code = (
        "import sys, bench.machine.environment, bench.machine.preflight\nprint({'torch', 'pynvml'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_peak_memory_is_this_programs_own_and_not_its_parents():
    ballast = bytearray(300 * 2**20)  # 300 MiB here must not show in a child
    code = "import ctypes, runpy; from bench.machine import meters as m\nctypes.CDLL(None).prctl(15, b'\\xff')\n"
    code += "print(m.peak_rss_gib()); print(runpy.run_path('bench/training/script_worker.py')['peak_rss_gib']())"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert len(ballast) and all(0.005 < float(peak) < 0.2 for peak in done.stdout.split())


def test_of_a_package_that_is_installed_twice_the_first_on_the_path_counts(tmp_path, monkeypatch):
    """Packages that setuptools vendors, which torch's compiler adds to the path by importing it, do not count."""
    for folder, version in (("_vendor", "0.1"), ("first", "1.9.0"), ("second", "2.0.0")):
        info = tmp_path / folder / "twice-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: twice\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [*(str(tmp_path / name) for name in ("_vendor", "first", "second")), *sys.path])
    assert environment.packages()["twice"] == "1.9.0"


JOB = "system.slice/slurmstepd.scope/job_7"
OF_SLURM = {f"{JOB}/cpu.max": "400000 100000", f"{JOB}/step_0/cpu.max": "max 100000"}
OF_SLURM |= {f"{JOB}/memory.max": str(3 * 2**30), f"{JOB}/memory.current": str(2**30)}
OF_VERSION_1 = {"memory/a/memory.limit_in_bytes": str(2**30), "memory/a/memory.usage_in_bytes": "0"}
for group, quota_us in (("a", "50000"), ("a/b", "-1")):
    OF_VERSION_1[f"cpu,cpuacct/{group}/cpu.cfs_quota_us"] = quota_us
    OF_VERSION_1[f"cpu,cpuacct/{group}/cpu.cfs_period_us"] = "100000"


@pytest.mark.parametrize(
    ("groups", "files", "cores", "gib"),
    [
        ("0::/", {"cpu.max": "150000 100000", "memory.max": "max"}, 1.5, None),  # a container
        ("0::/user.slice/run-1.scope", {"user.slice/run-1.scope/cpu.max": "20000 100000"}, 0.2, None),  # systemd's
        (f"0::/{JOB}/step_0/user", OF_SLURM, 4.0, 2.0),
        ("4:memory:/a\n1:cpu,cpuacct:/a/b\n0::/", OF_VERSION_1, 0.5, 1.0),
        ("1:cpu:/", {}, None, None),
        ("0::/", {"cpu.max": "100000 0", "memory.max": "?", "memory.current": "1"}, None, None),  # of a fake kernel
        ("0::/", {"cpu.max": "many 100000"}, None, None),
    ],
)
def test_limits_of_control_groups_are_those_of_the_process_and_of_every_group_around_it(
    groups, files, cores, gib, tmp_path, monkeypatch
):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    read = environment.text_of
    texts = {"/proc/self/cgroup": groups, "/proc/meminfo": f"MemAvailable: {2**24} kB\n"}
    monkeypatch.setattr(environment, "CGROUPS", tmp_path)
    monkeypatch.setattr(environment, "text_of", lambda path: texts.get(str(path)) or read(path))
    assert environment.cpu_quota_cores() == cores
    assert environment.available_memory_gib() == (16.0 if gib is None else gib)  # MemAvailable: 16 GiB


def test_the_program_that_kept_the_machine_busy_is_named_and_our_own_are_not(tmp_path):
    secret = os.fsdecode(b"secret\xff")  # the name of any program of the machine: it need not be UTF-8
    for name in (secret, "ruby3.1", "julia"):
        (tmp_path / name).symlink_to("/bin/sh")
    loop, before_s, pids = "while :; do :; done", processes.everyones_cpu_s(), []
    with subprocess.Popen([tmp_path / "julia", "-c", loop]) as own:
        try:
            for name in (secret, "ruby3.1"):
                outside = ["setsid", "--fork", tmp_path / name, "-c", f"echo $$; exec >/dev/null; {loop}"]
                pids.append(int(subprocess.run(outside, stdout=subprocess.PIPE, check=True).stdout))
            assert wait_for(lambda: min(processes.cpu_s(pids).values()) > 0.3, 60)
            busiest = processes.busiest_others(before_s, most=1000)
        finally:
            for pid in pids:
                os.kill(pid, 9)
            own.kill()
    assert {seen for seen, pid, s in busiest if pid in pids and s > 0.3} == {"secret\ufffd", "ruby3.1"}
    assert own.pid not in [pid for _, pid, _ in busiest]
    assert list(map(processes.public_name, ("secret\ufffd", "ruby3.1"))) == ["another program", "ruby3.1"]


def test_the_packages_are_those_that_python_itself_finds(tmp_path, monkeypatch):
    (tmp_path / "old.egg-info").write_text("Metadata-Version: 1.0\nName: old\nVersion: 0.1\n")
    places = [place for place in sys.path if not place.endswith(environment.VENDORED)]  # a compiler before this test
    monkeypatch.setattr(sys, "path", [*places, str(tmp_path), str(tmp_path / "none")])
    versions = {package.metadata["Name"]: package.version for package in reversed([*metadata.distributions()])}
    with open(tmp_path / "old.egg-info", "ab") as file:
        file.write("Author: Zoë\n".encode("latin-1"))  # which importlib.metadata refuses
    assert environment.packages() == dict(sorted(versions.items())) and versions["old"] == "0.1"
