"""Ready shards of a Hugging Face dataset repository, such as kjj0/fineweb10B-gpt2: one commit, every file hashed.

Which bytes are meant is in a lock file, conf/data/NAME.lock.json: the commit, and for each shard the size and sha256
that the hub states (it stores them for every large file).  Where there is no lock yet, the first fetch asks the hub for
the commit data.revision, or for its current one if that is null, and writes it: commit it with your code.  From then on
exactly these bytes are taken and anything else is refused.  What the hub says at that first fetch is believed.

Files arrive in NAME/incoming (huggingface_hub goes on with a broken download there) and get their name when their hash
is right.
"""

import json
import os
import re
import time
from dataclasses import dataclass

from bench import shards
from bench.shards import CheckFailed
from bench.sources.base import REPO, Expected, Source, data_root, need_bytes
from bench.units import format_bytes, format_s

LOCKS = REPO / "conf" / "data"
SHARD_NAME = re.compile(r"[^/]*_(train|val)_\d+\.bin")
COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
VOCAB_SIZE = 50257  # these repositories hold GPT-2 tokens


@dataclass(frozen=True)
class Locked:
    """A file of the lock."""

    name: str
    num_bytes: int
    sha256: str


class Hub(Source):
    uses = ("repo", "revision", "num_train_shards")
    needs = ("repo", "num_train_shards")
    vocab_size = VOCAB_SIZE

    def __init__(self, data):
        super().__init__(data)
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", data.repo):
            raise ValueError(f"data.repo={data.repo}: use OWNER/NAME as in kjj0/fineweb10B-gpt2")
        if data.num_train_shards < 1:
            raise ValueError(f"data.num_train_shards={data.num_train_shards}: use 1 or more")

    @property
    def name(self):
        """kjj0/fineweb10B-gpt2 -> fineweb10B."""
        return self.data.repo.split("/")[1].removesuffix("-gpt2")

    def folder(self):
        return data_root() / self.name

    def files(self):
        lock = self._read_lock()
        if lock is None:
            raise CheckFailed(self._not_fetched())
        files = self._wanted(lock)
        missing = [file.name for split in files.values() for file in split if not (self.folder() / file.name).exists()]
        if missing:
            raise CheckFailed(f"{missing[0]} and {len(missing) - 1} more missing: {self._not_fetched()}")
        return {split: [Expected(self.folder() / file.name, file.sha256) for file in some] for split, some in files.items()}

    def obtain(self, fetch, say):
        if not fetch:
            return
        lock = self._read_lock() or self._make_lock(say)
        files = [file for split in self._wanted(lock).values() for file in split]
        missing = [file for file in files if not (self.folder() / file.name).exists()]
        if not missing:
            return
        num_bytes = sum(file.num_bytes for file in missing)
        need_bytes(self.folder(), num_bytes, f"data={self.name}")
        say(f"fetching {len(missing)} files, {format_bytes(num_bytes)}, of {lock['repo']} at {lock['revision'][:8]}")
        for number, file in enumerate(missing, 1):
            started_s = time.monotonic()
            self._fetch(file, lock["revision"])
            say(f"{number} of {len(missing)}: {file.name}, {format_bytes(file.num_bytes)}, {format_s(time.monotonic() - started_s)}, sha256 right")

    def remedy(self, path):
        return f"delete it and fetch it again: ./run.sh data fetch {self.name}"

    def _not_fetched(self):
        return f"data={self.name} is not fetched yet: ./run.sh data fetch {self.name}"

    def _wanted(self, lock):
        """lock -> {"train": [Locked], "val": [Locked]}: all of val and the first num_train_shards of train."""
        files = {"train": [], "val": []}
        for name in sorted(lock["files"]):
            files[SHARD_NAME.fullmatch(name)[1]].append(Locked(name, **lock["files"][name]))
        if self.data.num_train_shards > len(files["train"]):
            raise ValueError(f"data.num_train_shards={self.data.num_train_shards}: {lock['repo']} has {len(files['train'])}")
        return {"train": files["train"][: self.data.num_train_shards], "val": files["val"]}

    # ---- the lock ----

    def _lock_path(self):
        return LOCKS / f"{self.name}.lock.json"

    def _read_lock(self):
        path = self._lock_path()
        try:
            lock = json.loads(path.read_text())
            good = COMMIT.fullmatch(lock["revision"]) and all(
                SHARD_NAME.fullmatch(name) and set(file) == {"num_bytes", "sha256"} and SHA256.fullmatch(file["sha256"])
                for name, file in lock["files"].items()
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckFailed(f"{path}: not a lock ({error!r}): take it back from git, or delete it and fetch again") from error
        if not good:
            raise CheckFailed(f"{path}: its commit, a file name or a sha256 has not the right form: take it back from git")
        for knob in ("repo", "revision"):
            asked = getattr(self.data, knob)
            if asked not in (None, lock[knob]):
                raise CheckFailed(f"data.{knob}={asked}: {path} is for {lock[knob]}: ask for that, or delete the lock to move on")
        return lock

    def _make_lock(self, say):
        info = _ask(self.name, lambda hub: hub.dataset_info(self.data.repo, revision=self.data.revision, files_metadata=True))
        asked = self.data.revision
        if asked is not None and COMMIT.fullmatch(asked) and info.sha != asked:
            raise CheckFailed(f"data.revision={asked}: the hub answered with commit {info.sha}: try again or ask for that one")
        files = {
            file.rfilename: {"num_bytes": file.lfs.size, "sha256": file.lfs.sha256}
            for file in info.siblings
            if SHARD_NAME.fullmatch(file.rfilename) and file.lfs is not None
        }
        if not files:
            raise CheckFailed(f"data.repo={self.data.repo}: at {info.sha} it has no *_train_*.bin or *_val_*.bin: choose another one")
        lock = {"repo": self.data.repo, "revision": info.sha, "files": dict(sorted(files.items()))}
        with shards.replacing(self._lock_path()) as file:
            file.write((json.dumps(lock, indent=1) + "\n").encode())
        say(f"{self._lock_path().name} now holds commit {info.sha} and {len(files)} hashes as the hub states them: keep it in git")
        return self._read_lock()

    # ---- a file ----

    def _fetch(self, file, revision):
        incoming = self.folder() / "incoming"
        _ask(self.name, lambda hub: hub.hf_hub_download(
            self.data.repo, file.name, repo_type="dataset", revision=revision, local_dir=incoming
        ))  # fmt: skip
        path = incoming / file.name
        digest = shards.sha256(path)
        if digest != file.sha256:
            raise CheckFailed(
                f"{path}: sha256 {digest}, but {self._lock_path().name} says {file.sha256}: the transfer or the hub's copy "
                f"is damaged; {self.remedy(path)}"
            )
        os.replace(path, self.folder() / file.name)


def _ask(name, question):
    """question(hub) with every way in which the hub can fail turned into one clear sentence."""
    remedy = "try again, race without network (data=pysource), or read shards that you have (./run.sh data show shards)"
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckFailed(f"data={name} needs huggingface_hub ({error}): pip install huggingface_hub, or use data=pysource") from error
    endpoint = os.environ.get("HF_ENDPOINT") or None
    try:
        return question(huggingface_hub.HfApi(endpoint=endpoint))
    except (AssertionError, MemoryError):
        raise
    except Exception as error:  # the hub's own, its HTTP library's and the system's; they differ from release to release
        why = str(error).strip().split("\n")[0]
        where = endpoint or "https://huggingface.co"
        raise CheckFailed(f"data={name} could not be fetched from {where} ({type(error).__name__}: {why}): {remedy}") from error
