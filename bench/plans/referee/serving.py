"""Serves the referee to other programs: JSON lines over a local socket, and an MCP server (the extra "mcp").

    ./run.sh referee serve     a request a line: {"id": 1, "tool": "submit", "words": ["optim.lr=0.002"]}
    ./run.sh referee mcp       over standard input and output, as an MCP client starts it

Each request is run as a command (./run.sh referee ... --json) and answered with what that prints. A client that
disconnects loses nothing, and if the server is killed the journal survives.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bench.base import atomic
from bench.base.paths import CODE
from bench.plans.referee.search import Search

TOOLS = {  # {name: its description for an agent}
    "submit": "Race a change against the champion. words: settings as key=value (model, optim, stages, script.args), "
    "or the path of a diff, a folder or script=PATH; or diff: the text of a diff of the champion. Waits for the "
    "decision: keep, drop, undecided or refused, with gain, 95 % interval, cost and why. note: what you expect of it.",
    "status": "The champion, what was kept, and how much of the budget is left.",
    "log": "Every submission so far, with its decision.",
}
MAX_LINE_BYTES = 2**23
MAX_SOCKET_CHARS = 100  # length of a socket's path: Linux allows 107


class Request(msgspec.Struct):
    """A line from a client. words, diff, note and author are those of a submission."""

    id: Any = None
    tool: str = ""
    words: list[str] | None = None
    diff: str | None = None
    note: str | None = None
    author: str | None = None


async def call(search: Search, tool: str, fields: Mapping[str, Any]) -> Any:
    """Returns the answer of a tool, or {"error": a sentence}. fields: words, diff, note, author of a submission."""
    if tool not in TOOLS:
        return {"error": f"{tool}: there is no such tool: choose from {', '.join(TOOLS)}"}
    try:
        return await _called(search, tool, fields)
    except OSError as error:  # such as no space for the diff, or a longer note than a command takes
        return {"error": f"the command cannot be run ({error.strerror})"}
    except ValueError as error:  # a NUL or half of a surrogate pair, which cannot be passed to a command
        return {"error": f"{error}: words, diff, note and author are UTF-8 without NUL"}


async def _called(search: Search, tool: str, fields: Mapping[str, Any]) -> Any:
    with tempfile.TemporaryDirectory(prefix="speedrun-referee-") as folder:
        words = list(fields.get("words") or ())
        if diff := fields.get("diff"):
            words = [str(Path(folder, "submitted.patch"))]
            Path(words[0]).write_bytes(diff.encode())
        command = [sys.executable, "-m", "bench", "referee", tool, "--search", search.name, "--json"]
        if tool == "submit":
            command += [f"--note={fields.get('note') or ''}", f"--author={fields.get('author') or ''}", "--", *words]
        env = os.environ | {"SPEEDRUN_RESULTS": str(search.results)}
        pipe = asyncio.subprocess.PIPE
        nothing = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *command, cwd=CODE, env=env, stdin=nothing, stdout=pipe, stderr=pipe, start_new_session=True
        )
        out, errors = await asyncio.shield(process.communicate())
    try:
        return json.loads(out)
    except ValueError:
        lines = errors.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
        return {"error": lines[-1].removeprefix("referee: ")}


def serve(search: Search, socket: Path) -> None:
    """Answers requests on a socket only for this user until interrupted. Raises ValueError if it cannot be made."""
    if len(str(socket)) > MAX_SOCKET_CHARS:
        raise ValueError(f"{socket}: is too long for a socket: give --socket /tmp/referee.socket")
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(_serve(search, socket))


async def _serve(search: Search, socket: Path) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):  # the client left, or the server is to end
            try:
                while line := await reader.readline():
                    writer.write(json.dumps(await _answered(search, line)).encode() + b"\n")
                    await writer.drain()
            except ValueError:  # readline failed: later requests on this connection cannot be separated
                error = f"a request has at most {MAX_LINE_BYTES:,} bytes: submit the path of a file"
                writer.write(json.dumps({"id": None, "error": error}).encode() + b"\n")
                await writer.drain()
        writer.close()

    if socket.exists() and not socket.is_socket():
        raise ValueError(f"{socket}: is a file: give --socket a path at which there is none")
    if await _is_served(socket):
        raise ValueError(f"{socket}: another server answers there: give another --socket")
    socket.unlink(missing_ok=True)
    mask = os.umask(0o177)
    try:
        server = await asyncio.start_unix_server(handle, socket, limit=MAX_LINE_BYTES)
    except OSError as error:
        raise ValueError(f"{socket}: cannot be made ({error.strerror}): give another --socket") from None
    finally:
        os.umask(mask)
    serving = asyncio.ensure_future(server.serve_forever())
    for number in (signal.SIGINT, signal.SIGTERM):  # Python drops what a handler raises while it starts a command
        if signal.getsignal(number) != signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    async with server:
        await serving


async def _is_served(socket: Path) -> bool:
    """Returns whether a program listens on the socket, which also remains after a server was killed."""
    try:
        _, writer = await asyncio.open_unix_connection(socket)
    except OSError:
        return False
    writer.close()
    return True


async def _answered(search: Search, line: bytes) -> dict[str, Any]:
    """Returns {"id", "answer"} or {"id", "error"} for a line."""
    number = None
    try:
        message = json.loads(line)
        number = atomic.without_nan(message.get("id")) if isinstance(message, dict) else None  # 1e999 is infinite
        # ValueError: such a number, or half of a surrogate pair, which no file can hold
        json.dumps(message, ensure_ascii=False, allow_nan=False).encode()
        request = msgspec.convert(message, Request)
        answer = await call(search, request.tool, msgspec.to_builtins(request))
    except (ValueError, RecursionError) as error:
        return {"id": number, "error": f'{error}: a request is a JSON object a line: {{"id": 1, "tool": "status"}}'}
    is_error = isinstance(answer, dict) and "error" in answer
    return {"id": number} | (answer if is_error else {"answer": answer})


def serve_mcp(search: Search) -> None:
    """Serves MCP over standard input and output. Raises ValueError if the package mcp is not installed."""
    try:
        from mcp.server import MCPServer
    except ImportError:
        raise ValueError("the package mcp is not installed: .venv/bin/pip install 'mcp>=2,<3'") from None
    about = "Only what is shown to be better on fresh seeds is kept; every try counts against one error budget."
    server = MCPServer("speedrun-referee", instructions=f"A referee of a search for faster or better training. {about}")

    async def submit(words: list[str] | None = None, diff: str | None = None, note: str = "", author: str = "") -> Any:
        return await call(search, "submit", {"words": words, "diff": diff, "note": note, "author": author})

    async def status() -> Any:
        return await call(search, "status", {})

    async def log() -> Any:
        return await call(search, "log", {})

    for tool in (submit, status, log):
        server.tool(description=TOOLS[tool.__name__], structured_output=False)(tool)
    try:
        server.run()
    except KeyboardInterrupt as error:  # Python would wait for the thread that reads standard input, until that ends
        os._exit(128 + (error.args or (signal.SIGINT,))[0])
