"""Messages between the coordinator of a run and its members: JSON over TCP, and files behind it.

A message is 16 bytes (the length of the JSON and of the bytes that follow it, big-endian) and the JSON, a dict with
"kind".  No pickles: what a stranger sends can at most be refused.  Standard library only: no launcher imports torch.
"""

import contextlib
import errno
import hashlib
import json
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

HEAD = struct.Struct(">QQ")
MAX_JSON_BYTES = 64 * 2**20  # a thousand times an environment.json
CHUNK_BYTES = 2**20
GREETING_S = 5.0  # a caller that does not greet within it is some other program
RETRY_S = 0.2
ALIVE_EVERY_S = 5.0  # each side says so
LOST_AFTER_S = 20.0  # four of them
GONE = "gone"  # the kind of the last message of a channel, made here: nothing more will come


class Channel:
    """One connection.  send() from any thread; what arrives is put into inbox as (channel, message) by a thread.

    answers: {kind: function of the message -> the message to send back}, answered by that thread at once; receive:
    function of (message, iterator of bytes) for a message that a file follows.
    """

    def __init__(self, connection: socket.socket, inbox: queue.Queue, answers=None, receive=None):
        self._socket, self._inbox, self._answers, self._receive = connection, inbox, answers or {}, receive
        self._lock = threading.Lock()
        self.heard_s = time.monotonic()  # when anything last arrived
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._listen, name="channel", daemon=True).start()

    @property
    def own_address(self) -> str:
        """The address of this machine that the connection uses."""
        return self._socket.getsockname()[0]

    def send(self, kind: str, **facts) -> bool:
        """Whether it was sent: False, the other end is gone, which its last message says too."""
        with self._lock, contextlib.suppress(OSError):
            _send(self._socket, {"kind": kind, **facts})
            return True
        return False

    def send_file(self, path: Path, name: str) -> bool:
        """The bytes that a file has now, under this name.  Whether they were sent."""
        with open(path, "rb") as file, self._lock, contextlib.suppress(OSError):
            num_bytes = os.fstat(file.fileno()).st_size
            _send(self._socket, {"kind": "file", "name": name}, num_bytes)
            while num_bytes:
                chunk = file.read(min(CHUNK_BYTES, num_bytes)) or b"\0" * min(CHUNK_BYTES, num_bytes)  # it was cut
                self._socket.sendall(chunk)
                num_bytes -= len(chunk)
            return True
        return False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _listen(self):
        why = "it closed the connection"
        try:
            while (head := _exactly(self._socket, HEAD.size)) is not None:
                num_json, num_bytes = HEAD.unpack(head)
                if num_json > MAX_JSON_BYTES:
                    raise ValueError(f"a message of {num_json} bytes")
                message = json.loads(_exactly(self._socket, num_json))
                self.heard_s = time.monotonic()
                if message["kind"] == "alive":
                    continue
                if num_bytes:
                    self._take(message, num_bytes)
                elif answer := self._answers.get(message["kind"]):
                    self.send(**answer(message))
                else:
                    self._inbox.put((self, message))
        except (OSError, ValueError, TypeError, KeyError, EOFError) as error:
            why = f"{type(error).__name__}: {error}"
        self._inbox.put((self, {"kind": GONE, "why": why}))

    def _take(self, message, num_bytes):
        def chunks():
            left = num_bytes
            while left:
                chunk = self._socket.recv(min(CHUNK_BYTES, left))
                if not chunk:
                    raise EOFError("a file broke off")
                left -= len(chunk)
                self.heard_s = time.monotonic()
                yield chunk

        arriving = chunks()
        if self._receive is not None:
            self._receive(message, arriving)
        for _ in arriving:  # what receive() did not want
            pass


def keep_alive(channels: list[Channel]) -> None:
    """From a thread, until this process ends, on all channels that are in the list by then: what is silent is gone."""

    def say():
        while True:
            for one in list(channels):
                one.send("alive")
            time.sleep(ALIVE_EVERY_S)

    threading.Thread(target=say, name="alive", daemon=True).start()


def _send(connection, message, num_bytes=0):
    text = json.dumps(message).encode()
    connection.sendall(HEAD.pack(len(text), num_bytes) + text)


def _exactly(connection, num_bytes):
    """So many bytes; None where the other end has closed before the first.  EOFError where it closes amid them."""
    result = bytearray()
    while len(result) < num_bytes:
        chunk = connection.recv(num_bytes - len(result))
        if not chunk:
            if result or num_bytes != HEAD.size:
                raise EOFError("a message broke off")
            return None
        result += chunk
    return bytes(result)


def token(key: str, side: str) -> str:
    """What proves that both ends mean the same run: key is what only its processes know alike."""
    return hashlib.sha256(f"speedrun-bench:{side}:{key}".encode()).hexdigest()[:32]


def listen(host: str | None, ports: Sequence[int]) -> socket.socket:
    """A listening socket on the first of these ports that is free.  OSError: none is, or host is another machine's."""
    for port in ports:
        try:
            return socket.create_server((host or "", port), backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == ports[-1]:
                raise
    raise OSError(errno.EADDRINUSE, "no port")


def greet(connection: socket.socket, key: str) -> None:
    """The coordinator's first word on a new connection.  Raises OSError."""
    _send(connection, {"kind": "greeting", "token": token(key, "coordinator")})


def connect(host: str, ports: Sequence[int], key: str, timeout_s: float) -> socket.socket:
    """To the coordinator that listens on one of these ports, tried again until it is there.  TimeoutError."""
    for port in _again(ports, timeout_s):
        with contextlib.suppress(OSError, ValueError, TypeError, EOFError):
            connection = socket.create_connection((host, port), timeout=GREETING_S)
            if _is_greeted(connection, key):
                connection.settimeout(None)
                return connection
            connection.close()
    raise TimeoutError


def _is_greeted(connection, key):
    head = _exactly(connection, HEAD.size)
    num_json, num_bytes = HEAD.unpack(head) if head else (0, 0)
    if not 0 < num_json < 1000 or num_bytes:
        return False
    return json.loads(_exactly(connection, num_json)).get("token") == token(key, "coordinator")


def _again(ports, timeout_s) -> Iterator[int]:
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        yield from ports
        time.sleep(RETRY_S)
