"""What says that a value in the store of a run comes from one of its launchers: an HMAC with the secret they share."""

import hashlib
import hmac
import json
from typing import Any

from bench.launch import ranks

KEY = ranks.NODES_KEY
NOT_VERIFIED = f"what it sent does not verify: give {KEY} alike on every node, or somebody else reaches this port"


def token(key: str) -> str:
    """What proves that both ends mean the same run: key is what only its processes know alike."""
    return hashlib.sha256(f"speedrun-bench:{key}".encode()).hexdigest()[:32]


class Seal:
    """What a value between the leader and one member carries: an HMAC over its name and itself.

    secret: KEY's; without one the key is what whoever knows the run's address can make too.  sessions: random, of the
    leader, of the member.
    """

    def __init__(self, key: str, secret: str, *sessions: bytes):
        parts = json.dumps([key, *map(bytes.hex, sessions)]).encode()
        self._key = hmac.digest(secret.encode(), parts, hashlib.sha256)

    def closed(self, name: str, body: bytes) -> bytes:
        return self._digest(name, body) + body

    def opened(self, name: str, value: bytes) -> bytes:
        """ValueError: it is not from the other end, or not under this name."""
        digest, body = value[:32], value[32:]
        if not hmac.compare_digest(digest, self._digest(name, body)):
            raise ValueError(NOT_VERIFIED)
        return body

    def message(self, name: str, value: bytes) -> dict[str, Any]:
        """ValueError: so, or no message."""
        try:
            message = json.loads(self.opened(name, value))
        except RecursionError:
            message = None
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise ValueError(NOT_VERIFIED)
        return message

    def _digest(self, name: str, body: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + body, hashlib.sha256)
