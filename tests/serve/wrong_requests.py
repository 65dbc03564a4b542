"""Wrong requests over all fields and encodings, drawn from a seed; as a script it sends them to a server in a process of its own.

Command: python -m tests.serve.wrong_requests --num_requests 2640 --seed 0
Some of what is drawn can be served after all. Whatever comes, the answer is no server error: the fault is the request's, and the answer says so.
Hardware and time: two CPU cores, two minutes.
"""

import argparse
import gzip
import http.client
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NAME = "models/reference-target"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
FIRST_SERVER_ERROR = 500

LONE_SURROGATES = ["\ud800", "a\udfffb", "\udc80\ud800"]
NUMBERS = [0, 1, -1, 2, 1.5, -0.0, 1e-320, 1e-45, 1e-9, 1e308, 2**31, 2**63, -(2**63), 2**64, 10**400, -(10**30)]
NO_NUMBERS = [float("nan"), float("inf"), float("-inf")]
TEXTS = [
    "",
    " ",
    "5",
    "true",
    "\0",
    "\u2028",
    "\ufeff",
    "null",
    "a" * 3000,
    "é" * 500,
    "👩‍👩‍👧",
    "{{ 7 * 7 }}",
    "{% if %}",
]
LISTS = [[], [None], [[]], [[[]]], [1.5], [True], ["a", 1], [1, "a"], [-1], [10**30], [[1], [2]], [{}], ["x"] * 600]
OBJECTS = [{}, {"": 1}, {"role": "user"}, {"type": "text"}, {"__class__": {}}, {"a": None}, {"include_usage": "maybe"}]
SHARED = ["model", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options"]
NOT_SERVED = ["n", "best_of", "logprobs", "top_logprobs", "echo", "suffix", "frequency_penalty", "presence_penalty"]
NOT_SERVED += ["logit_bias", "tools", "functions", "response_format", "tool_choice", "user", "metadata"]
OF_CHAT = ["messages", "role", "content", "part", "of message", "max_completion_tokens", "chat_template_kwargs"]
TEMPLATE_NAMES = ["enable_thinking", "tokenize", "messages", "tools", "documents", "add_generation_prompt", "\ud800"]
DEPTHS = [50, 500, 5_000, 200_000]


@dataclass(frozen=True)
class WrongRequest:
    """A request as it goes over the wire."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON))

    def __str__(self) -> str:
        """Its beginning, for a report."""
        return f"{self.method} {self.path[:60]} {self.headers} {self.body[:200]!r}"

    def send(self, address: str) -> tuple[int, bytes]:
        """The status and the body of the answer; a server that hangs up without an answer has status 0."""
        connection = http.client.HTTPConnection(address, timeout=120)
        try:
            connection.putrequest(self.method, self.path, skip_host="host" in self.headers, skip_accept_encoding=True)
            for name, value in {"content-length": str(len(self.body)), **self.headers}.items():
                connection.putheader(name, value)
            with suppress(OSError):  # refused before all of it was read
                connection.endheaders(self.body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (http.client.HTTPException, ConnectionError):
            return 0, b""
        finally:
            connection.close()


def wrong_requests(num_requests: int, seed: int) -> Iterator[WrongRequest]:
    """Requests of all kinds in turn."""
    rng = random.Random(seed)
    kinds = [_of_fields, _of_fields, _of_fields, _of_text, _of_bytes, _of_protocol]
    for number in range(num_requests):
        yield kinds[number % len(kinds)](rng)


def _sound(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path, and a body that is served there."""
    shared = {"model": NAME, "max_tokens": 2}
    if rng.random() < 0.5:
        return COMPLETION, {**shared, "prompt": "The sum is"}
    return CHAT, {**shared, "messages": [{"role": "user", "content": "What is 3 plus 4?"}]}


def _value(rng: random.Random) -> Any:
    """A value that a field may not expect."""
    kinds = [[None, True, False], NUMBERS, NO_NUMBERS, TEXTS, LONE_SURROGATES, LISTS, OBJECTS]
    value = rng.choice(rng.choice(kinds))
    wrap = rng.random()
    if wrap < 0.1:
        return [value]
    if wrap < 0.2:
        return {"a": value}
    return value


def _of_fields(rng: random.Random) -> WrongRequest:
    """One to three fields with values that they do not expect."""
    path, body = _sound(rng)
    for _ in range(rng.randint(1, 3)):
        own = OF_CHAT if path == CHAT else ["prompt"]
        name = rng.choice(rng.choice([SHARED, own, own, NOT_SERVED, ["missing", "stop", "temperature"]]))
        _change(rng, body, name)
    return WrongRequest("POST", path, json.dumps(body).encode())


def _change(rng: random.Random, body: dict[str, Any], name: str) -> None:
    value = _value(rng)
    if name == "missing":
        body.pop(rng.choice([*body]), None)
    elif name in {"role", "content", "part", "of message"}:
        message = {"role": "user", "content": "What?"}
        if name == "part":
            message["content"] = [{"type": rng.choice(["text", "image_url", value]), "text": rng.choice(["a", value])}]
        else:
            message[name.removeprefix("of message") or rng.choice(["name", "tool_calls", "\ud800", ""])] = value
        body["messages"] = [message] * rng.choice([1, 1, 2, 5])
    elif name == "chat_template_kwargs" and rng.random() < 0.8:
        body[name] = {rng.choice(TEMPLATE_NAMES): value}
    else:
        body[name] = value


def _of_text(rng: random.Random) -> WrongRequest:
    """Text that is no JSON, or JSON of a form that a parser may stumble over."""
    path, body = _sound(rng)
    text = json.dumps(body)
    name, deep = rng.choice([*body, "extra", "stop", "chat_template_kwargs"]), rng.choice(DEPTHS)
    brackets = rng.choice(["[", '{"a":'])
    closing = {"[": "]", '{"a":': "}"}[brackets]
    forms = [
        text[: rng.randrange(len(text))],
        text + rng.choice(["}", ",", "\0", text, " // comment", "\ufeff"]),
        text.replace('"', "'"),
        text.replace(NAME, rng.choice(["\\ud800", "\\u12", "\\x", '\\"', "\t", "\\ud83d\\ude00"])),
        f'{{"{name}": 1, {text[1:]}',
        f"[{text}]",
        json.dumps(text),
        rng.choice(["", "null", "0", "NaN", "-", "[]", '""', "true", "{,}", "1e999", "9" * 5000, '{"a":' * 9]),
        brackets * deep,
        brackets * deep + "1" + closing * deep,
        f'{text[:-1]}, "{name}": {brackets * deep}1{closing * deep}}}',
        f'{text[:-1]}, "{rng.choice(["seed", "max_tokens", "temperature"])}": {"9" * rng.choice([20, 400, 5000])}}}',
    ]
    return WrongRequest("POST", path, rng.choice(forms).encode("utf-8", "surrogatepass"))


def _of_bytes(rng: random.Random) -> WrongRequest:
    """Bytes that are no UTF-8, or another encoding of a request."""
    path, body = _sound(rng)
    text = json.dumps({**body, "user": "Grüße 東京"}, ensure_ascii=False)
    sound = text.encode()
    at = rng.randrange(len(sound))
    forms = [
        text.encode(rng.choice(["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be", "utf-7"])),
        text.encode("utf-16-le")[: rng.randrange(80)],
        sound[:at] + bytes([rng.randrange(256)]) + sound[at + 1 :],
        sound[:at] + rng.choice([b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x00"]) + sound[at:],
        text.replace("Grüße", "Gr").encode("utf-16")[2:],
        sound.replace(b"3 plus", b"\xed\xa0\x80").replace(b"sum", b"\xed\xb0\x80"),
        gzip.compress(sound),
        bytes(rng.randrange(256) for _ in range(rng.choice([1, 3, 50, 500]))),
    ]
    return WrongRequest("POST", path, rng.choice(forms))


def _of_protocol(rng: random.Random) -> WrongRequest:
    """Another method, path or header than the endpoints have."""
    path, body = _sound(rng)
    method, sent, headers = "POST", json.dumps(body).encode(), dict(JSON)
    kind = rng.randrange(5)
    if kind == 0:
        method = rng.choice(["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW", "post"])
    elif kind == 1:
        paths = [
            "/",
            "//",
            "/v1",
            "/v1/",
            f"{path}/",
            f"{path}?a=%ff",
            "/%00",
            "/..%2f..",
            "/v1/models/%ED%A0%80",
            "*",
        ]
        path = rng.choice([*paths, "/" + "a" * 5000, "/health", "/v1/models", "/openapi.json", "/docs"])
        method = rng.choice(["GET", "POST"])
    elif kind == 2:
        types = ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/json; x"]
        headers = {"content-type": rng.choice([*types, "application/vnd.api+json", "\xff", "application/json;" * 50])}
    elif kind == 3:
        names = ["content-encoding", "accept", "authorization", "cookie", "x-forwarded-for", "host", "origin", "range"]
        headers[rng.choice(names)] = rng.choice(["", "gzip", "Bearer \xff", "evil.example", "a" * 3000, "*/*", "\x7f"])
    else:
        chunks = ["0\r\n\r\n", f"{len(sent):x}\r\n{sent.decode()}\r\n0\r\n\r\n", "zz\r\n\r\n", "-1\r\n\r\n"]
        headers["transfer-encoding"] = rng.choice(["chunked", "chunked", "gzip, chunked", "\x0bchunked"])
        sent = rng.choice(chunks).encode()
    return WrongRequest(method, path, sent, headers)


def is_server_error(request: WrongRequest, status: int, body: bytes) -> bool:
    """Whether the server blames itself, by status or in an event of a stream, or hangs up on what HTTP can frame."""
    hung_up = status == 0 and "transfer-encoding" not in request.headers
    return hung_up or status >= FIRST_SERVER_ERROR or b'"server_error"' in body


def main() -> None:
    """Start a server, send the requests, and print how many had which status, and those with a server error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num_requests", type=int, default=2640)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    pair = ["--target", NAME, "--drafter", "models/falcon-reference"]
    command = [sys.executable, "-m", "transformers_falcon_spec", "serve", *pair, "--port", "0"]
    statuses: Counter[int] = Counter()
    num_errors = 0
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().rpartition("://")[2].strip()
        try:
            for request in wrong_requests(args.num_requests, args.seed):
                status, answer = request.send(address)
                statuses[status] += 1
                if is_server_error(request, status, answer):
                    num_errors += 1
                    print(f"{status} {request}\n    {answer[:300]!r}")
            is_running = server.poll() is None
        finally:
            server.terminate()
    print(f"{args.num_requests} requests, by status: {dict(sorted(statuses.items()))}; {num_errors} server errors")
    sys.exit(bool(num_errors) or not is_running)


if __name__ == "__main__":
    main()
