"""What the processes of a run over several launchers tell each other, in torch's TCPStore.

The leader, rank 0's launcher or that of the node that has the address of hardware.rendezvous, holds the store; the
others are members, numbered from 1 as they come.  Below a prefix of this run:

    members              how many have come
    session  session/N   random bytes of the leader and of member N: a message of an earlier run does not verify
    inbox                the queue of what members send
    to/N                 the queue of what the leader sends to member N
    taken/N              how many messages of member N the leader has taken
    clock/N/I            question I of member N about the leader's clock, and clock/N/I/is its answer

A message is JSON and, after a newline, bytes of a file.  It carries an HMAC over its number and itself, as the store
lets in whoever reaches its port: a member whose message does not verify is lost.  So is one that says nothing: each
sends a sign of life every few seconds.
"""

import contextlib
import datetime
import functools
import hashlib
import hmac
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.launch import ranks
from bench.launch.nodes import facts

KEY = ranks.NODES_KEY
NOT_VERIFIED = f"what it sent does not verify: give {KEY} alike on every node, or somebody else reaches this port"
PIECE_BYTES = 2**20  # TCPStore takes 8 MiB at most
NUM_AHEAD = 16  # messages of a member that may wait in the leader's memory before it adds a piece of a file
NUM_AT_ONCE = 256  # messages that the leader takes, or members that it looks for, before it does anything else
CONNECT_S = 5.0  # a program that does not answer within it is another one
RETRY_S = 0.2
TICK_S = 0.2
ALIVE_EVERY_S = 2.0
LOST_AFTER_S = 20.0  # ten signs of life
CALL_S = 300.0  # of one operation of the store; a member gives its leader up long before
MAX_MEMBERS = 4096  # a larger count is a stranger's
ALIVE = "alive"  # the kind of a sign of life
GONE = "gone"  # the kind of the last message that arrives, made here: nothing more will come
Message = dict[str, Any]  # {"kind", ...}; "data": the bytes after the newline


@contextlib.contextmanager
def _quiet_torch() -> Iterator[Any]:
    """torch.distributed, whose C++ half then prints no stack trace where the other end is gone."""
    name = "TORCH_CPP_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "FATAL")
    try:
        import torch.distributed

        yield torch.distributed
    finally:
        if before is None:
            del os.environ[name]


def _opened(host: str, port: int, key: str, **more: Any) -> tuple[Any, Any]:
    """-> (TCPStore, the part of it that belongs to the run whose processes alone know this key)"""
    prefix = hashlib.sha256(f"speedrun-bench:{key}".encode()).hexdigest()[:32]
    with _quiet_torch() as distributed:
        timeout = datetime.timedelta(seconds=CALL_S)
        store = distributed.TCPStore(host, port, wait_for_workers=False, timeout=timeout, **more)
        return store, distributed.PrefixStore(f"speedrun/{prefix}", store)


def words_of(overrides: Sequence[str], *keys: str) -> list[str | None]:
    """The values that these settings have among overrides, before anything is composed; None: it is not among them."""
    given = {key: value for key, _, value in (word.partition("=") for word in overrides)}
    return [given.get(key) for key in keys]


def listen(host: str | None, ports: Sequence[int]) -> socket.socket:
    """A listening socket on the first of these ports that is free.  OSError: none is, or host is another machine's."""
    for port in ports:
        try:
            return socket.create_server((host or "", port), backlog=1024)
        except OSError:
            if port == ports[-1]:
                raise
    raise ValueError("no port")


class Channel:
    """The messages between the leader and one member: signed, numbered, and checked.

    secret: KEY's value; without one, whoever knows the run's address can sign too.  sessions: of the leader and of the
    member; own, other: the names of this end and of the other one.
    """

    def __init__(self, key: str, secret: str, sessions: Sequence[bytes], own: str, other: str):
        parts = json.dumps([key, *map(bytes.hex, sessions)]).encode()
        self._key = hmac.digest(secret.encode(), parts, hashlib.sha256)
        self._own, self._other = own, other
        self.num_sent = self.num_came = 0
        self.heard_s = time.monotonic()  # when the last message came
        self.is_strange = False  # something came that does not verify

    def closed(self, message: Mapping[str, Any], data: bytes = b"") -> bytes:
        """The next message to the other end."""
        self.num_sent += 1
        return self.signed(f"{self._own}/{self.num_sent}", json.dumps(message).encode() + b"\n" + data)

    def opened(self, value: bytes) -> Message:
        """The next message from the other end.  ValueError: it is not."""
        self.num_came += 1
        header, _, data = self.checked(f"{self._other}/{self.num_came}", value).partition(b"\n")
        try:
            message = json.loads(header)
        except RecursionError:
            message = None
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise ValueError(NOT_VERIFIED)
        self.heard_s = time.monotonic()
        return message | ({"data": data} if data else {})

    def signed(self, name: str, body: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + body, hashlib.sha256) + body

    def checked(self, name: str, value: bytes) -> bytes:
        """The body of a value that signed() made at either end.  ValueError: it was made by somebody else."""
        if not hmac.compare_digest(value, self.signed(name, value[hashlib.sha256().digest_size :])):
            raise ValueError(NOT_VERIFIED)
        return value[hashlib.sha256().digest_size :]


class LeaderStore:
    """listener: listen()'s, which the store takes over; secret: None is KEY's."""

    def __init__(self, listener: socket.socket, key: str, secret: str | None = None):
        host, port = listener.getsockname()[:2]
        self.host = host
        own = {"is_master": True, "master_listen_fd": listener.detach()}
        self._whole, self._store = _opened("127.0.0.1" if host == "0.0.0.0" else host, port, key, **own)
        self._key, self._secret = key, os.environ.get(KEY, "") if secret is None else secret
        self._session = secrets.token_bytes(16)
        self._channels: dict[int, Channel] = {}
        self._store.set("session", self._session)
        self._store.set("members", "0")

    def close(self) -> None:
        """Closes the store: no member reaches it any more."""
        self._store = self._whole = None

    def take(self) -> list[tuple[int, Message]]:
        """[(member, message)] that have come since the last call; of GONE where what came is none of the member's."""
        self._meet()
        came: list[tuple[int, Message]] = []
        for _ in range(NUM_AT_ONCE):
            if (value := _popped(self._store, "inbox")) is None:
                break
            number = int.from_bytes(value[:4], "big")
            if number not in self._channels:
                self._meet()
            channel = self._channels.get(number)
            if channel is None or channel.is_strange:
                continue
            try:
                message = channel.opened(value[4:])
            except ValueError:
                channel.is_strange, message = True, {"kind": GONE, "why": NOT_VERIFIED}
            self._store.set(f"taken/{number}", str(channel.num_came))
            if message["kind"] != ALIVE:
                came.append((number, message))
        return came

    def _meet(self) -> None:
        """Meets the members that have come since, once their sessions are there."""
        numbers = range(1, min(self._store.add("members", 0), MAX_MEMBERS) + 1)
        for number in [number for number in numbers if number not in self._channels][:NUM_AT_ONCE]:
            if self._store.check([name := f"session/{number}"]):
                sessions = self._session, self._store.get(name)
                self._channels[number] = Channel(self._key, self._secret, sessions, f"to/{number}", f"from/{number}")

    @property
    def members(self) -> list[int]:
        """Those that have come."""
        return [number for number, channel in self._channels.items() if not channel.is_strange]

    def silent_s(self, member: int) -> float:
        """For how long it has said nothing."""
        return time.monotonic() - self._channels[member].heard_s

    def tell(self, member: int, kind: str, **facts: Any) -> None:
        self._store.queue_push(f"to/{member}", self._channels[member].closed({"kind": kind, **facts}))

    def answer_clock(self, member: int) -> None:
        """Answers MemberStore.measured()."""
        for number in range(facts.NUM_QUESTIONS):
            name = f"clock/{member}/{number}"
            self._store.wait([name], datetime.timedelta(seconds=LOST_AFTER_S))
            now = json.dumps({"t_ns": time.perf_counter_ns(), "utc_s": time.time()}).encode()
            self._store.set(f"{name}/is", self._channels[member].signed(f"{name}/is", now))


class MemberStore:
    """A connection to the leader's store.  One thread uses it: where the network is cut that stands still, and this
    process does not.

    host, ports, key: as the leader's; its secret is KEY's.  TimeoutError: no leader in timeout_s.
    """

    def __init__(self, host: str, ports: Sequence[int], key: str, timeout_s: float):
        self._whole, self._store = self._reached(host, ports, key, timeout_s)
        self.own_address = facts.own_address(host)
        self.heard_s = time.monotonic()  # when the store last answered
        self._alive_s = 0.0  # when this last sent something
        self._inbox: queue.Queue[Message] = queue.Queue()
        self._outbox: queue.Queue[Callable[[], object] | None] = queue.Queue(NUM_AHEAD)
        self.number = self._store.add("members", 1)
        session = secrets.token_bytes(16)
        sessions, ends = (self._store.get("session"), session), (f"from/{self.number}", f"to/{self.number}")
        self._channel = Channel(key, os.environ.get(KEY, ""), sessions, *ends)
        self._store.set(f"taken/{self.number}", "0")
        self._store.set(f"session/{self.number}", session)
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
        self._thread.start()

    @staticmethod
    def _reached(host: str, ports: Sequence[int], key: str, timeout_s: float) -> tuple[Any, Any]:
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            for port in ports:
                with contextlib.suppress(OSError):
                    socket.create_connection((host, port), timeout=CONNECT_S).close()
                    store = _own_store(host, port, key)
                    if store is not None:
                        return store
            time.sleep(RETRY_S)
        raise TimeoutError

    def send(self, kind: str, **facts: Any) -> None:
        self._put(lambda: self._push(kind, **facts))

    def send_files(self, paths: Mapping[str, Path]) -> None:
        """{name: file}, each in messages of kind "piece" with "is_last", or "why" its rest does not come."""
        for name, path in paths.items():
            try:
                for piece, is_last in _pieces(path):
                    self._put(functools.partial(self._push_piece, piece, name=name, is_last=is_last))
            except OSError as error:
                self.send("piece", name=name, why=error.strerror or type(error).__name__)
        self.send("files_end")

    def measured(self) -> facts.Clock:
        """{"offset_ns", "round_trip_ns", "utc_offset_s"}: what to add to this node's clock readings to have the
        leader's, which answers with answer_clock().  RuntimeError: it is gone, or does not answer."""
        answers: queue.Queue[facts.Clock] = queue.Queue()
        self._put(lambda: answers.put(facts.measured(self._ask)))
        while True:
            with contextlib.suppress(queue.Empty):
                return answers.get(timeout=TICK_S)
            if self._is_gone():
                raise RuntimeError("it does not answer")

    def arrived(self) -> Message | None:
        """The next message, as soon as it is there; None: none in TICK_S.  A leader that is silent for too long is
        gone."""
        with contextlib.suppress(queue.Empty):
            return self._inbox.get(timeout=TICK_S)
        return {"kind": GONE, "why": f"nothing heard for {LOST_AFTER_S:g} s"} if self._is_gone() else None

    def close(self) -> None:
        """When all that was sent has been written, or the leader is silent; a thread that waits for a dead network is
        left behind, as it would meet the end of this program within torch."""
        self._put(None)
        while not self._is_gone():
            self._thread.join(RETRY_S)

    def _is_gone(self) -> bool:
        return not self._thread.is_alive() or time.monotonic() - self.heard_s > LOST_AFTER_S

    def _put(self, work: Callable[[], object] | None) -> None:
        """Let the thread do it, after what waits already; where the leader is gone nobody does."""
        while not self._is_gone():
            with contextlib.suppress(queue.Full):
                self._outbox.put(work, timeout=TICK_S)
                return

    # ---- in the thread

    def _serve(self) -> None:
        try:
            while True:
                self._hear()
                with contextlib.suppress(queue.Empty):
                    if (work := self._outbox.get(timeout=TICK_S)) is None:
                        return
                    work()
        except (ValueError, KeyError, TypeError):
            why = NOT_VERIFIED
        except RuntimeError as error:
            why = f"its store is closed: {str(error).partition(chr(10))[0]}"
        self._inbox.put({"kind": GONE, "why": why})

    def _hear(self) -> None:
        """Takes what the leader has sent; where nothing was sent to it for a while, says that this member is alive."""
        while (value := _popped(self._store, f"to/{self.number}")) is not None:
            self._inbox.put(self._channel.opened(value))
        self.heard_s = time.monotonic()
        if self.heard_s - self._alive_s > ALIVE_EVERY_S:
            self._push(ALIVE)

    def _push(self, kind: str, data: bytes = b"", **facts: Any) -> None:
        value = self._channel.closed({"kind": kind, **facts}, data)
        self._store.queue_push("inbox", self.number.to_bytes(4, "big") + value)
        self._alive_s = time.monotonic()

    def _push_piece(self, piece: bytes, **facts: Any) -> None:
        while self._channel.num_sent - int(self._store.get(f"taken/{self.number}")) >= NUM_AHEAD:
            self._hear()
            time.sleep(RETRY_S / 20)
        self._push("piece", piece, **facts)

    def _ask(self, number: int) -> dict[str, Any]:
        name = f"clock/{self.number}/{number}"
        self._store.set(name, "?")
        answer: dict[str, Any] = json.loads(self._channel.checked(f"{name}/is", self._store.get(f"{name}/is")))
        return answer


def _popped(store: Any, name: str) -> bytes | None:
    """The next value of a queue; None: it is empty.  queue_len() would hold Python's lock until the store answers."""
    from torch.distributed import QueueEmptyError

    try:
        value: bytes = store.queue_pop(name, False)
    except QueueEmptyError:
        return None
    return value


def _own_store(host: str, port: int, key: str) -> tuple[Any, Any] | None:
    """The store that listens there where it is that of this run.  None: it is not, or a program that answers nothing,
    which is left to a thread."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def work() -> None:
        with contextlib.suppress(RuntimeError):
            whole, store = _opened(host, port, key, is_master=False)
            if store.check(["members", "session"]):
                answers.put((whole, store))

    thread = threading.Thread(target=work, name="store", daemon=True)
    thread.start()
    thread.join(CONNECT_S)
    return None if answers.empty() else answers.get()


def _pieces(path: Path) -> Iterator[tuple[bytes, bool]]:
    """(at most PIECE_BYTES, whether they are the last) of the bytes that a file has now."""
    with open(path, "rb") as file:
        left_bytes, is_last = os.fstat(file.fileno()).st_size, False
        while not is_last:
            piece = file.read(min(PIECE_BYTES, left_bytes))
            left_bytes -= len(piece)
            is_last = left_bytes <= 0 or not piece
            yield piece, is_last
