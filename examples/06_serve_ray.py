"""Serve a target with its drafter on Ray Serve: replicas in processes of their own, each with the endpoints of `falcon-spec serve`.

Command: python examples/06_serve_ray.py --replicas 2
Every replica loads the pair and needs its own device (`--gpus 1`) or cores (`--cpus`); each learns for itself what drafting costs.
Hardware and time: two CPU cores; most of the start is Ray's own, which gives up after a minute where others keep the cores busy.
`--tiny` serves a random pair, asks it once over HTTP and ends. Needs the extra `ray`; docs/serving.md says more.
"""

import argparse
import json
import socket
import urllib.request
from typing import Any

import ray
from fastapi import FastAPI, Request, Response
from pair import pair_options, read_pair
from ray import serve

from transformers_falcon_spec.serve.engine import Engine
from transformers_falcon_spec.serve.protocol import ChatBody, CompletionBody
from transformers_falcon_spec.serve.service import Service, add_error_handlers

app = FastAPI(title="transformers_falcon_spec")
add_error_handlers(app)


@serve.deployment
@serve.ingress(app)
class Replica:
    """A pair in a process of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        pair = read_pair(args)
        engine = Engine(pair.target, pair.tokenizer, pair.drafter, args.max_queue)
        self.service = Service(engine, pair.tokenizer, args.target, {})

    @app.get("/v1/models")
    async def models(self) -> dict[str, Any]:
        """The model that is served."""
        return await self.service.models()

    @app.post("/v1/completions", response_model=None)
    async def completion(self, body: CompletionBody, request: Request) -> Response:
        """The text that follows a prompt."""
        return await self.service.completion(body, request)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(self, body: ChatBody, request: Request) -> Response:
        """The next turn of a conversation."""
        return await self.service.chat(body, request)


def main() -> None:
    """Serve until interrupted."""
    parser = pair_options(__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--cpus", type=float, default=1, help="of a replica")
    parser.add_argument("--gpus", type=float, default=0, help="of a replica; give `--device cuda`, too")
    parser.add_argument("--max_queue", type=int, default=16, help="requests that may wait at a replica")
    args = parser.parse_args()
    if args.tiny:
        with socket.create_server(("127.0.0.1", 0)) as found:
            args.port = found.getsockname()[1]
    ray.init(include_dashboard=False)
    serve.start(http_options={"port": args.port})
    replica = Replica.options(
        num_replicas=args.replicas,
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
        max_ongoing_requests=args.max_queue + 8,  # those that are written, too
    )
    serve.run(replica.bind(args), blocking=not args.tiny)
    if args.tiny:
        print(ask_once(args.port, {"model": args.target, "prompt": "What is 3 plus 4?", "temperature": 0}))
        serve.shutdown()
        ray.shutdown()


def ask_once(port: int, question: dict[str, Any]) -> Any:
    """The answer of a replica, over HTTP."""
    headers = {"content-type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(question).encode(), headers)) as response:
        return json.load(response)


if __name__ == "__main__":
    main()
