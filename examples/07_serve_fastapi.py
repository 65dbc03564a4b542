"""Serve a target with its drafter over HTTP: FastAPI, text as it is written, and what speculation did.

Command: python examples/07_serve_fastapi.py
Ask it: curl -N localhost:8000/generate -H "content-type: application/json" -d '{"prompt": "What is 3 plus 4?", "stream": true}'
One text is written at a time: requests wait for their turn, and beyond `--max-waiting` they are told to come again (status 503).
Hardware and time: two CPU cores; ready in about five seconds with the pair in `models/`. `--tiny` serves a random pair, asks it once
over HTTP and ends. Needs the extra `serve`; docs/serving.md says more.
"""

import socket
import threading
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pair import pair_options, read_pair
from serving import Ask, Desk, ask_once


def make_app(desk: Desk) -> FastAPI:
    """The application: `POST /generate`."""
    app = FastAPI(title="transformers_falcon_spec")

    @app.post("/generate", response_model=None)
    async def generate(ask: Ask) -> dict[str, Any] | StreamingResponse:
        return await desk.reply(ask)

    return app


def main() -> None:
    """Serve until interrupted."""
    parser = pair_options(__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--max-waiting", type=int, default=16, help="requests that may wait for their turn")
    args = parser.parse_args()
    app = make_app(Desk(read_pair(args), args.max_waiting))
    listener = socket.create_server((args.host, 0 if args.tiny else args.port))
    url = f"http://{args.host}:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    serve = partial(server.run, sockets=[listener])
    print(f"Serving at {url}", flush=True)
    if not args.tiny:
        serve()
        return
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        print(ask_once(url, {"prompt": "What is 3 plus 4?", "max_new_tokens": 16}))
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    main()
