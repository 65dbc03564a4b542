"""`falcon-spec regenerate`: let the target write its own answers to the prompts of a training set."""

import os

from transformers import PreTrainedModel

from ..errors import GenerationError, OptionError, TargetError
from ..generation.eligible import check_kind
from ..generation.probe import probe
from ..training.answers import ChatEndpoint
from ..training.options import RegenerateOptions
from ..training.regenerate import regenerate
from .loading import check_device, load_target, load_tokenizer
from .options import RegenerateCommand


def run(command: RegenerateCommand, options: RegenerateOptions) -> None:
    """Write the answers, and print how many there are."""
    server = _server(command)
    data = command.read_conversations()
    if server is None:
        check_device(command.device)
    tokenizer = load_tokenizer(command.target)
    command.check_template(tokenizer)

    answerer: PreTrainedModel | ChatEndpoint | None = server
    if answerer is None:
        answerer, _ = load_target(command.target, "auto", command.device)
        try:
            check_kind(answerer)  # before hours are spent on its answers
            probe(answerer)
        except (GenerationError, TargetError) as error:
            raise TargetError(f"Answers are to train a drafter, but `train` refuses this target. {error}") from error
    num_written = regenerate(answerer, tokenizer, data, command.output, options, command.template_kwargs)
    print(f"{num_written} conversations in {command.output}")


def _server(command: RegenerateCommand) -> ChatEndpoint | None:
    """The server that the command names, with the key of the environment."""
    if command.endpoint is None:
        if command.endpoint_model is not None:
            raise OptionError("`--endpoint_model` needs `--endpoint`, the address of the server. Give both.")
        return None
    return ChatEndpoint(
        command.endpoint,
        command.endpoint_model or command.target,
        api_key=os.environ.get("OPENAI_API_KEY"),
        timeout_seconds=command.timeout_seconds,
        num_at_once=command.concurrency,
        template_kwargs=command.template_kwargs,
    )
