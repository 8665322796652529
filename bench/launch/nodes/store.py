"""Carries the messages between the processes of a run over several launchers, through torch's TCPStore.

The leader (the launcher of rank 0, or of the node that has the address of hardware.rendezvous) holds the store; the
others are members, numbered from 1 in order of arrival.  The keys, below a prefix of this run:

    members              number of members
    session  session/N   random bytes of the leader and of member N: a message of an earlier run does not verify
    inbox                queue of messages from members
    to/N                 queue of messages from the leader to member N
    taken/N              number of messages from member N that the leader has taken
    clock/N/I            question I of member N about the leader's clock, answered in clock/N/I/is

A message is JSON and, after a newline, bytes of a file.  It carries an HMAC over its number and its content, because
the store is open to everyone who reaches its port.  A member is lost if one of its messages does not verify, or if it
is silent: each member sends a sign of life every few seconds.
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
NOT_VERIFIED = f"the signature of a message is wrong: set {KEY} alike on every node, or find out who uses this port"
PIECE_BYTES = 2**20  # TCPStore accepts at most 8 MiB
NUM_AHEAD = 16  # messages of a member that may wait at the leader before it sends another piece of a file
NUM_AT_ONCE = 256  # messages that the leader takes, or members that it admits, at a time
CONNECT_S = 5.0  # a program that does not answer by then is not a leader
RETRY_S = 0.2
TICK_S = 0.2
ALIVE_EVERY_S = 2.0
LOST_AFTER_S = 20.0  # ten missing signs of life
CALL_S = 300.0  # timeout of a store operation; a member gives up its leader long before
MAX_MEMBERS = 4096  # a larger number comes from a stranger
ALIVE = "alive"  # kind of a sign of life
GONE = "gone"  # kind of the last message, created by the receiver: nothing more will come
Message = dict[str, Any]  # {"kind", ...}; "data": bytes of a file


def _opened(host: str, port: int, key: str, **kwargs: Any) -> tuple[Any, Any]:
    """Returns (TCPStore, the part of it for the run whose processes alone know this key)."""
    prefix = hashlib.sha256(f"speedrun-bench:{key}".encode()).hexdigest()[:32]
    name = "TORCH_CPP_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "FATAL")  # the C++ half of torch then prints no stack trace if the other end is gone
    try:
        from torch import distributed

        timeout = datetime.timedelta(seconds=CALL_S)
        store = distributed.TCPStore(host, port, wait_for_workers=False, timeout=timeout, **kwargs)
        return store, distributed.PrefixStore(f"speedrun/{prefix}", store)
    finally:
        if before is None:
            del os.environ[name]


def values_of(overrides: Sequence[str], *keys: str) -> list[str | None]:
    """Returns the values that overrides give these settings, before anything is composed; None for those not given."""
    values = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    return [values.get(key) for key in keys]


def listen(host: str | None, ports: Sequence[int]) -> socket.socket:
    """Returns a socket listening on the first free port.  Raises OSError if none is free or host is elsewhere."""
    for port in ports[:-1]:
        with contextlib.suppress(OSError):
            return socket.create_server((host or "", port), backlog=1024)
    return socket.create_server((host or "", ports[-1]), backlog=1024)


class Channel:
    """Signs, numbers and checks the messages between the leader and one member.

    secret: the value of KEY; if empty, whoever knows the run's address can sign too.  sessions: of the leader and of
    the member; own, other: the names of this end and of the other end.
    """

    def __init__(self, key: str, secret: str, sessions: Sequence[bytes], own: str, other: str):
        parts = json.dumps([key, *map(bytes.hex, sessions)]).encode()
        self._key = hmac.digest(secret.encode(), parts, hashlib.sha256)
        self._own, self._other = own, other
        self.num_sent = self.num_came = 0
        self.heard_s = time.monotonic()  # when the last message arrived
        self.is_strange = False  # something arrived that does not verify

    def closed(self, message: Mapping[str, Any], data: bytes = b"") -> bytes:
        """Encodes and signs the next message to the other end."""
        self.num_sent += 1
        return self.signed(f"{self._own}/{self.num_sent}", json.dumps(message).encode() + b"\n" + data)

    def opened(self, value: bytes) -> Message:
        """Decodes the next message from the other end.  Raises ValueError if it does not verify."""
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
        """Returns the body of a value that signed() made at either end.  Raises ValueError if someone else made it."""
        if not hmac.compare_digest(value, self.signed(name, value[hashlib.sha256().digest_size :])):
            raise ValueError(NOT_VERIFIED)
        return value[hashlib.sha256().digest_size :]


class LeaderStore:
    """The leader's end.  listener: from listen(), taken over by the store; secret: None for the value of KEY."""

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
        """Closes the store, so that members no longer reach it."""
        self._store = self._whole = None

    def take(self) -> list[tuple[int, Message]]:
        """Returns [(member, message)] since the last call; a message that does not verify becomes one of kind GONE."""
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
        """Admits the members that have joined since, once their sessions are in the store."""
        numbers = range(1, min(self._store.add("members", 0), MAX_MEMBERS) + 1)
        for number in [number for number in numbers if number not in self._channels][:NUM_AT_ONCE]:
            if self._store.check([name := f"session/{number}"]):
                sessions = self._session, self._store.get(name)
                self._channels[number] = Channel(self._key, self._secret, sessions, f"to/{number}", f"from/{number}")

    @property
    def members(self) -> list[int]:
        """The numbers of the members that have joined."""
        return [number for number, channel in self._channels.items() if not channel.is_strange]

    def silent_s(self, member: int) -> float:
        """Returns the seconds since the member's last message."""
        return time.monotonic() - self._channels[member].heard_s

    def tell(self, member: int, kind: str, **facts: Any) -> None:
        self._store.queue_push(f"to/{member}", self._channels[member].closed({"kind": kind, **facts}))

    def answer_clock(self, member: int) -> None:
        """Answers the questions of MemberStore.measured()."""
        for number in range(facts.NUM_QUESTIONS):
            name = f"clock/{member}/{number}"
            self._store.wait([name], datetime.timedelta(seconds=LOST_AFTER_S))
            now = json.dumps({"t_ns": time.perf_counter_ns(), "utc_s": time.time()}).encode()
            self._store.set(f"{name}/is", self._channels[member].signed(f"{name}/is", now))


class MemberStore:
    """A connection to the leader's store.  Only one thread uses the store, because it hangs if the network is cut.

    host, ports, key: those of the leader; the secret is the value of KEY.  Raises TimeoutError if none is reached.
    """

    def __init__(self, host: str, ports: Sequence[int], key: str, timeout_s: float):
        self._whole, self._store = self._reached(host, ports, key, timeout_s)
        self.own_address = facts.own_address(host)
        self.heard_s = time.monotonic()  # when the store last answered
        self._alive_s = 0.0  # when this member last sent something
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
        """Sends {name: file} in messages of kind "piece", with "is_last", or with "why" if the rest cannot be read."""
        for name, path in paths.items():
            try:
                for piece, is_last in _pieces(path):
                    self._put(functools.partial(self._push_piece, piece, name=name, is_last=is_last))
            except OSError as error:
                self.send("piece", name=name, why=error.strerror or type(error).__name__)
        self.send("files_end")

    def measured(self) -> facts.Clock:
        """Returns {"offset_ns", "round_trip_ns", "utc_offset_s"}, which turn this node's clock readings into the
        leader's, as answer_clock() reports them.  Raises RuntimeError if the leader does not answer."""
        clocks: queue.Queue[facts.Clock] = queue.Queue()
        self._put(lambda: clocks.put(facts.measured(self._ask)))
        while True:
            with contextlib.suppress(queue.Empty):
                return clocks.get(timeout=TICK_S)
            if self._is_gone():
                raise RuntimeError("it does not answer")

    def arrived(self) -> Message | None:
        """Returns the next message, None if there is none in TICK_S.  A leader that is silent for too long is gone."""
        with contextlib.suppress(queue.Empty):
            return self._inbox.get(timeout=TICK_S)
        return {"kind": GONE, "why": f"it sent nothing for {LOST_AFTER_S:g} s"} if self._is_gone() else None

    def close(self) -> None:
        """Waits until everything sent is written or the leader is silent.  A thread that hangs in torch on a dead
        network is left behind."""
        self._put(None)
        while not self._is_gone():
            self._thread.join(RETRY_S)

    def _is_gone(self) -> bool:
        return not self._thread.is_alive() or time.monotonic() - self.heard_s > LOST_AFTER_S

    def _put(self, work: Callable[[], object] | None) -> None:
        """Queues work for the thread; it is dropped if the leader is gone."""
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
            why = f"it closed the connection: {str(error).partition(chr(10))[0]}"
        self._inbox.put({"kind": GONE, "why": why})

    def _hear(self) -> None:
        """Receives what the leader has sent; sends a sign of life if nothing was sent to the leader for a while."""
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
        reading: dict[str, Any] = json.loads(self._channel.checked(f"{name}/is", self._store.get(f"{name}/is")))
        return reading


def _popped(store: Any, name: str) -> bytes | None:
    """Returns the next value of a queue, None if it is empty.  queue_len() would hold the GIL until the answer."""
    from torch.distributed import QueueEmptyError

    try:
        value: bytes = store.queue_pop(name, False)
    except QueueEmptyError:
        return None
    return value


def _own_store(host: str, port: int, key: str) -> tuple[Any, Any] | None:
    """Returns the store that listens there, None if it is not that of this run.  A program that answers nothing keeps
    only a thread waiting."""
    opened: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def work() -> None:
        with contextlib.suppress(RuntimeError):
            whole, store = _opened(host, port, key, is_master=False)
            if store.check(["members", "session"]):
                opened.put((whole, store))

    thread = threading.Thread(target=work, name="store", daemon=True)
    thread.start()
    thread.join(CONNECT_S)
    return None if opened.empty() else opened.get()


def _pieces(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Yields (at most PIECE_BYTES, whether they are the last) of the file's current bytes."""
    with open(path, "rb") as file:
        left_bytes, is_last = os.fstat(file.fileno()).st_size, False
        while not is_last:
            piece = file.read(min(PIECE_BYTES, left_bytes))
            left_bytes -= len(piece)
            is_last = left_bytes <= 0 or not piece
            yield piece, is_last
