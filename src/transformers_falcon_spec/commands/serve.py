"""`falcon-spec serve`: serve a target with its drafter over HTTP, with the endpoints of OpenAI.

Any client of OpenAI's completions and chat completions works; docs/serving.md shows two. Requests that wait are
written as one batch where they can be. Needs the extra `serve`.

Example:
  falcon-spec serve --target Qwen/Qwen3-8B --drafter someone/falcon-qwen3-8b --device cuda --dtype bfloat16
"""

import socket
from dataclasses import dataclass

from transformers import logging

from ..errors import OptionError
from .loading import load_drafter
from .options import DTYPE_HELP, PairOptions, TemplateOptions, check_least, option

NEEDED = {"fastapi", "pydantic", "uvicorn"}


@dataclass(kw_only=True)
class ServeCommand(PairOptions, TemplateOptions):
    """Where the server listens, and how much waits and is written at once."""

    dtype: str = option(DTYPE_HELP, "auto")
    host: str = option("Address to listen at; 0.0.0.0 for all of the machine's.", "127.0.0.1")
    port: int = option("Port to listen at; 0 takes a free one.", 8000)
    max_queue: int = option("Most requests that wait; more are told to come again (status 429).", 64)
    max_batch: int = option("Most requests that are written as one batch.", 8)

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_least(self, max_queue=1, max_batch=1, port=0)


def run(command: ServeCommand) -> None:
    """Serve until a signal ends it."""
    try:
        from ..serve.engine import Engine  # noqa: PLC0415  the extra may not be installed
        from ..serve.server import Server  # noqa: PLC0415
        from ..serve.service import Service  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        raise OptionError(
            f"`falcon-spec serve` needs `{error.name}`, which is not installed. Install the extra `serve`: "
            "pip install 'transformers_falcon_spec[serve]'."
        ) from None
    _check_is_free(command.host, command.port)
    logging.set_verbosity_error()
    target, tokenizer = command.load_target()
    drafter = load_drafter(command.drafter, target, tokenizer, template_kwargs=command.template_kwargs)
    engine = Engine(target, tokenizer, drafter, command.max_queue, command.max_batch)
    service = Service(engine, tokenizer, command.target, command.template_kwargs)
    server = Server(service, command.host, command.port)
    print(f"Serving {command.target} at {server.url}", flush=True)
    server.run()


def _check_is_free(host: str, port: int) -> None:
    """Refuse an address at which the server cannot listen, before models are loaded."""
    try:
        socket.create_server((host, port)).close()
    except (OSError, OverflowError) as error:
        raise OptionError(
            f"`host` and `port` must be an address to listen at, but {host}:{port} cannot be taken: {error}. Give "
            "another `--port`; 0 takes a free one."
        ) from error
