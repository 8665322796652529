"""Final weights as a file: the format itself, what is refused, and a run whose recorded loss they give again."""

import json
import re
import subprocess
import sys

import pytest
import real_runs
import torch

from bench.config import schema
from bench.training import weights
from bench.training.model import build_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with checkpoint.save=true."""
    overrides = ["track=free", "model=windowed", "checkpoint.save=true", "hardware.num_threads=1", "seed=3"]
    return real_runs.run(tmp_path_factory.mktemp("results"), *overrides)


def test_the_bytes_are_those_of_the_format(tmp_path):
    """The header by hand, from the format's description."""
    path = tmp_path / "checkpoint" / "weights.safetensors"
    weights.write(path, {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor(True)}, {"step": "4"})
    data = path.read_bytes()
    num_bytes = int.from_bytes(data[:8], "little")
    assert (8 + num_bytes) % 8 == 0 and data[8:9] == b"{"
    assert json.loads(data[8 : 8 + num_bytes]) == {
        "__metadata__": {"step": "4"},
        "a": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]},
        "b": {"dtype": "BOOL", "shape": [], "data_offsets": [8, 9]},
    }
    assert data[8 + num_bytes :] == bytes.fromhex("0000803f") + bytes.fromhex("00000040") + b"\x01"


@pytest.mark.parametrize("dtype", list(weights.NAMES))
def test_what_is_written_is_read_bit_for_bit(tmp_path, dtype):
    written = (torch.arange(24).reshape(4, 6) % 3).to(dtype)
    tensors = {"whole": written, "turned": written.T, "one": written[0, 1], "none": written[:0], "row": written[2]}
    weights.write(tmp_path / "x" / "w.safetensors", tensors, {})
    read = weights.read(tmp_path / "x" / "w.safetensors")
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype is dtype and torch.equal(read[name], tensor)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 16,
        (9).to_bytes(8, "little") + b'{"a": 1}',
        (2).to_bytes(8, "little") + b"[]",
        (140).to_bytes(8, "little")
        + json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in ("a", "b")})
        .ljust(140)
        .encode()
        + b"1234",
        (66).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}           ' + b"1234",
        (65).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}           ' + b"12345678",
    ],
)
def test_another_file_is_refused(tmp_path, data):
    (tmp_path / "w").write_bytes(data)
    with pytest.raises(ValueError, match="w: is not a safetensors file, or is damaged"):
        weights.read(tmp_path / "w")


def test_a_dtype_that_the_format_lacks_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match="z: torch.complex64 has no name in the safetensors format"):
        weights.write(tmp_path / "x" / "w", {"z": torch.zeros(1, dtype=torch.complex64)}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_run_saves_its_weights_off_the_clock_and_its_record_has_their_hash(saved):
    run = real_runs.run_json(saved)
    (artifact,) = [file for file in run["artifacts"] if file["path"] == weights.FILE]
    assert artifact["role"] == "checkpoint" and re.fullmatch("[0-9a-f]{64}", artifact["sha256"])
    assert run["measured"]["checkpoint_s"] > 0
    events = [json.loads(line) for line in (saved / "events.jsonl").read_text().splitlines()]
    assert (saved / weights.FILE).stat().st_mtime > 0 and "run_stop" in [event["event"] for event in events]
    about = weights.metadata(saved / weights.FILE)
    assert (about["run_id"], about["step"], about["seed"]) == (run["run_id"], "6", "3")
    assert float(about["val_loss"]) == run["metrics"]["val_loss"]
    assert real_runs.bench(saved.parents[1], "verify", str(saved)).returncode == 0


def test_the_example_of_the_docs_gives_a_likely_next_byte(saved, tmp_path):
    text = (real_runs.REPO / "docs/record.md").read_text()
    (example, read_only) = re.findall(r"```python\n(.*?)```", text, re.S)
    (tmp_path / "example.py").write_text(f"import torch\ntorch.set_num_threads(1)\n{example}")
    env = real_runs.environment(saved.parents[1], PYTHONPATH=str(real_runs.REPO))
    done = subprocess.run([sys.executable, tmp_path / "example.py", saved], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch("next byte: .\n", done.stdout, re.S)
    assert "weights.read(" in read_only


def test_weights_of_another_model_and_a_run_without_are_refused(saved, tmp_path):
    folder = real_runs.copy_of(saved, tmp_path / "results")
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(re.sub(r"num_layers: \d+", "num_layers: 3", config))
    with pytest.raises(ValueError, match="weights.safetensors: does not fit the model of config.yaml"):
        weights.model_of(folder)
    (folder / weights.FILE).unlink()
    with pytest.raises(ValueError, match="run again with checkpoint.save=true"):
        weights.model_of(folder)


def test_the_file_holds_every_parameter_of_the_model(saved):
    model = weights.model_of(saved)
    assert not model.training and model.window_tokens > 0
    tensors = weights.read(saved / weights.FILE)
    assert all(torch.equal(tensors[name], parameter) for name, parameter in model.named_parameters())
    config = schema.read(saved)
    fresh = dict(build_model(config, torch.device("cpu"), None).named_parameters())
    assert set(fresh) <= set(tensors) and any(not torch.equal(tensors[name], fresh[name]) for name in fresh)
