"""Serve a target with its drafter on Ray Serve: replicas in processes of their own, each with one text at a time.

Command: python examples/08_serve_ray.py --replicas 2
Ask it as the server of 07: curl localhost:8000/generate -H "content-type: application/json" -d '{"prompt": "What is 3 plus 4?"}'
Every replica loads the pair and needs its own device (`--gpus 1`) or cores (`--cpus`); each learns for itself what drafting costs.
Hardware and time: two CPU cores; most of the start is Ray's own, which gives up after a minute where others keep the cores busy.
`--tiny` serves a random pair, asks it once over HTTP and ends. Needs the extra `ray`; docs/serving.md says more.
"""

import argparse
import socket
from typing import Any

import ray
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pair import pair_options, read_pair
from ray import serve
from serving import Ask, Desk, ask_once

app = FastAPI(title="transformers_falcon_spec")


@serve.deployment
@serve.ingress(app)
class Replica:
    """A pair in a process of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.desk = Desk(read_pair(args), args.max_waiting)

    @app.post("/generate", response_model=None)
    async def generate(self, ask: Ask) -> dict[str, Any] | StreamingResponse:
        """Write a text."""
        return await self.desk.reply(ask)


def main() -> None:
    """Serve until interrupted."""
    parser = pair_options(__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--cpus", type=float, default=1, help="of a replica")
    parser.add_argument("--gpus", type=float, default=0, help="of a replica; give `--device cuda`, too")
    parser.add_argument("--max-waiting", type=int, default=16, help="requests that may wait at a replica")
    args = parser.parse_args()
    if args.tiny:
        with socket.create_server(("127.0.0.1", 0)) as found:
            args.port = found.getsockname()[1]
    ray.init(include_dashboard=False)
    serve.start(http_options={"port": args.port})
    replica = Replica.options(
        num_replicas=args.replicas,
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
        max_ongoing_requests=args.max_waiting + 1,
    )
    serve.run(replica.bind(args), blocking=not args.tiny)
    if args.tiny:
        print(ask_once(f"http://127.0.0.1:{args.port}", {"prompt": "What is 3 plus 4?", "max_new_tokens": 16}))
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
