"""The interface of every data source, and what made ones share: data are made once, under a name that identifies them.

A made dataset's folder is named after its recipe, which is all that determines its bytes. Other settings or inputs give
another folder, so nothing stale is read. made.json in it holds the sha256 of each file.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bench.base import atomic
from bench.base.paths import project_folder, user_path
from bench.base.units import format_bytes
from bench.config import user_code
from bench.config.schema import DataConfig
from bench.data import shards
from bench.data.shards import CheckFailed

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
ALWAYS = ("source", "vocab_size", "seq_len", "batch_tokens", "bos_aligned")  # fields of DataConfig for every source
MANIFEST = "made.json"


@dataclass(frozen=True)
class Expected:
    """A file of a dataset and its expected sha256, None for the user's own shards, whose hashes are not known."""

    path: Path
    sha256: str | None


def data_root() -> Path:
    """Returns the data folder: SPEEDRUN_DATA, or .data in project_folder()."""
    return user_path(os.environ.get("SPEEDRUN_DATA") or project_folder() / ".data")


def need_bytes(folder: Path, num_bytes: int, name: str) -> None:
    """Raises CheckFailed, before anything is written, if the disk is too full."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        need = f"{name} needs {format_bytes(num_bytes)} in {folder}, which has {format_bytes(free)} free"
        raise CheckFailed(f"{need}: make room, or name another folder with SPEEDRUN_DATA=/path")


def with_numbers(paths: list[T], numbers: list[int], number_of: Callable[[T], int | None], name: str) -> list[T]:
    """Returns the paths with these numbers, in this order. Raises ValueError if one is missing."""
    by_number = {number_of(path): path for path in paths}
    lacking = [number for number in numbers if number not in by_number]
    if lacking:
        available = sorted(number for number in by_number if number is not None)
        span = f"{available[0]} to {available[-1]}" if available else "none with a number in its name"
        raise ValueError(f"data.shards: {name} has no shard {lacking[0]}: it has {span}")
    return [by_number[number] for number in numbers]


class Source:
    """A source with its settings checked: vocab_size, name and files() describe it; obtain() makes or fetches it."""

    uses: tuple[str, ...] = ()  # other fields of DataConfig that this source uses
    needs: tuple[str, ...] = ()  # those of them that must be set
    vocab_size: int | None = None
    eos_token: int | None = None  # the token before each document, if there is one
    floor_source: Any = None  # has floor_nats(tokens) if the true distribution is known

    def __init__(self, data: DataConfig) -> None:
        self.data = data
        for field in dataclasses.fields(data):
            value = getattr(data, field.name)
            if value is not None and field.name not in (*ALWAYS, *self.uses):
                raise ValueError(f"data.{field.name}={value}: it has no effect with source {data.source}: remove it")
            if value is None and field.name in self.needs:
                raise ValueError(f"data.source={data.source} needs data.{field.name}: give data.{field.name}=VALUE")
        if self.vocab_size is not None and data.vocab_size not in (None, self.vocab_size):
            raise ValueError(f"data.vocab_size={data.vocab_size}: this data has {self.vocab_size}: remove the setting")
        if data.bos_aligned and self.eos_token is None:
            give = ", or give data.eos_token" * ("eos_token" in self.uses)
            raise ValueError(f"data.bos_aligned=True: source {data.source} marks no documents: remove it{give}")

    @property
    def name(self) -> str:
        return user_code.short(self.data.source)

    @property
    def origin(self) -> dict[str, str] | None:
        """{"repo", "revision"} from which its bytes can be fetched again; None if they were made, or the user's."""
        return None

    def files(self) -> dict[str, list[Expected]]:
        """Returns {"train": [Expected], "val": [Expected]}. Raises CheckFailed with the remedy if they do not exist."""
        raise NotImplementedError

    def obtain(self, fetch: bool, say: Callable[[str], None]) -> None:
        """Makes what can be made here; uses the network only if fetch."""

    def token_bytes(self) -> "np.ndarray":
        """Returns [vocab_size] the bytes of text that each token stands for, 0 for a document's mark.

        Raises ValueError if they are unknown, so that no loss can be given in bits per byte.
        """
        where = f"source {self.name} does not say how many bytes its tokens encode"
        raise ValueError(
            f"{where}: use data=pysource, text, shards, fineweb10B or finewebedu10B, or give token_bytes() to it"
        )

    def remedy(self, path: Path | str) -> str:
        """Returns what to do about a damaged file."""
        return "get it again"


class Made(Source):
    """A source whose shards are made on this machine."""

    def recipe(self) -> dict[str, Any]:
        """Returns all that determines the bytes, as JSON types."""
        raise NotImplementedError

    def num_bytes(self) -> int:
        """Returns an upper bound of the bytes that will be written."""
        raise NotImplementedError

    def make(self, folder: Path, say: Callable[[str], None]) -> None:
        """Writes train_%06d.bin and val_%06d.bin into an empty folder."""
        raise NotImplementedError

    def folder(self) -> Path:
        files = user_code.sources(
            filter(user_code.is_import_path, [self.data.source])
        )  # the user's code determines the bytes
        own = {"code": {name: shards.sha256(path) for name, path in files.items()}} if files else {}
        text = json.dumps(self.recipe() | own, sort_keys=True)
        return data_root() / f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def files(self) -> dict[str, list[Expected]]:
        folder = self.folder()
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            files = _expected(folder, manifest)
        except FileNotFoundError as error:
            raise CheckFailed(f"data={self.name} does not exist yet: ./run.sh data make {self.name}") from error
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CheckFailed(f"{folder / MANIFEST}: cannot be read ({error}): {self.remedy(folder)}") from error
        self._check_hashes(files)
        return files

    def obtain(self, fetch: bool, say: Callable[[str], None]) -> None:
        folder = self.folder()
        if (folder / MANIFEST).exists():
            return
        need_bytes(folder.parent, self.num_bytes(), f"data={self.name}")
        say(f"building {folder.name} (at most {format_bytes(self.num_bytes())})")
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as beside:
            temporary = Path(beside, folder.name)
            temporary.mkdir()
            self.make(temporary, say)
            files = {split: sorted(temporary.glob(f"{split}_*.bin")) for split in ("train", "val")}
            digests = {split: {path.name: shards.sha256(path) for path in files[split]} for split in files}
            self._check_hashes(_expected(temporary, digests))
            atomic.write_json(temporary / MANIFEST, digests | {"recipe": self.recipe()})
            with contextlib.suppress(OSError):  # another process has made the same meanwhile
                temporary.rename(folder)
        if not (folder / MANIFEST).exists():
            raise CheckFailed(f"{folder} is where data={self.name} belongs: move or delete that folder")

    def remedy(self, path: Path | str) -> str:
        return f"delete {self.folder()} and make it again: ./run.sh data make {self.name}"

    def _check_hashes(self, files: dict[str, list[Expected]]) -> None:
        """Checks the files against the hashes that the settings require, if they do."""
        for split, expected in files.items():
            wanted = getattr(self.data, f"{split}_sha256")
            digests = [file.sha256 or "" for file in expected]
            if wanted is not None and digests != [wanted]:
                raise CheckFailed(self.wrong_hash(f"data.{split}_sha256", wanted, ", ".join(digests)))

    def wrong_hash(self, key: str, wanted: str, digest: str) -> str:
        return f"{key}={wanted}: the generated file has the hash {digest}"


def _expected(folder: Path, digests: dict[str, dict[str, str]]) -> dict[str, list[Expected]]:
    """Converts {"train": {name: sha256}, "val": ...} to {"train": [Expected], "val": ...}."""
    splits = ("train", "val")
    return {split: [Expected(folder / name, sha256) for name, sha256 in digests[split].items()] for split in splits}
