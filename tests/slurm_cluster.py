"""A real SLURM cluster of two nodes on this machine for tests: munge, a controller and two daemons in one folder.

    python tests/slurm_cluster.py FOLDER      starts one and prints how to use it, until Ctrl-C

It needs root and Debian's slurm-wlm and munge (apt-get install slurm-wlm munge); elsewhere its tests are skipped with
that reason.  Debian's slurmd can run several times on a machine, once for each node (slurmd -N).
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol")
NODES = ("n1", "n2")
CONF = """\
ClusterName=speedrun{number}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
JobRequeue=1
KillWait=15
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool%n
SlurmctldPidFile={folder}/run/ctld.pid
SlurmdPidFile={folder}/run/d%n.pid
SlurmctldLogFile={folder}/log/ctld.log
SlurmdLogFile={folder}/log/d%n.log
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=2000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=2000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=p Nodes=n1,n2 Default=YES State=UP PriorityTier=2 PreemptMode=OFF
PartitionName=low Nodes=n1,n2 State=UP PriorityTier=1 GraceTime=40
"""
# cred_expire is also how long a requeued job waits before it may start again; the default is 120 s
CGROUP = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"  # without it steps hang at launch


def missing() -> str | None:
    """Returns why there can be no cluster here, or None."""
    lacking = [name for name in PROGRAMS if not shutil.which(name, path=_path())]
    if lacking:
        return f"no {', '.join(lacking)}: apt-get install slurm-wlm munge"
    return "SLURM's daemons need root" if os.geteuid() else None


class Cluster:
    """with Cluster(folder) as cluster: subprocess.run(["srun", ...], env=os.environ | cluster.variables)

    Raises RuntimeError if it does not come up.
    """

    def __init__(self, folder):
        self.folder = Path(folder).absolute()
        self.variables = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _path()}
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        for name in ("state", "run", "log", *(f"spool{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        host = socket.gethostname().split(".")[0]
        conf = CONF.format(number=os.getpid(), host=host, ports=_free_ports(3), folder=self.folder)
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "cgroup.conf").write_text(CGROUP)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        try:
            self._start_all()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc_info):
        self.run("scancel", "--user=root", "--full", "--signal=KILL")
        self._stack.close()

    def run(self, *command, timeout_s=60, **env):
        """Runs a command of SLURM and returns a CompletedProcess with text output."""
        env = os.environ | self.variables | env
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)

    def _start_all(self):
        at = self.folder
        munge = ("--foreground", "--force", f"--socket={at}/munge.socket", f"--key-file={at}/munge.key")
        munge += tuple(f"--{what}-file={at}/run/munge.{what}" for what in ("pid", "log", "seed"))
        self._start("munged", *munge)
        self._start("slurmctld", "-D", "-f", f"{at}/slurm.conf")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node, "-f", f"{at}/slurm.conf")
        until_s = time.monotonic() + 60
        while self.run("sinfo", "--noheader", "--format=%T %D").stdout.split() != ["idle", "2"]:
            if time.monotonic() > until_s:
                raise RuntimeError(f"SLURM's nodes did not come up in 60 s: {at}/log")
            time.sleep(0.5)

    def _start(self, program, *args):
        env = os.environ | self.variables
        with open(self.folder / "log" / f"{program}.out", "ab") as log:
            process = subprocess.Popen([shutil.which(program, path=_path()), *args], env=env, stdout=log, stderr=log)
        self._stack.callback(_end, process)


def _end(process):
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _path():
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [free.getsockname()[1] for free in sockets]


if __name__ == "__main__":
    if missing():
        sys.exit(missing())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with Cluster(sys.argv[1]) as cluster:
        print(f"export SLURM_CONF={cluster.variables['SLURM_CONF']} PATH=$PATH:/usr/sbin", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)
