"""A dataset hub on localhost that answers what huggingface_hub needs to list and fetch the files of one dataset."""

import hashlib
import http.server
import json
import re
import threading

REPO = "someone/tiny10B-gpt2"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """with FakeHub({"x_val_000000.bin": bytes}) as hub: hub.url, hub.requests, hub.cut_next

    cut_next: number of bytes after which the next download breaks off; files are then refused until it is None again.
    """

    def __init__(self, files):
        self.files, self.requests, self.cut_next, self.commit = dict(files), [], None, COMMIT
        self.stated = {name: hashlib.sha256(body).hexdigest() for name, body in files.items()}

    def __enter__(self):
        hub = self

        class Handler(_Handler):
            def log_message(self, *args):
                pass

        Handler.hub = hub
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
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

        siblings = [sibling(name, body) for name, body in self.files.items()] + [
            {"rfilename": "README.md", "size": 1, "blobId": "1" * 40}
        ]
        return {
            "id": REPO,
            "sha": self.commit,
            "siblings": siblings,
            "private": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
        }


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"  # one request per connection, so that none stays open after a test

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
