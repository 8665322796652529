"""Fetches shards of a Hugging Face dataset repository, such as kjj0/fineweb10B-gpt2: one commit, every file hashed.

A lock file, conf/data/NAME.lock.json, says which bytes are meant: the commit, and for each shard the size and sha256
that the hub states (it stores them for every large file). Without a lock, the first fetch asks the hub for the commit
data.revision, or for its current one if that is null, and writes the lock: commit it with your code. A copy lies beside
the data, for checkouts that have none. From then on exactly these bytes are accepted, and anything else is refused. The
first fetch trusts what the hub states.

A file is downloaded under a temporary name and renamed once its hash is right. huggingface_hub's http_get() continues
after a broken connection; a fetch that is ended begins its current file again.
"""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import msgspec

from bench.base import atomic
from bench.base.paths import INSTALLED, REPO
from bench.base.units import format_bytes, format_s
from bench.config.schema import DataConfig
from bench.data import shards
from bench.data.shards import CheckFailed
from bench.data.sources.source import Expected, Source, data_root, need_bytes, with_numbers

if TYPE_CHECKING:
    import numpy as np

LOCKS = REPO / "conf" / "data"  # in the checkout itself, because locks are written too
SHARD_NAME = re.compile(r"^[^/]*_(train|val)_(\d+)\.bin\Z")
COMMIT = re.compile(r"^[0-9a-f]{40}\Z")
VOCAB_SIZE = 50257  # these repositories hold GPT-2 tokens
EOS_TOKEN = 50256  # <|endoftext|>


class LockedFile(msgspec.Struct, forbid_unknown_fields=True):
    num_bytes: int
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Lock(msgspec.Struct):
    """The content of the lock file."""

    repo: str
    revision: Annotated[str, msgspec.Meta(pattern=COMMIT.pattern)]
    files: dict[Annotated[str, msgspec.Meta(pattern=SHARD_NAME.pattern)], LockedFile]  # {name: file}


class Hub(Source):
    uses = ("repo", "revision", "num_train_shards", "shards")
    needs = ("repo",)
    vocab_size = VOCAB_SIZE
    eos_token = EOS_TOKEN

    def __init__(self, data: DataConfig) -> None:
        super().__init__(data)
        if data.num_train_shards is None and data.shards is None:
            raise ValueError(f"data.num_train_shards is not set: source {data.source} needs it, or data.shards")

    @property
    def name(self) -> str:
        """The repository's name without suffix: kjj0/fineweb10B-gpt2 -> fineweb10B."""
        assert self.data.repo is not None  # needs
        return self.data.repo.split("/")[1].removesuffix("-gpt2")

    def folder(self) -> Path:
        return data_root() / self.name

    def files(self) -> dict[str, list[Expected]]:
        lock = self._read_lock()
        if lock is None:
            raise CheckFailed(self._not_fetched())
        missing = self._missing(lock)
        if missing:
            raise CheckFailed(f"{missing[0]} ({len(missing)} missing in all): {self._not_fetched()}")
        folder, wanted = self.folder(), self._wanted(lock)
        return {split: [Expected(folder / name, lock.files[name].sha256) for name in wanted[split]] for split in wanted}

    def obtain(self, fetch: bool, say: Callable[[str], None]) -> None:
        if not fetch:
            return
        lock = self._read_lock() or self._make_lock(say)
        missing = self._missing(lock)
        num_bytes = sum(lock.files[name].num_bytes for name in missing)
        atomic.remove_left(self.folder(), ".*.tmp")
        need_bytes(self.folder(), num_bytes, f"data={self.name}")
        if missing:
            origin = f"{lock.repo} at {lock.revision[:8]}"
            say(f"fetching {len(missing)} files, {format_bytes(num_bytes)}, of {origin}")
        for number, name in enumerate(missing, 1):
            started_s = time.monotonic()
            self._fetch(name, lock)
            took = f"{format_bytes(lock.files[name].num_bytes)} in {format_s(time.monotonic() - started_s)}"
            say(f"{number} of {len(missing)}: {name}, {took}, sha256 verified")

    def token_bytes(self) -> "np.ndarray":
        from bench.data.sources.userfiles import gpt2_token_bytes  # imports numpy, which is slow

        return gpt2_token_bytes()

    @property
    def origin(self) -> dict[str, str] | None:
        lock = self._read_lock()
        return None if lock is None else {"repo": lock.repo, "revision": lock.revision}

    def remedy(self, path: Path | str) -> str:
        return f"delete that file and fetch it again: ./run.sh data fetch {self.name}"

    def _not_fetched(self) -> str:
        return f"data={self.name} is not fetched yet: ./run.sh data fetch {self.name}"

    def _missing(self, lock: Lock) -> list[str]:
        wanted = self._wanted(lock)
        return [name for name in wanted["train"] + wanted["val"] if not (self.folder() / name).exists()]

    def _wanted(self, lock: Lock) -> dict[str, list[str]]:
        """Returns {"train": names, "val": names}: all of val, and of train those in data.shards or the first."""
        names: dict[str, list[str]] = {"train": [], "val": []}
        for name in sorted(lock.files):
            names[_split_and_number(name)[0]].append(name)
        if (numbers := self.data.shard_numbers) is not None:
            train = with_numbers(names["train"], numbers, lambda name: _split_and_number(name)[1], lock.repo)
            return names | {"train": train}
        num_wanted = self.data.num_train_shards or 0
        if num_wanted > len(names["train"]):
            raise ValueError(f"data.num_train_shards={num_wanted}: {lock.repo} has {len(names['train'])}: use fewer")
        return names | {"train": names["train"][:num_wanted]}

    # ---- the lock ----

    def _lock_path(self) -> Path:
        """Returns the lock file in conf/data; a checkout without one, such as an older one, uses the data's copy."""
        path = LOCKS / f"{self.name}.lock.json"
        beside = data_root() / path.name
        return beside if not path.exists() and (INSTALLED or beside.exists()) else path

    def _read_lock(self) -> Lock | None:
        path, mend = self._lock_path(), "restore it with git, or delete it and fetch again"
        try:
            lock = msgspec.json.decode(path.read_bytes(), type=Lock)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CheckFailed(f"{path}: not a lock ({error}): {mend}") from error
        for key in ("repo", "revision"):
            wanted, locked = getattr(self.data, key), getattr(lock, key)
            if wanted not in (None, locked):
                raise CheckFailed(f"data.{key}={wanted}: {path} is for {locked}: ask for that, or delete the lock")
        return lock

    def _make_lock(self, say: Callable[[str], None]) -> Lock:
        repo, revision = self.data.repo, self.data.revision
        options = {"revision": revision, "files_metadata": True}
        info = _ask(self.name, lambda hf: hf.HfApi(endpoint=_endpoint()).dataset_info(repo, **options))
        if revision is not None and COMMIT.fullmatch(revision) and info.sha != revision:
            raise CheckFailed(f"data.revision={revision}: the hub returned commit {info.sha}: use that, or try again")
        files = {
            file.rfilename: {"num_bytes": file.lfs.size, "sha256": file.lfs.sha256}
            for file in info.siblings
            if SHARD_NAME.match(file.rfilename) and file.lfs is not None
        }
        if not files:
            raise CheckFailed(f"data.repo={repo}: {info.sha} has no *_train_*.bin or *_val_*.bin: choose another one")
        lock = {"repo": repo, "revision": info.sha, "files": dict(sorted(files.items()))}
        self._lock_path().parent.mkdir(parents=True, exist_ok=True)
        atomic.write_json(self._lock_path(), lock)
        data_root().mkdir(parents=True, exist_ok=True)
        atomic.write_json(data_root() / self._lock_path().name, lock)
        stated = f"commit {info.sha} and {len(files)} hashes as the hub states them"
        say(f"{self._lock_path().name} now holds {stated}: keep it in git")
        checked = self._read_lock()
        assert checked is not None
        return checked

    def _fetch(self, name: str, lock: Lock) -> None:
        """Downloads a file; content that differs from the lock never appears under its name."""
        file = lock.files[name]
        where = {"repo_type": "dataset", "revision": lock.revision, "endpoint": _endpoint()}

        def download(hf: Any) -> None:
            url, headers = hf.hf_hub_url(self.data.repo, name, **where), hf.utils.build_hf_headers()
            about = {"expected_size": file.num_bytes, "displayed_filename": name}
            hf.file_download.http_get(url, bounded, headers=headers, **about)

        with atomic.replacing(self.folder() / name) as written:
            bounded = _Bounded(written, file.num_bytes)
            _ask(self.name, download)
            written.flush()
            again = f"./run.sh data fetch {self.name} starts it again"
            shards.check_hash(name, shards.sha256(written.name), file.sha256, again)


def _split_and_number(name: str) -> tuple[str, int]:
    """Returns ("train" or "val", the number) of a shard's name."""
    match = SHARD_NAME.match(name)
    assert match is not None  # checked when the lock was read
    return match[1], int(match[2])


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _ask(name: str, question: Callable[[Any], Any]) -> Any:
    """Returns question(huggingface_hub), and turns every way in which that can fail into one clear sentence."""
    try:
        import huggingface_hub
        import huggingface_hub.file_download
    except ImportError as error:
        hint = "pip install huggingface_hub, or use data=pysource"
        raise CheckFailed(f"data={name} needs huggingface_hub ({error}): {hint}") from error
    try:
        return question(huggingface_hub)
    except Exception as error:  # errors of the hub, its HTTP library and the system differ between releases
        why = f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
        remedy = "try again, run without network (data=pysource), or read shards that you have (data=shards)"
        raise CheckFailed(f"data={name} could not be fetched from {_endpoint()} ({why}): {remedy}") from error


class _Bounded:
    """A file that accepts at most num_bytes, whatever a server sends."""

    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        self._file, self._num_bytes = file, num_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        if self._file.tell() + len(data) > self._num_bytes:
            raise ValueError(f"the server sends more than the {self._num_bytes} bytes that this file has")
        return self._file.write(data)
