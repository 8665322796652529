"""Fetching ready shards with the real huggingface_hub from a hub on localhost: pinned, hashed, refused."""

import hashlib
import http.server
import json
import os
import re
import sys
import threading

import numpy as np
import pytest
import yaml

from bench.config import schema
from bench.data import shards
from bench.data.shards import CheckFailed
from bench.data.sources import datasets
from bench.data.sources import hub as hub_source

huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub: pip install huggingface_hub")

REPO = "someone/tiny10B-gpt2"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
VAL, ONE, TWO = "tiny_val_000000.bin", "tiny_train_000001.bin", "tiny_train_000002.bin"
LOCK = "tiny10B.lock.json"


class FakeHub:
    """Answers on localhost what huggingface_hub asks of a dataset: with FakeHub({"x_val_000000.bin": bytes}) as hub.

    cut_next: number of bytes after which the next download breaks off; files are then refused until it is None again.
    """

    def __init__(self, files):
        self.files, self.requests, self.cut_next, self.commit = dict(files), [], None, COMMIT
        self.stated = {name: hashlib.sha256(body).hexdigest() for name, body in files.items()}

    def __enter__(self):
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *exc_info):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def info(self):
        def sibling(name, body):
            lfs = {"sha256": self.stated[name], "size": len(body), "pointerSize": 134}
            return {"rfilename": name, "size": len(body), "blobId": "0" * 40, "lfs": lfs}

        readme = {"rfilename": "README.md", "size": 1, "blobId": "1" * 40}
        siblings = [*(sibling(name, body) for name, body in self.files.items()), readme]
        facts = {"private": False, "downloads": 0, "likes": 0, "tags": []}
        return facts | {"id": REPO, "sha": self.commit, "siblings": siblings}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"  # one request per connection, so that none stays open after a test

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, with_body):
        self.hub.requests.append((self.command, self.path, self.headers.get("Range")))
        path = self.path.split("?")[0]
        if path == f"/api/datasets/{REPO}" or re.fullmatch(rf"/api/datasets/{REPO}/revision/\w+", path):
            return self._send(
                200, json.dumps(self.hub.info()).encode(), {"Content-Type": "application/json"}, with_body
            )
        match = re.fullmatch(rf"/datasets/{REPO}/resolve/(\w+)/(.+)", path)
        if not match or match[1] != self.hub.commit or match[2] not in self.hub.files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
        if with_body and self.hub.cut_next == 0:
            return self._send(403, b"", {}, with_body)
        body = self.hub.files[match[2]]
        headers = {"ETag": f'"{self.hub.stated[match[2]]}"', "X-Repo-Commit": self.hub.commit, "Accept-Ranges": "bytes"}
        start = int(self.headers["Range"].split("=")[1].split("-")[0]) if "Range" in self.headers else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        self._send(206 if start else 200, body[start:], headers, with_body)

    def _send(self, status, body, headers, with_body):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            if self.hub.cut_next and "/resolve/" in self.path:
                body, self.hub.cut_next = body[: self.hub.cut_next], 0
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with two train shards of 80,000 tokens and a val shard; data root and locks are the test's own."""
    import huggingface_hub.constants

    monkeypatch.setenv("SPEEDRUN_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(hub_source, "LOCKS", tmp_path / "locks")
    # small files break off in the middle too
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 4096)

    def body(seed):
        shards.write(tmp_path / "x.bin", np.arange(80_000) * seed % 50257)
        return (tmp_path / "x.bin").read_bytes()

    with FakeHub({VAL: body(3), ONE: body(7), TWO: body(11), "tiny_notes.txt": b"x"}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.said = []
        yield hub


def settings(**values):
    values = {"source": "hub", "seq_len": 1, "batch_tokens": 1, "repo": REPO, "num_train_shards": 1} | values
    return schema.build(schema.DataConfig, values)


def fetch(hub, **values):
    return datasets.prepare(settings(**values), fetch=True, say=hub.said.append)


def fetched(hub):
    """The names of the files that were requested, in order."""
    return [path.split("/")[-1] for command, path, _ in hub.requests if command == "GET" and "/resolve/" in path]


def test_fetches_the_val_shard_and_as_many_train_shards_as_asked(hub):
    dataset = fetch(hub)
    assert (dataset.name, dataset.vocab_size) == ("tiny10B", 50257)
    assert [file.path.name for file in dataset.train + dataset.val] == [ONE, VAL]
    assert [file.sha256 for file in dataset.train + dataset.val] == [hub.stated[ONE], hub.stated[VAL]]
    assert fetched(hub) == [ONE, VAL]
    assert any("fetching 2 files, 314.5 KiB" in line for line in hub.said)


def test_the_first_fetch_writes_down_the_commit_and_the_hash_of_every_shard(hub, tmp_path):
    fetch(hub)
    lock = json.loads((tmp_path / "locks" / LOCK).read_text())
    assert (lock["repo"], lock["revision"]) == (REPO, COMMIT)
    assert lock["files"] == {name: {"num_bytes": 161024, "sha256": hub.stated[name]} for name in (ONE, TWO, VAL)}


def test_an_installed_program_keeps_its_lock_beside_the_data(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_source, "INSTALLED", True)
    fetch(hub)
    kept = tmp_path / "data" / LOCK
    assert not (tmp_path / "locks").exists() and json.loads(kept.read_text())["revision"] == COMMIT
    (tmp_path / "locks").mkdir()
    kept.rename(tmp_path / "locks" / LOCK)  # the package's own comes first
    fetch(hub)
    assert not kept.exists()


def test_what_is_there_and_right_is_not_fetched_again(hub):
    first = fetch(hub)
    hub.requests.clear()
    assert fetch(hub) == first == datasets.prepare(settings(), fetch=False)
    assert hub.requests == []  # not even asked
    fetch(hub, num_train_shards=2)
    assert fetched(hub) == [TWO]


def test_later_fetches_take_the_locked_commit_also_when_the_hub_has_another(hub):
    fetch(hub)
    hub.requests.clear()
    hub.commit = "f" * 40  # the repository has moved on
    with pytest.raises(CheckFailed, match="could not be fetched"):
        fetch(hub, num_train_shards=2)
    assert all(COMMIT in path for _, path, _ in hub.requests)


def test_a_broken_fetch_leaves_no_file_and_the_next_begins_it_again(hub, tmp_path):
    hub.cut_next = 100_000
    with pytest.raises(CheckFailed, match="could not be fetched from http://127.0.0.1.*403"):
        fetch(hub)
    assert list((tmp_path / "data" / "tiny10B").iterdir()) == []
    with pytest.raises(CheckFailed, match=f"{ONE} .*data fetch tiny10B"):
        datasets.find(settings())
    hub.cut_next = None
    assert fetch(hub).train[0].sha256 == hub.stated[ONE]


def test_what_a_killed_fetch_left_is_removed_by_a_later_one(hub, tmp_path):
    old, new = (tmp_path / "data" / "tiny10B" / f".{ONE}.{pid}.tmp" for pid in (1, 2))
    old.parent.mkdir(parents=True)
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    fetch(hub)
    assert new.exists() and not old.exists()


def test_a_file_with_the_wrong_hash_never_gets_its_name(hub, tmp_path):
    hub.files[ONE] = hub.files[ONE][:-1] + bytes([hub.files[ONE][-1] ^ 1])
    with pytest.raises(CheckFailed, match=rf"{ONE}: sha256 .* instead of {hub.stated[ONE]}.*starts it again"):
        fetch(hub)
    assert list((tmp_path / "data" / "tiny10B").iterdir()) == []


def test_nothing_is_written_through_a_link(hub, tmp_path):
    path, other = tmp_path / "data" / "tiny10B" / ONE, tmp_path / "elsewhere"
    path.parent.mkdir(parents=True)
    path.symlink_to(other)
    assert fetch(hub).train[0].sha256 == hub.stated[ONE]
    assert not path.is_symlink() and not other.exists()


def test_a_server_that_sends_without_end_fills_no_disk(hub, tmp_path, monkeypatch):
    stated = hub.info()
    monkeypatch.setattr(hub, "info", lambda: stated)  # the size that the lock gets, and not that of what is sent
    hub.files[ONE] *= 30
    with pytest.raises(CheckFailed, match="sends more than the 161024 bytes"):
        fetch(hub)
    assert list((tmp_path / "data" / "tiny10B").iterdir()) == []


def test_a_file_that_exists_is_not_trusted(hub, tmp_path):
    (tmp_path / "data" / "tiny10B").mkdir(parents=True)
    shards.write(tmp_path / "data" / "tiny10B" / VAL, [1, 2, 3])
    with pytest.raises(CheckFailed, match=rf"{VAL}: sha256 .* instead of {hub.stated[VAL]}.*data fetch tiny10B"):
        fetch(hub)
    assert shards.check(tmp_path / "data" / "tiny10B" / VAL).num_tokens == 3  # and not deleted


def test_a_copy_brought_by_hand_serves_if_its_hash_is_right(hub, tmp_path):
    folder = tmp_path / "data" / "tiny10B"
    folder.mkdir(parents=True)
    for name in (ONE, VAL):
        (folder / name).write_bytes(hub.files[name])
    fetch(hub)
    assert fetched(hub) == []


def test_nothing_is_fetched_unless_asked(hub):
    with pytest.raises(CheckFailed, match="data=tiny10B is not fetched yet: ./run.sh data fetch tiny10B"):
        datasets.prepare(settings())
    assert hub.requests == []


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"revision": "abc"}, CheckFailed, f"data.revision=abc: .*{LOCK} is for {COMMIT}"),
        ({"repo": "other/tiny10B"}, CheckFailed, f"data.repo=other/tiny10B: .*{LOCK} is for {REPO}"),
        ({"num_train_shards": 3}, ValueError, f"data.num_train_shards=3: {REPO} has 2: use fewer"),
        ({"shards": ["1-3"]}, ValueError, f"data.shards: {REPO} has no shard 3: it has 1 to 2"),
    ],
)
def test_what_the_lock_does_not_have_is_refused(hub, values, error, message):
    fetch(hub, revision=COMMIT)
    with pytest.raises(error, match=message):
        fetch(hub, **values)


def test_a_hub_that_answers_with_another_commit_is_refused(hub, tmp_path):
    revision = "a" * 40
    with pytest.raises(CheckFailed, match=f"data.revision={revision}: the hub returned commit {COMMIT}"):
        fetch(hub, revision=revision)
    assert not (tmp_path / "locks" / LOCK).exists()


def lock_with(name, digest):
    return json.dumps({"repo": REPO, "revision": COMMIT, "files": {name: {"num_bytes": 1, "sha256": digest}}})


@pytest.mark.parametrize(
    "spoilt",
    [
        "not json",
        "[]",
        "{}",
        '{"repo": "a/b", "revision": "main", "files": {}}',
        lock_with("../x_val_0.bin", "0" * 64),
        lock_with("x_val_0.bin", "0"),
    ],
)
def test_a_spoilt_lock_is_refused_by_name(hub, tmp_path, spoilt):
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / LOCK).write_text(spoilt)
    with pytest.raises(CheckFailed, match=f"{LOCK}: .*restore it with git"):
        fetch(hub)


def test_without_huggingface_hub_its_name_is_said(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckFailed, match="needs huggingface_hub .*pip install huggingface_hub"):
        fetch(hub)


def test_a_disk_too_full_is_said_first(hub, monkeypatch):
    from bench.data.sources import source as base

    monkeypatch.setattr(base.shutil, "disk_usage", lambda folder: base.shutil._ntuple_diskusage(1, 1, 1000))
    with pytest.raises(CheckFailed, match="data=tiny10B needs 314.5 KiB"):
        fetch(hub)
    assert fetched(hub) == []


@pytest.mark.parametrize(
    "name, repo_id", [("fineweb10B", "kjj0/fineweb10B-gpt2"), ("finewebedu10B", "kjj0/finewebedu10B-gpt2")]
)
def test_the_datasets_of_the_repository_are_named_after_their_yaml(repo, name, repo_id):
    values = yaml.safe_load((repo / "conf" / "data" / f"{name}.yaml").read_text())
    origin = datasets.chosen(schema.build(schema.DataConfig, {"seq_len": 1, "batch_tokens": 1} | values))
    assert (origin.name, origin.data.repo, origin.vocab_size) == (name, repo_id, 50257)


def test_chosen_shards_are_fetched_and_read_in_the_order_given(hub):
    dataset = fetch(hub, shards=["2"], num_train_shards=27)
    assert [file.path.name for file in dataset.train] == [TWO]
    assert fetched(hub) == [TWO, VAL]
    dataset = fetch(hub, shards=["2", "1"], num_train_shards=None)
    assert [file.path.name for file in dataset.train] == [TWO, ONE]


def test_a_checkout_without_the_lock_finds_what_was_fetched_before(hub, tmp_path, monkeypatch):
    """Such is the worktree of a revision that a race adds: a lock that is not committed is not in it."""
    fetch(hub)
    monkeypatch.setattr(hub_source, "LOCKS", tmp_path / "another checkout")
    dataset = datasets.prepare(settings(), say=hub.said.append)
    assert [file.path.name for file in dataset.train] == [ONE]
    assert dataset.origin == {"repo": REPO, "revision": COMMIT}
