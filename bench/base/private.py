"""Redacts what must not be recorded: paths and names that identify a person or a machine, and credentials."""

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from bench.base import atomic, credentials
from bench.base.paths import COPY_NAME, REPO, copy_roots, state_root
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged
from bench.base.units import MIB

BLOCK_BYTES = 16 * MIB  # how much of a log is in memory at once
LOCAL = ("localhost", "localhost4", "localhost6", "localdomain", "ip6-localhost", "ip6-loopback")
# Common words in records and logs: a host with such a name is redacted only where the text marks it as a host.
WORDS = """
adam apple atlas base baseline batch bench benchmark build builder calibration clock cluster code compute computer
config container cuda darwin data debian debug default desktop device docker fedora file files gateway graph guest
head home hopper host image julia jupyter kernel laptop layers line lines linux local login loss lower machine main
manager master memory metal model modern muon network node nodes norm notebook nvidia optim other output personal
pipeline primary process processes production profile project python queue race rank ranks record records release
remote results root router runner sample script seed server session shared shell slurm small spark speedrun stages
staging stalls state steps storage studio submit system table target telemetry tensor test testing time times token
torch trace track train trainer training triton ubuntu upper user valid value vector version virtual vscode warmup
weights windowed work worker workspace workstation
"""
ORDINARY = frozenset(WORDS.split())
COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[()][A-Z0-9]|[=>78])")  # and other orders to a terminal
OTHER_NETWORK = r"(?:[-_](?:ib|eth|hsn|opa|roce|mgmt|bmc|ipmi)\d*)?"  # a host's alias there ends so
TORCHRUN_HOST = re.compile(r"^(  host      : ).+$", re.M)  # torchrun's error report has this machine's name in DNS


def salted_hash(text: str) -> str:
    """Returns a hash of a text, 16 hex digits, which is specific to this project."""
    return hashlib.sha256(b"speedrun-bench:" + text.encode(errors="surrogatepass")).hexdigest()[:16]


def mark_of(results: Path | str) -> str:
    """Returns 6 hex digits that distinguish a results folder on this machine from other folders and machines.

    They are a hash of the host's name, the folder's path and a secret of the user that is never recorded, so that
    neither name nor path can be guessed from them.
    """
    place = f"{platform.node()}\0{os.path.realpath(results)}"
    return hashlib.sha256(_secret() + os.fsencode(place)).hexdigest()[:6]


def secret_hash(text: str) -> str:
    """Returns a hash of a text, hex digits, that only this user can compute; anybody can if no secret can be kept."""
    secret = _secret()  # which makes the file
    secret *= (state_root() / "mark").is_file()  # else each process of the user has another one
    return hashlib.sha256(secret + text.encode(errors="surrogatepass")).hexdigest()


@functools.cache
def _secret() -> bytes:
    """Returns 16 random bytes from the user's state folder; if they cannot be kept there, new ones for this process."""
    fresh = secrets.token_bytes(16)
    try:
        path = state_root() / "mark"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            own = path.with_name(f".mark.{os.getpid()}.{fresh.hex()[:8]}.tmp")
            own.touch(mode=0o600)
            own.write_bytes(fresh)
            with contextlib.suppress(FileExistsError):  # another process was first
                os.link(own, path)
            own.unlink()
        return plain_file.content(path) or fresh
    except (OSError, ValueError, RuntimeError):
        return fresh


def redact(
    text: str,
    repo: Path | str,
    home: str | None = None,
    user: str | None = None,
    host: str | None = None,
    is_prose: bool = False,
) -> str:
    """Removes credentials, private paths and names: the repository becomes ".", home "~", user USER, host HOST.

    The user's name is replaced in paths, before an @ and where programs use it (torchinductor_USER); the host's name
    anywhere, with its domain.  A host with an ordinary (ORDINARY) or short name is replaced only where the text marks
    it as a host: root@train, https://train.  home, user, host: None means those of this process.  is_prose: the text is
    no setting or command, so that the user's name is taken out as a word of its own too.
    """
    for root in copy_roots():
        if str(root) in text:  # the path of a copy of the code becomes what the repository's path becomes
            text = re.sub(rf"{re.escape(str(root))}/{COPY_NAME.pattern}", ".", text)
    text = TORCHRUN_HOST.sub(r"\1HOST", credentials.redacted(text))
    home = os.path.expanduser("~") if home is None else home
    logins = _logins() if user is None else (user,)
    users = {os.path.basename(home), *logins} if user is None else logins
    for folder, short in ((os.fspath(repo), "."), (home, "~")):
        for path in _spellings(folder):
            if len(path) > 1 and path in text:
                text = re.sub(rf"(?<![\w.~-]){re.escape(path)}(?![\w.-]*\w)", short, text)
    for name in {*users} - {"", "root"}:
        if name in text:
            text = _user(name).sub("USER", text)
            if is_prose and name in logins and len(name) > 3 and name.lower() not in ORDINARY:
                text = re.sub(rf"(?<![\w./-]){re.escape(name)}(?![\w./-])", "USER", text)
    lower = text.lower()
    for name in _hosts() if host is None else [host]:
        if name and name.partition(".")[0].lower() in lower:
            text = _host(name).sub("HOST", text)
    return text


def excerpt(text: str, max_chars: int) -> str:
    """Returns the beginning of a message or a line of output.  It is redacted before it is cut, as nothing recognizes
    half of a private path."""
    return redact(text, REPO, is_prose=True)[:max_chars]


@functools.lru_cache
def _spellings(folder: str) -> tuple[str, ...]:
    """Returns a folder, its true path and both as JSON and addresses have them, the longest first."""
    import urllib.parse  # which takes milliseconds of every start

    paths = {folder, os.path.realpath(folder)}
    quoted = {urllib.parse.quote(path, safe, errors="replace") for path in paths for safe in ("/", "")}
    quoted |= {re.sub("%..", lambda match: match[0].lower(), path) for path in quoted}
    paths |= {json.dumps(path)[1:-1] for path in paths} | quoted
    for path in [path for path in paths if not path.isascii()]:  # as Python writes it where output is ASCII
        paths |= {ascii(path)[1:-1], repr(os.fsencode(path))[2:-1]}
        paths.add(os.fsencode(path).decode("ascii", "surrogateescape").encode("ascii", "backslashreplace").decode())
    return tuple(sorted(paths, key=len, reverse=True))


@functools.lru_cache
def _user(name: str) -> re.Pattern[str]:
    text = re.escape(name)
    before, after = r"(?:(?<=/)|(?<=~)|(?<=torchinductor_)|(?<=-of-))", r"(?:(?![\w.-])|(?=[._-]\d+(?![\w.-])))"
    pattern = rf"{before}{text}{after}|(?<![\w./-]){text}(?=@[\w.-])"
    if len(name) > 3 and name.lower() not in ORDINARY:  # also within a folder's name
        pattern += rf"|(?<=/){text}(?=[._-][\w.-]*/)|(?<=[._-]){text}(?=(?:[._-][\w.-]*)?/)"
    return re.compile(pattern)


@functools.lru_cache
def _host(name: str) -> re.Pattern[str]:
    """Matches a host by its first label, with any domain that follows, and its own domain after any other name."""
    label, _, domain = name.partition(".")
    text = rf"{re.escape(label)}{OTHER_NETWORK}(?:\.[A-Za-z][\w-]*)*(?![\w-])"
    is_ordinary = len(label) <= 4 or label.lower() in ORDINARY or label.isdigit()
    before = r"(?:(?<=@)|(?<=://)|(?<=host=)|(?<=hostname=)|(?<=hostname: ))" if is_ordinary else r"(?<![\w-])"
    under_domain = rf"|(?<![\w-])(?:[\w-]{{1,63}}\.){{1,8}}{re.escape(domain)}(?![\w-])" if "." in domain else ""
    return re.compile(before + text + under_domain, re.I)


@functools.lru_cache
def _logins() -> tuple[str, ...]:
    """Returns this user's names according to the system and the shell."""
    names = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")}
    with contextlib.suppress(ImportError, KeyError):  # not Unix, or a container's user without an entry
        import pwd

        names.add(pwd.getpwuid(os.getuid()).pw_name)
    return tuple(sorted(names))


@functools.lru_cache
def _hosts() -> tuple[str, ...]:
    """Returns this machine's names according to the kernel and /etc; DNS is not queried, as that may take minutes."""
    names = {socket.gethostname(), *plain_file.text_or_empty("/etc/hostname").split()}
    labels = {name.partition(".")[0] for name in names}
    for line in plain_file.text_or_empty("/etc/hosts").splitlines():
        aliases = line.partition("#")[0].split()[1:]
        if labels & {alias.partition(".")[0] for alias in aliases}:
            names |= set(aliases)
    return tuple(sorted(name for name in names if name.partition(".")[0].lower() not in LOCAL))


def way(target: Path, at: Path | str) -> str | None:
    """Returns the relative path from a page's folder to a file; None if it would lead through a private folder.

    A page is sent to others, who do not have that folder.
    """
    relative = os.path.relpath(target.resolve(), Path(at).resolve())
    parts = [part for part in relative.split(os.sep) if part != ".."]
    absolute = os.path.join(os.sep, *parts)
    return relative if len(parts) == relative.count(os.sep) + 1 or redact(absolute, REPO) == absolute else None


def redact_all(values: Any, repo: Path | str, is_prose: bool = False, names: bool = False) -> Any:
    """Applies redact() to each text in nested dicts and lists; a value named as a credential becomes SECRET.

    names: also to the names of values, of which one word stays, as a metric may be called as the user.
    """
    clean_name = (lambda name: redact(name, repo, is_prose=is_prose and " " in name)) if names else None
    return credentials.hidden(values, lambda text: redact(text, repo, is_prose=is_prose), clean_name)[0]


def redact_logs(folder: Path, repo: Path | str) -> None:
    """Redacts the text files in a run folder's logs/ in place, except those that cannot be read or written.

    Binary files, such as NCCL's dumps, are not changed; *.log is text, whatever bytes a program printed besides.  One
    block of a log is in memory at a time.
    """
    for path in (folder / "logs").glob("*"):
        with contextlib.suppress(OSError, Damaged), plain_file.opened(path) as file:
            is_private = False
            for block in _blocks(file):
                if b"\0" in block and path.suffix != ".log":
                    break
                is_private = is_private or _redacted(block, repo) != block
            else:
                if is_private:
                    file.seek(0)
                    with atomic.replacing(path, durable=False) as clean:
                        for block in _blocks(file):
                            clean.write(_redacted(block, repo))


def _redacted(block: bytes, repo: Path | str) -> bytes:
    """Redacts what of a block is UTF-8 and keeps other bytes, and colours unless they are within what is private."""
    text = block.decode(errors="surrogateescape")
    clean = redact(text, repo, is_prose=True)
    if COLOUR.search(clean) and (plain := redact(COLOUR.sub("", text), repo, is_prose=True)) != COLOUR.sub("", clean):
        clean = plain
    return clean.encode(errors="surrogateescape")


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yields the file in blocks that end at the end of a line."""
    while block := file.read(BLOCK_BYTES):
        yield block + file.readline(BLOCK_BYTES)
