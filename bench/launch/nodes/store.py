"""What the processes of a run over several launchers tell each other, in torch's TCPStore.

The leader, rank 0's launcher or that of the node that has the address of hardware.rendezvous, holds the store; the
others are members, numbered from 1 as they come.  Values are JSON, no pickles.  Messages, clocks and files carry an
HMAC (seal.py), as the store itself lets in whoever reaches its port: what does not verify is a lost node.  Counts
and signs of life carry none: who changes them can end a run.  Below a prefix of this run:

    session  session/N   random, of the leader and of member N: a message of an earlier run does not verify
    members              how many have come
    sent/N  from/N/I     how many messages member N has sent, and message I
    alive/N              a number that member N changes every few seconds: what stands still is lost
    to/N/I               message I of the leader to it
    clock/N/EDGE/I       its question I about the leader's clock, and .../is the answer
    file/N/I  taken/N    pieces of its files, of which the leader has taken so many
"""

import contextlib
import datetime
import functools
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.launch.nodes import facts
from bench.launch.nodes.seal import KEY, NOT_VERIFIED, Seal, token

PIECE_BYTES = 2**20  # TCPStore takes 8 MiB at most
NUM_AHEAD = 16  # pieces that wait in the leader's memory
CONNECT_S = 5.0  # what does not answer within it is some other program
RETRY_S = 0.2
TICK_S = 0.2
ALIVE_EVERY_S = 2.0
LOST_AFTER_S = 20.0  # ten of them
CALL_S = 300.0  # of one operation of the store; a member gives its leader up long before
COLLECT_S = 600.0  # for the next piece of a file, of a node that is heard
MAX_MEMBERS = 4096  # more than that has not come by itself
MAX_MESSAGES = 10_000  # of a member; it sends a dozen
GONE = "gone"  # the kind of the last message that arrives, made here: nothing more will come


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
    """-> (TCPStore, the part of it that belongs to this run)"""
    with _quiet_torch() as distributed:
        timeout = datetime.timedelta(seconds=CALL_S)
        store = distributed.TCPStore(host, port, wait_for_workers=False, timeout=timeout, **more)
        return store, distributed.PrefixStore(f"speedrun/{token(key)}", store)


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


class LeaderStore:
    """listener: listen()'s, which the store takes over; secret: None is KEY's."""

    def __init__(self, listener: socket.socket, key: str, secret: str | None = None):
        host, port = listener.getsockname()[:2]
        self.host = host
        own = {"is_master": True, "master_listen_fd": listener.detach()}
        self._whole, self._store = _opened("127.0.0.1" if host == "0.0.0.0" else host, port, key, **own)
        self._key, self._secret = key, os.environ.get(KEY, "") if secret is None else secret
        self._session = secrets.token_bytes(16)
        self._seals: dict[int, Seal] = {}
        self._strange: set[int] = set()  # members that sent what does not verify
        self._num_seen: dict[int, int] = {}
        self._num_told: dict[int, int] = {}
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._store.set("session", self._session)
        self._store.set("members", "0")

    def close(self) -> None:
        """Closes the store: no member reaches it any more."""
        self._store = self._whole = None

    def take(self) -> list[tuple[int, dict[str, Any]]]:
        """[(member, message)] that have come since the last call; of GONE where what came is none of the member's."""
        self._meet()
        came: list[tuple[int, dict[str, Any]]] = []
        members = [number for number in self._num_seen if number not in self._strange]
        values = self._values([f"{kind}/{number}" for number in members for kind in ("sent", "alive")])
        for number, num_sent, beat in zip(members, values[::2], values[1::2], strict=True):
            if beat != self._beats.get(number, (b"", 0.0))[0]:
                self._beats[number] = beat, time.monotonic()
            try:
                self._read(number, num_sent, came)
            except ValueError:
                self._strange.add(number)
                came.append((number, {"kind": GONE, "why": NOT_VERIFIED}))
        return came

    def _values(self, names: list[str]) -> list[bytes]:
        """The values of these keys; b"" for one that was removed, for which the store would wait."""
        if not names or self._store.check(names):
            return list(self._store.multi_get(names)) if names else []
        return [self._store.get(name) if self._store.check([name]) else b"" for name in names]

    def _read(self, member: int, num_sent: bytes, came: list[tuple[int, dict[str, Any]]]) -> None:
        """What it has sent since.  ValueError: that is none of its messages."""
        if not num_sent.isdigit() or len(num_sent) > 9 or int(num_sent) > MAX_MESSAGES:
            raise ValueError(num_sent)
        while self._num_seen[member] < int(num_sent):
            name = f"from/{member}/{self._num_seen[member]}"
            if not self._store.check([name]):
                raise ValueError(name)
            came.append((member, self._seals[member].message(name, self._store.get(name))))
            self._store.delete_key(name)
            self._num_seen[member] += 1

    def _meet(self) -> None:
        """Meets the members that have come since, once their first values are there."""
        for number in range(1, min(self._store.add("members", 0), MAX_MEMBERS) + 1):
            names = [f"{kind}/{number}" for kind in ("session", "sent", "alive")]
            if number not in self._num_seen and self._store.check(names):
                self._seals[number] = Seal(self._key, self._secret, self._session, self._store.get(names[0]))
                self._num_seen[number], self._num_told[number] = 0, 0

    @property
    def members(self) -> list[int]:
        """Those that have come."""
        return [number for number in self._num_seen if number not in self._strange]

    def silent_s(self, member: int) -> float:
        """For how long it has said nothing."""
        return time.monotonic() - self._beats[member][1]

    def tell(self, member: int, kind: str, **facts: Any) -> None:
        name = f"to/{member}/{self._num_told[member]}"
        self._store.set(name, self._seals[member].closed(name, json.dumps({"kind": kind, **facts}).encode()))
        self._num_told[member] += 1

    def answer_clock(self, member: int, edge: str) -> None:
        """What it asks with MemberStore.measured(edge)."""
        for number in range(facts.NUM_QUESTIONS):
            name = f"clock/{member}/{edge}/{number}"
            self._store.wait([name], datetime.timedelta(seconds=LOST_AFTER_S))
            now = {"kind": "clock", "t_ns": time.perf_counter_ns(), "utc_s": time.time()}
            self._store.set(f"{name}/is", self._seals[member].closed(f"{name}/is", json.dumps(now).encode()))

    def files(self, member: int, has_left: Callable[[], bool]) -> Iterator[tuple[str, bytes | str]]:
        """(name, piece) of the files that it sends, to the last; a str in a piece's place: why the rest of the file
        does not come.

        has_left(): takes what has come, called while nothing else is done.  RuntimeError: they ended early.
        """
        number = 0
        while True:
            value = self._piece(member, number, has_left)
            self._store.set(f"taken/{member}", str(number + 1))
            try:
                header, _, piece = self._seals[member].opened(f"file/{member}/{number}", value).partition(b"\n")
                name, why = json.loads(header)
            except (ValueError, TypeError, RecursionError):
                raise RuntimeError(NOT_VERIFIED) from None
            number += 1
            if name is None:
                return
            yield name, piece if why is None else why

    def _piece(self, member: int, number: int, has_left: Callable[[], bool]) -> bytes:
        name, since_s, why = f"file/{member}/{number}", time.monotonic(), None
        while not self._store.check([name]):
            if why:  # and what it had sent before has been seen
                raise RuntimeError(why)
            if has_left():
                why = "it left"
            elif self.silent_s(member) > LOST_AFTER_S:
                why = f"it said nothing for {LOST_AFTER_S:g} s"
            elif time.monotonic() - since_s > COLLECT_S:
                why = f"it sent nothing for {COLLECT_S:g} s"
            time.sleep(RETRY_S / 10)
        value: bytes = self._store.get(name)
        self._store.delete_key(name)
        return value


class MemberStore:
    """A connection to the leader's store, which one thread listens to and another one writes to: where the network is
    cut, both stand still, and this process does not.

    host, ports, key: as the leader's; its secret is KEY's.  TimeoutError: no leader in timeout_s.
    """

    def __init__(self, host: str, ports: Sequence[int], key: str, timeout_s: float):
        self._whole, self._store = self._reached(host, ports, key, timeout_s)
        self.own_address = facts.own_address(host)
        self.heard_s = time.monotonic()  # when the store last answered
        self._inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self._outbox: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._num_sent, self._num_pieces = 0, 0
        self._wrote_s = self.heard_s  # when the thread that writes last got something done
        self.number = self._store.add("members", 1)
        own_session = secrets.token_bytes(16)
        self._seal = Seal(key, os.environ.get(KEY, ""), self._store.get("session"), own_session)
        self._store.set(f"session/{self.number}", own_session)
        self._store.set(f"taken/{self.number}", "0")
        self._store.set(f"sent/{self.number}", "0")
        self._store.set(f"alive/{self.number}", "0")
        listening = self._store.clone()
        self._is_closing = False
        works = (lambda: self._listen(listening), self._write)
        self._threads = [threading.Thread(target=work, name="store", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _reached(host: str, ports: Sequence[int], key: str, timeout_s: float) -> tuple[Any, Any]:
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            for port in ports:
                with contextlib.suppress(OSError):
                    socket.create_connection((host, port), timeout=CONNECT_S).close()
                    found = _within(CONNECT_S, functools.partial(_own_store, host, port, key))
                    if found is not None:
                        return found
            time.sleep(RETRY_S)
        raise TimeoutError

    def send(self, kind: str, **facts: Any) -> None:
        def work() -> None:
            name = f"from/{self.number}/{self._num_sent}"
            self._store.set(name, self._seal.closed(name, json.dumps({"kind": kind, **facts}).encode()))
            self._num_sent += 1
            self._store.set(f"sent/{self.number}", str(self._num_sent))

        self._outbox.put(work)

    def send_files(self, paths: dict[str, Path]) -> None:
        """{name: file}, to the last."""

        def work() -> None:
            try:
                for name, path in paths.items():
                    try:
                        for piece in _pieces(path):
                            self._send_piece(name, None, piece)
                    except OSError as error:
                        self._send_piece(name, error.strerror or type(error).__name__)
            finally:  # or the leader would wait for more
                self._send_piece(None)

        self._outbox.put(work)

    def measured(self, edge: str) -> facts.Clock:
        """{"offset_ns", "round_trip_ns", "utc_offset_s"}: what to add to this node's clock readings to have the
        leader's, which answers with answer_clock(edge).  RuntimeError: it is gone, or does not answer."""
        answers: queue.Queue[dict[str, Any] | str] = queue.Queue()

        def work() -> None:
            try:
                answers.put(facts.measured(functools.partial(self._ask, edge)))
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                answers.put(str(error).partition("\n")[0])

        self._outbox.put(work)
        began_s = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                answer = answers.get(timeout=TICK_S)
                if isinstance(answer, str):
                    raise RuntimeError(answer)
                return answer
            if time.monotonic() - self.heard_s > LOST_AFTER_S:
                raise RuntimeError(f"nothing heard for {LOST_AFTER_S:g} s")
            if time.monotonic() - max(began_s, self._wrote_s) > COLLECT_S:
                raise RuntimeError(f"no answer in {COLLECT_S:g} s")

    def arrived(self) -> dict[str, Any] | None:
        """The next message, as soon as it is there; None: none in TICK_S.  A leader that is silent for too long is
        gone."""
        with contextlib.suppress(queue.Empty):
            return self._inbox.get(timeout=TICK_S)
        if time.monotonic() - self.heard_s > LOST_AFTER_S:
            return {"kind": GONE, "why": f"nothing heard for {LOST_AFTER_S:g} s"}
        return None

    def close(self) -> None:
        """When all that was sent has been written, or the leader is silent; a thread that waits for a dead network is
        left behind, another one would meet the end of this program within torch."""
        done = threading.Event()
        self._outbox.put(done.set)
        until_s = self.heard_s + LOST_AFTER_S
        while not done.wait(RETRY_S / 10) and time.monotonic() < until_s:
            pass
        self._is_closing = True
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(5 * TICK_S)

    def _listen(self, store: Any) -> None:
        number, beat_s = 0, 0.0
        try:
            while not self._is_closing:
                while store.check([name := f"to/{self.number}/{number}"]):
                    self._inbox.put(self._seal.message(name, store.get(name)))
                    store.delete_key(name)
                    number += 1
                self.heard_s = time.monotonic()
                if self.heard_s - beat_s > ALIVE_EVERY_S:
                    beat_s = self.heard_s
                    store.set(f"alive/{self.number}", str(beat_s))
                time.sleep(TICK_S)
        except ValueError:
            self._inbox.put({"kind": GONE, "why": NOT_VERIFIED})
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            self._inbox.put({"kind": GONE, "why": f"its store is closed: {why}"})

    def _write(self) -> None:
        while work := self._outbox.get():
            # else the leader is gone, which the other thread says
            with contextlib.suppress(RuntimeError, OSError, ValueError):
                work()

    def _ask(self, edge: str, number: int) -> dict[str, Any]:
        name = f"clock/{self.number}/{edge}/{number}"
        self._store.set(name, "?")
        return self._seal.message(f"{name}/is", self._store.get(f"{name}/is"))

    def _send_piece(self, name: str | None, why: str | None = None, piece: bytes = b"") -> None:
        """name: of the file, None after the last; why: its rest does not come."""
        while self._num_pieces - int(self._store.get(f"taken/{self.number}")) >= NUM_AHEAD:
            time.sleep(RETRY_S / 20)
        header, number = json.dumps([name, why]).encode(), f"file/{self.number}/{self._num_pieces}"
        self._store.set(number, self._seal.closed(number, header + b"\n" + piece))
        self._num_pieces += 1
        self._wrote_s = time.monotonic()


def _own_store(host: str, port: int, key: str) -> tuple[Any, Any] | None:
    """The store that listens there where it is that of this run, else None."""
    with contextlib.suppress(RuntimeError):
        whole, store = _opened(host, port, key, is_master=False)
        if store.check(["members", "session"]):
            return whole, store
    return None


def _within(seconds: float, work: Callable[[], tuple[Any, Any] | None]) -> tuple[Any, Any] | None:
    """What work() returns; None where it takes longer, and is left alone: a program that answers nothing."""
    answers: queue.Queue[tuple[Any, Any] | None] = queue.Queue()
    threading.Thread(target=lambda: answers.put(work()), name="store", daemon=True).start()
    with contextlib.suppress(queue.Empty):
        return answers.get(timeout=seconds)
    return None


def _pieces(path: Path) -> Iterator[bytes]:
    """The bytes that a file has now, at most PIECE_BYTES at once; one that was cut meanwhile is filled up."""
    with open(path, "rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        while num_bytes > 0:
            piece = file.read(min(PIECE_BYTES, num_bytes)) or b"\0" * min(PIECE_BYTES, num_bytes)
            num_bytes -= len(piece)
            yield piece
