"""`falcon-spec regenerate`: let the target write its own answers to the prompts of a training set."""

import os

from transformers import PreTrainedModel

from ..errors import GenerationError, TargetError
from ..generation.probe import check_kind, probe
from ..training.answers import ChatEndpoint
from ..training.options import RegenerateOptions
from ..training.regenerate import regenerate
from .loading import load_target, read_config
from .options import RegenerateCommand


def run(command: RegenerateCommand, options: RegenerateOptions) -> None:
    """Write the answers, and print how many there are."""
    data = command.read_conversations()
    _, tokenizer = read_config(command.target, command.gguf_file)
    command.check_template(tokenizer)

    answerer: PreTrainedModel | ChatEndpoint
    if command.endpoint is not None:
        answerer = ChatEndpoint(
            command.endpoint,
            command.endpoint_model or command.target,
            api_key=os.environ.get("OPENAI_API_KEY"),
            timeout_seconds=command.timeout_seconds,
            num_at_once=command.concurrency,
            template_kwargs=command.template_kwargs,
        )
    else:
        answerer, _ = load_target(command.target, command.dtype, command.device, command.gguf_file)
        try:
            check_kind(answerer)  # before hours are spent on its answers
            probe(answerer)
        except (GenerationError, TargetError) as error:
            raise TargetError(f"Answers are to train a drafter, but `train` refuses this target. {error}") from error

    num_written = regenerate(answerer, tokenizer, data, command.output, options, command.template_kwargs)
    print(f"{num_written} conversations in {command.output}")
