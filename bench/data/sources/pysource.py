"""Makes tokens of text that every machine has: the Python sources of three pinned pure-Python dependencies, as bytes.

A document is a .py file: token 256, then its bytes as they are on disk. Documents are ordered by the sha256 of their
path inside the package folder, so that train and val are alike on every operating system. The first documents, up to
MIN_VAL_TOKENS tokens, are val; the rest is train. The same lock gives the same bytes, whose hashes are in
conf/data/pysource.yaml.
"""

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.data import shards
from bench.data.shards import CheckFailed
from bench.data.sources.source import Made

if TYPE_CHECKING:
    import numpy as np

PACKAGES = {"hydra": "hydra-core==1.3.8", "omegaconf": "omegaconf==2.3.1", "antlr4": "antlr4-python3-runtime==4.9.3"}
DOCUMENT = 256  # the token before each document
MIN_VAL_TOKENS = 131073  # 2**17 targets and the token before the first
INSTALL = "install them as requirements.lock says: pip install --no-deps -r requirements.lock"


class PySource(Made):
    uses = needs = ("train_sha256", "val_sha256")
    vocab_size = 257
    eos_token = DOCUMENT

    def recipe(self) -> dict[str, Any]:
        return {"packages": list(PACKAGES.values()), "min_val_tokens": MIN_VAL_TOKENS}

    def num_bytes(self) -> int:
        return 8 << 20  # the files are 2.6 MB together

    def make(self, folder: Path, say: Callable[[str], None]) -> None:
        documents = ordered(read_packages(PACKAGES))
        val, train = split(documents, MIN_VAL_TOKENS)
        shards.write(folder / "val_000000.bin", as_tokens(val))
        shards.write(folder / "train_000000.bin", as_tokens(train))

    def token_bytes(self) -> "np.ndarray":
        return byte_sizes(self.vocab_size)

    def wrong_hash(self, key: str, wanted: str, digest: str) -> str:
        versions = []
        for requirement in PACKAGES.values():
            name = requirement.split("==")[0]
            try:
                versions.append(f"{name}=={importlib.metadata.version(name)}")
            except importlib.metadata.PackageNotFoundError:
                versions.append(f"{name} of unknown version")
        if versions == list(PACKAGES.values()):
            cause = f"{', '.join(versions)} are the right versions, so a .py file in them was changed: reinstall them"
        else:
            cause = f"it is made from {', '.join(PACKAGES.values())}; found {', '.join(versions)}: {INSTALL}"
        return f"{super().wrong_hash(key, wanted, digest)}: {cause}"


def read_packages(packages: Mapping[str, str]) -> dict[str, bytes]:
    """Returns {"hydra/main.py": bytes} of {import name: requirement}, without importing any of them."""
    documents = {}
    for package, requirement in packages.items():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise CheckFailed(f"data=pysource is made from {requirement}, which is not installed: {INSTALL}")
        top = Path(spec.origin).parent
        for path in top.rglob("*.py"):
            if path.is_file():
                documents[f"{package}/{path.relative_to(top).as_posix()}"] = path.read_bytes()
    return documents


def ordered(documents: Mapping[str, bytes]) -> list[bytes]:
    """Returns the documents in the order of their paths' sha256."""
    return [documents[path] for path in sorted(documents, key=lambda path: hashlib.sha256(path.encode()).hexdigest())]


def split(documents: list[bytes], min_val_tokens: int) -> tuple[list[bytes], list[bytes]]:
    """Returns (val, train): val takes whole documents until it has min_val_tokens tokens."""
    num_tokens = 0
    for number, document in enumerate(documents):
        if num_tokens >= min_val_tokens:
            return documents[:number], documents[number:]
        num_tokens += 1 + len(document)
    raise CheckFailed(f"data=pysource found {num_tokens} tokens, too few for val and train: {INSTALL}")


def byte_sizes(vocab_size: int) -> "np.ndarray":
    """Returns Source.token_bytes() of bytes: 1 for each of the first 256 tokens, 0 for the marks after them."""
    import numpy as np

    return (np.arange(vocab_size) < 256).astype(np.int64)


def as_tokens(documents: list[bytes]) -> "np.ndarray":
    """Returns the bytes of documents as uint16, with token 256 before each document."""
    import numpy as np  # not needed if a launcher only checks what was made before

    pieces = [piece for text in documents for piece in ([DOCUMENT], np.frombuffer(text, np.uint8))]
    return np.concatenate(pieces, dtype=np.uint16, casting="unsafe")
