"""`falcon-spec serve`: serve a target with its drafter over HTTP, with the endpoints of OpenAI."""

import gc
import socket

from ..errors import OptionError
from ..evaluation.methods import PROMPT_LOOKUP_TOKENS
from ..generation.options import check_drafter_options
from ..serve.engine import Engine
from ..serve.service import Server, Service
from .loading import load_drafter
from .options import ServeCommand


def run(command: ServeCommand) -> None:
    """Serve until a signal ends it."""
    _check_is_free(command.host, command.port)
    target, tokenizer = command.load_target()
    drafter = load_drafter(command.drafter, target, tokenizer, template_kwargs=command.template_kwargs)
    if command.max_kept_tokens:
        options = drafter.generation_config
        options.prompt_lookup_num_tokens = options.prompt_lookup_num_tokens or PROMPT_LOOKUP_TOKENS
        check_drafter_options(drafter)  # some drafters draft no repeated text
    engine = Engine(target, tokenizer, drafter, command.max_queue, command.max_batch, command.max_kept_tokens)
    service = Service(engine, tokenizer, command.target, command.template_kwargs)
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
