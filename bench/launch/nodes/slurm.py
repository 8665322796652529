"""What SLURM's variables and answers mean: tasks of each node, host lists, the address of a node."""

import re
import socket
import subprocess
from collections.abc import Iterable, Mapping

NODE_ADDR = re.compile(r"\bNodeAddr=(\S+)")


def tasks_per_node(word: str) -> list[int]:
    """SLURM_STEP_TASKS_PER_NODE, "2(x3),1" -> [2, 2, 2, 1].  ValueError."""
    result = []
    for part in word.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={word}: not as SLURM writes it, 2(x3),1")
        result += [int(match[1])] * int(match[2] or 1)
    return result


def hostnames(word: str) -> list[str]:
    """A host list, "n[01-03,7],gpu-a" -> ["n01", "n02", "n03", "n7", "gpu-a"]."""
    result = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", word):
        result += _expanded(part)
    return result


def _expanded(part) -> Iterable[str]:
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if match is None:
        return [part]
    before, ranges, after = match.groups()
    numbers = []
    for one in ranges.split(","):
        first, _, last = one.partition("-")
        numbers += [f"{num:0{len(first)}d}" for num in range(int(first), int(last or first) + 1)]
    return [f"{before}{number}{rest}" for number in numbers for rest in _expanded(after)]


def address_of_first(environ: Mapping[str, str]) -> str | None:
    """Of the first node of this step, where rank 0 is: its NodeAddr, else its name if that can be looked up."""
    names = hostnames(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")
    if not names:
        return None
    try:
        words = ["scontrol", "show", "node", names[0]]
        answer = subprocess.run(words, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    match = NODE_ADDR.search(answer)
    if match:
        return match[1]
    try:
        return socket.getaddrinfo(names[0], None)[0][4][0]
    except OSError:
        return environ.get("SLURM_LAUNCH_NODE_IPADDR")
