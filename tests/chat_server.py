"""A real HTTP server that answers chat completions, and fails, delays or garbles as a test asks it to."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = (
    dict[str, Any] | tuple[int, str] | tuple[int, str, dict[str, str]]
)  # a message, or a status, a body and headers


def echo(request: dict[str, Any]) -> Answer:
    """What a sound server says: the last question in capitals."""
    return {"content": request["messages"][-1]["content"].upper()}


@dataclass
class ChatServer:
    """What a running server was asked, and how it answers."""

    answer: Callable[[dict[str, Any]], Answer] = echo
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_at_once: int = 0
    most_at_once: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def respond(self, request: dict[str, Any], headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
        """The status, the body and the headers for a request."""
        with self.lock:
            self.requests.append(request)
            self.headers.append(headers)
            self.num_at_once += 1
            self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            found = self.answer(request)
        finally:
            with self.lock:
                self.num_at_once -= 1
        if isinstance(found, tuple):
            return (*found, {})[:3]
        reason = found.pop("finish_reason", "stop")
        choice = {"index": 0, "message": {"role": "assistant", **found}, "finish_reason": reason}
        return 200, json.dumps({"object": "chat.completion", "choices": [choice]}), {}


@contextmanager
def chat_server(answer: Callable[[dict[str, Any]], Answer] = echo) -> Iterator[ChatServer]:
    """A server on a free port of this machine."""
    state = ChatServer(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            status, body, headers = state.respond(json.loads(content), dict(self.headers.items()))
            self.send_response(status if self.path == "/v1/chat/completions" else 404)
            for name, value in {"Content-Length": str(len(body.encode())), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            """Nothing is printed."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 200  # clients that come at once

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # who asked may be gone
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
