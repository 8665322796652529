"""Reads folders on this machine, on another machine or in an object store, through one class.

    path              user@host:path, ssh:host:path, ssh://host:port/path (the package sshfs)
    s3://bucket/path  (s3fs; AWS_ENDPOINT_URL names a compatible store), and what else fsspec knows: gs://, hf://

Keys and passwords come from the usual places: ssh's agent and configuration, AWS's variables and profiles.
"""

import copy
import os
import re
from pathlib import Path
from typing import Any, BinaryIO

from bench.base import credentials
from bench.base.paths import shown, user_path
from bench.base.reading import plain_file
from bench.base.reading.damage import Missing
from bench.base.units import MIB

SSH = re.compile(r"(?:ssh:(?!//))?(?:(?P<user>[^/:@\s]+)@)?(?P<host>[^/:@\s]+):(?P<path>(?!//).+)")
URL = re.compile(r"\w[\w+.-]*://")
PACKAGES = {"ssh": "sshfs", "sftp": "sshfs", "s3": "s3fs", "s3a": "s3fs"}
CONNECT_S = 30


class Place:
    """A folder to read from.  word: the folder as the user typed it.

    Raises ValueError if it cannot be reached or the package that reads it is not installed.
    """

    def __init__(self, place: str):
        self._fs: Any = None  # a file system of fsspec; None: a folder on this machine
        ssh = SSH.fullmatch(place) if place.startswith("ssh:") or "@" in place.partition(":")[0] else None
        if not URL.match(place) and (ssh is None or user_path(place).exists()):
            self._root = str(user_path(place))
            self._name = shown(self._root)
            if not os.path.isdir(self._root):
                raise ValueError(f"{place}: is not a folder: name a results folder, USER@HOST:PATH or s3://BUCKET/PATH")
            return
        self._name = credentials.redacted(place)
        import fsspec

        scheme = "ssh" if ssh else place.partition("://")[0]
        try:
            if ssh:
                user = {"username": ssh["user"]} if ssh["user"] else {}
                self._fs = fsspec.filesystem("ssh", host=ssh["host"], connect_timeout=CONNECT_S, **user)
                self._root = ssh["path"].rstrip("/")
            else:
                self._fs, root = fsspec.core.url_to_fs(place)
                self._root = str(root).rstrip("/")
        except ImportError:
            needed = PACKAGES.get(scheme, f"of fsspec for {scheme}://")
            raise ValueError(f"{self._name}: needs the package {needed}: pip install {needed}") from None
        except Exception as error:  # libraries raise any class: no connection, no key, an unknown scheme
            raise ValueError(f"{self._name}: cannot be reached ({_reason(error)})") from None

    def __str__(self) -> str:
        return self._name

    @property
    def folder(self) -> Path | None:
        """The path of the folder if it is on this machine, else None."""
        return Path(self._root) if self._fs is None else None

    def below(self, path: str) -> "Place":
        """Returns a folder in this one, which need not exist."""
        part = copy.copy(self)
        part._root, part._name = self._path(path), f"{self}/{path}"
        return part

    def names(self, path: str = "", files: bool = False) -> list[str]:
        """Returns the sorted names of the folders (or files) at path; [] if it does not exist.

        Raises ValueError if it cannot be listed.
        """
        try:
            if self._fs is None:
                with os.scandir(self._path(path)) as entries:
                    kind = os.DirEntry.is_file if files else os.DirEntry.is_dir
                    return sorted(entry.name for entry in entries if kind(entry, follow_symlinks=False))
            listed = self._fs.ls(self._path(path), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except Exception as error:
            raise ValueError(f"{self}/{path}: cannot be listed ({_reason(error)})") from None
        kind_name = "file" if files else "directory"
        return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in listed if entry["type"] == kind_name)

    def read(self, path: str, max_bytes: int = plain_file.MAX_BYTES) -> bytes | None:
        """Returns the bytes of a file, or None if it does not exist.  Raises ValueError if it cannot be read."""
        try:
            with self._opened(path) as file:
                content = file.read(max_bytes + 1)
        except (FileNotFoundError, Missing):
            return None
        except Exception as error:
            raise ValueError(f"{self}/{path}: cannot be read ({_reason(error)})") from None
        if len(content) > max_bytes:
            raise ValueError(f"{self}/{path}: has more than {max_bytes:,} bytes: restore it")
        return bytes(content)

    def copy(self, path: str, target: Path, num_bytes: int) -> None:
        """Copies a file that should have num_bytes to target, durably; of a longer file, one byte more is copied.

        Raises Missing if it does not exist, ValueError if it cannot be read, OSError if target cannot be written.
        """
        remaining = num_bytes + 1
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "xb") as copied:
                with self._opened(path) as file:
                    while remaining and (block := file.read(min(remaining, MIB))):
                        remaining -= len(block)
                        copied.write(block)
                copied.flush()
                os.fsync(copied.fileno())
        except Exception as error:
            if isinstance(error, (FileNotFoundError, Missing)):
                raise Missing(f"{path}: is not there") from None
            if isinstance(error, OSError) and error.errno in plain_file.FULL:
                raise OSError(error.errno, error.strerror, str(target)) from error
            raise ValueError(f"{path}: cannot be copied ({_reason(error)})") from None

    def _opened(self, path: str) -> BinaryIO:
        if self._fs is None:
            return plain_file.opened(self._path(path))
        file: BinaryIO = self._fs.open(self._path(path), "rb")
        return file

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")


def _reason(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0][:200]
    return credentials.redacted(text or type(error).__name__)
