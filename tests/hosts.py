"""Two hosts on one machine for tests: network namespaces joined by a veth pair, each with a host name and a folder."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import forked
import pytest
import real_runs

NUMBERS = itertools.count(1)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Pair:
    """with Pair(base) as pair: pair.start(0, ...); pair.start(1, ...); code, out = pair.end(0)

    pair.rendezvous is HOST:PORT of the first host.  If namespaces cannot be made, the test is skipped with the reason.
    """

    def __init__(self, base):
        self.base, self.processes = Path(base), {}
        number = next(NUMBERS)
        self.names = [f"sr{os.getpid()}-{number}{side}" for side in "ab"]
        self.addresses = ["10.99.0.1", "10.99.0.2"]
        self.rendezvous = "10.99.0.1:29600"

    def __enter__(self):
        if not shutil.which("ip") or not shutil.which("unshare") or os.geteuid():
            pytest.skip("two hosts need root, and ip of iproute2: apt-get install iproute2")
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self._remove()
            pytest.skip(f"this system makes no network namespaces: {error.stderr.strip()}")
        return self

    def _make(self):
        links = [f"sv{os.getpid() % 100000}{side}" for side in "ab"]
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", links[0], "netns", self.names[0], "type", "veth", "peer", links[1], "netns", self.names[1])
        for name, link, address in zip(self.names, links, self.addresses):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", link, "up")
        self.links = links

    def __exit__(self, *exc_info):
        for process in self.processes.values():
            process.kill()
            process.communicate()
        self._remove()

    def _remove(self):
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)

    def results(self, host):
        return self.base / f"results{host}"

    def start(self, host, *arguments, repo=real_runs.REPO, changed=None, **env):
        """Starts python -m ARGUMENTS on a host.  changed: as in real_runs.started()."""
        hostname = f"speedrun-test-{'ab'[host]}"
        if repo == real_runs.REPO and fork_server.fits(env):
            enter, env = [], env | {fork_server.HOST: json.dumps([self.names[host], hostname])}
            env |= {forked.CHANGED: json.dumps(changed)} if changed else {}
        else:
            assert not changed
            enter = ["ip", "netns", "exec", self.names[host], "unshare", "-u", "sh", "-c"]
            enter += [f'hostname {hostname}; exec "$@"', "sh"]
        self.processes[host] = subprocess.Popen(
            [*enter, sys.executable, "-m", *arguments],
            cwd=repo,
            env=real_runs.environment(self.results(host), **env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def cut(self):
        """Cuts the connection between the hosts."""
        ip("-n", self.names[1], "link", "set", self.links[1], "down")

    def kill(self, host):
        """Kills every process of a host, as the loss of a machine does."""
        while pids := self.pids(host):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def end(self, host, timeout_s=240):
        """Waits for a host's command and returns (exit code, output)."""
        process = self.processes[host]
        out, _ = process.communicate(timeout=timeout_s)
        return process.returncode, out

    def wait_for_step(self, step, timeout_s=120):
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            for path in self.results(0).glob("*/*/.progress.tmp"):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    if json.loads(path.read_text())["step"] >= step:
                        return
            assert self.processes[0].poll() is None, self.processes[0].communicate()[0]
            time.sleep(0.1)
        raise AssertionError(f"no step {step} in {timeout_s} s")

    def pids(self, host):
        """Returns the ids of all processes on a host."""
        listed = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def all_gone(self, timeout_s=30):
        return real_runs.wait_for(lambda: not self.pids(0) + self.pids(1), timeout_s, every_s=0.2)
