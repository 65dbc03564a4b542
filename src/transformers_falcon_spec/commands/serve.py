"""`falcon-spec serve`: serve a target with its drafter over HTTP, with the endpoints of OpenAI.

Any client of OpenAI's completions and chat completions works; docs/serving.md shows two. Requests that wait are
written as one batch where they can be. Needs the extra `serve`.

Example:
  falcon-spec serve --target Qwen/Qwen3-8B --drafter someone/falcon-qwen3-8b
"""

import gc
import os
import re
import socket
from dataclasses import dataclass

from transformers import logging

from ..errors import OptionError
from .loading import load_drafter
from .options import PairOptions, TemplateOptions, check_least, option

NEEDED = {"fastapi", "pydantic", "uvicorn"}
KEY_VARIABLE = "FALCON_SPEC_API_KEY"


@dataclass(kw_only=True)
class ServeCommand(PairOptions, TemplateOptions):
    """Where the server listens, and how much waits and is written at once."""

    host: str = option("Address to listen at; 0.0.0.0 for all of the machine's.", "127.0.0.1")
    port: int = option("Port to listen at; 0 takes a free one.", 8000)
    max_queue: int = option("Most requests that wait; more are told to come again (status 429).", 64)
    max_batch: int = option("Most requests that are written as one batch.", 8)
    max_body_mib: int = option("Largest body of a request in MiB; larger ones are refused (status 413).", 8)
    api_key: str | None = option(
        f"Key that clients must send, all but those of `/health`. Other users of the machine see options: the "
        f"environment variable {KEY_VARIABLE} is read where this is left out.",
        None,
    )

    def __post_init__(self) -> None:
        """Check the numbers and the key."""
        check_least(self, max_queue=1, max_batch=1, max_body_mib=1, port=0)
        if self.api_key is None:
            self.api_key = os.environ.get(KEY_VARIABLE)
        if self.api_key is not None and not re.fullmatch("[!-~]+", self.api_key):
            raise OptionError(
                f"`api_key`, or {KEY_VARIABLE}, must be letters, digits and signs of ASCII without spaces, but it "
                "is empty or holds others."
            )


def run(command: ServeCommand) -> None:
    """Serve until a signal ends it."""
    try:
        from ..serve.engine import Engine  # noqa: PLC0415  the extra may not be installed
        from ..serve.service import Server, Service  # noqa: PLC0415
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
    service = Service(engine, tokenizer, command.target, command.template_kwargs, command.max_body_mib)
    server = Server(service, command.host, command.port, command.api_key)
    gc.collect()
    gc.freeze()  # models stay to the end: collecting what requests leave need not look at them
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
