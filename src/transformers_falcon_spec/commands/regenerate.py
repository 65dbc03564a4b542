"""`falcon-spec regenerate`: let the target write its own answers to the prompts of a training set.

With `--endpoint` a server that serves the target answers, such as vLLM, SGLang or llama.cpp: any that speaks OpenAI's
chat completions. Of the target only the tokenizer is loaded then. A key is read from the variable OPENAI_API_KEY.

Example:
  falcon-spec regenerate --target models/reference-target --data conversations.jsonl --output answered.jsonl
  falcon-spec regenerate --target Qwen/Qwen3-8B --endpoint http://localhost:8000/v1 --data conversations.jsonl
                         --output answered.jsonl --chat_template_kwargs '{"enable_thinking": false}'
"""

import os
from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedModel

from ..errors import OptionError, TargetError
from ..generation.probe import probe
from ..training.answers import ChatEndpoint, RegenerateOptions
from ..training.regenerate import regenerate
from .loading import check_device, load_target, load_tokenizer
from .options import DataOptions, option


@dataclass(kw_only=True)
class ServerOptions:
    """The server that answers in place of a target in this process."""

    group: ClassVar[str] = "server"
    endpoint: str | None = option("Address of an OpenAI-compatible server, such as http://localhost:8000/v1.", None)
    endpoint_model: str | None = option("The target's name at the server; None is that of `--target`.", None)
    concurrency: int = option("Requests at once.", 16)
    timeout_seconds: float = option("The longest time for an answer, after which it is asked for again.", 600.0)


@dataclass(kw_only=True)
class RegenerateCommand(DataOptions, ServerOptions):
    """The target that answers, and the file of the answers."""

    needs_answers: ClassVar[bool] = False
    target: str = option("Folder or Hub name of the target.")
    data: list[str] = option("Conversations, or questions alone, as `train` reads them.")
    output: str = option("JSON lines file to write; continued if it was begun with the same options.")
    device: str = option("`auto`, or as `device_map` of `from_pretrained` takes it.", "auto")


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
            probe(answerer)  # before hours are spent on its answers
        except TargetError as error:
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
