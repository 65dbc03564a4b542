"""A Hub on localhost over a folder, which answers huggingface_hub and Transformers and can be made to fail.

Repositories are commits of paths, contents are blobs named by their SHA-256. Large files travel as on the Hub: the
client asks which blobs are missing (LFS batch), sends those, and then commits; downloads of them are redirected. There
is no Xet here: its headers are never sent, and clients run with `HF_HUB_DISABLE_XET=1`.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from tests.hub.repositories import READS, WRITES, Answer, Hub, HubError, answer


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    hub: ClassVar[Hub]
    lock: ClassVar[threading.RLock]

    def log_message(self, *_: Any) -> None:
        """Log nothing, for requests are in `Hub.requests`."""

    def handle_one(self) -> None:
        """Answer, or say what is wrong as the Hub does."""
        self.hub.requests.append(f"{self.command} {self.path}")
        agent = self.headers.get("User-Agent", "")
        if agent not in self.hub.agents:
            self.hub.agents.append(agent)
        body = self._body()
        if body is None:
            return
        try:
            with self.lock:
                status, reply, headers = self._answer(body)
        except HubError as error:
            status, reply, headers = error.status, {"error": str(error)}, error.headers
        self._send(status, reply, headers)

    do_GET = do_HEAD = do_POST = do_PUT = handle_one  # noqa: N815  names that the standard library asks for

    def _body(self) -> bytes | None:
        """What was sent; None after cutting the connection in the middle of it."""
        size = int(self.headers.get("Content-Length", 0))
        if self.command == "PUT" and self._is_cut():
            self.rfile.read(size // 2)
            self.close_connection = True
            self.connection.close()
            return None
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(size)
        chunks = []
        while (length := int(self.rfile.readline(), 16)) or self.rfile.readline().strip():
            chunks.append(self.rfile.read(length))
            self.rfile.readline()
        return b"".join(chunks)

    def _is_cut(self) -> bool:
        """Whether this upload is to end in the middle."""
        with self.lock:
            if self.hub.num_uploads_before_cut is None:
                return False
            self.hub.num_uploads_before_cut -= 1
            return self.hub.num_uploads_before_cut < 0

    def _answer(self, body: bytes) -> Answer:
        split = urlsplit(self.path)
        user = self._user()
        if split.path.startswith("/lfs/"):  # a signed address: it needs no token
            return (200, {}, {}) if split.path.endswith(self.hub.keep(body)) else (400, {"error": "checksum"}, {})
        if self.command in ("GET", "HEAD"):
            return answer(self.hub, READS, split.path, parse_qs(split.query), user)
        return answer(self.hub, WRITES, split.path, body, user)

    def _user(self) -> str | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            raise HubError(401, "Invalid credentials in Authorization header")
        return self.hub.tokens.get(token)

    def _send(self, status: int, reply: Any, headers: dict[str, str]) -> None:
        content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            content = content[: len(content) // 2] if self._is_in(self.hub.truncated) else content
            if self._is_in(self.hub.corrupted):
                content = content[:-1] + bytes([content[-1] ^ 1])
            self.wfile.write(content)
            self.close_connection = self._is_in(self.hub.truncated)

    def _is_in(self, paths: set[str]) -> bool:
        return self.path.startswith("/cdn/") and any(self.path.endswith(f"/{path}") for path in paths)


@contextmanager
def running(folder: Path) -> Iterator[Hub]:
    """A server in threads of this process, which ends with the block."""
    hub = Hub(folder)
    handler = type("Handler", (Handler,), {"hub": hub, "lock": threading.RLock()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
