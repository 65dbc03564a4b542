"""Who answers prompts in place of the answers of training data: a target in this process, or a server that has it.

[`TargetAnswerer`] reads batches of prompts of like length. [`ChatEndpoint`] asks a server that speaks OpenAI's chat
completions, and asks again where that may help.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

import torch
from huggingface_hub import get_session
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # that of `httpx` or `httpx2`
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..drafters.config_fields import context_of
from ..errors import EndpointError, OptionError
from ..provenance import weights_fingerprint
from .chat_template import ChatTemplate, Message
from .options import RegenerateOptions
from .row_encoding import UnusableRowError


@dataclass(frozen=True)
class Prompt:
    """A conversation up to a turn of the assistant, as messages, as text and as tokens."""

    messages: list[Message]
    text: str
    ids: list[int]


@dataclass(frozen=True)
class Reply:
    """An answer, whether it came to its end, and the thought before it where that is kept apart."""

    text: str
    is_complete: bool
    thought: str = ""


# The target in this process


class TargetAnswerer:
    """Answers as the target writes them, one text for each prompt.

    Args:
        target ([`~transformers.PreTrainedModel`]): The model that answers.
        template ([`ChatTemplate`]): The chat template of its tokenizer.

    Raises:
        [`OptionError`]: thoughts are parted from answers by special tokens.
    """

    num_at_once = 1  # batches

    def __init__(self, target: PreTrainedModel, template: ChatTemplate) -> None:
        if template.hides_thoughts:
            raise OptionError(
                f"Answers of `{target.name_or_path}` part thoughts from words by special tokens, which are not in a "
                "text. Take them from a server that parts them: `--endpoint URL`."
            )

        self.target = target
        self.tokenizer = template.tokenizer
        stops = target.generation_config.eos_token_id
        self.stop_ids = stops if isinstance(stops, list) else [stops]
        self.context = context_of(target.config)

    @property
    def settings(self) -> dict[str, Any]:
        """What all answers of a file must share: the target, and how it generates."""
        generation = self.target.generation_config.to_diff_dict()
        return {"target": weights_fingerprint(self.target), "generation_config": str(generation)}

    def batches(self, lengths: Mapping[int, int], options: RegenerateOptions) -> dict[int, list[int]]:
        """Batches of rows with prompts of like length, by a number for their seed; `lengths` are tokens of prompts."""
        rows = sorted(lengths, key=lengths.__getitem__)
        starts = range(0, len(rows), options.batch_size)
        return {start: rows[start : start + options.batch_size] for start in starts}

    @torch.inference_mode()
    def answer(self, prompts: Sequence[Prompt], options: RegenerateOptions, seed: int) -> list[Reply]:
        """The answer to each prompt."""
        rows = [torch.tensor(prompt.ids) for prompt in prompts]
        config = self.target.generation_config
        known = (config.pad_token_id, self.tokenizer.pad_token_id, self.stop_ids[0], 0)
        pad_token_id = next(token for token in known if token is not None)
        ids = pad_sequence(rows, batch_first=True, padding_value=pad_token_id, padding_side="left")
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        given: dict[str, Any] = {"do_sample": False}
        if options.temperature:
            given = {"do_sample": True, "temperature": options.temperature, "top_k": 0}

        with torch.random.fork_rng():  # `generate` draws from the global stream
            torch.manual_seed(seed)
            output = self.target.generate(  # type: ignore[operator]  # `PreTrainedModel` does not declare it
                input_ids=ids.to(self.target.device),
                attention_mask=mask.to(self.target.device),
                max_new_tokens=options.max_new_tokens,
                num_beams=1,
                num_return_sequences=1,
                pad_token_id=pad_token_id,
                return_dict_in_generate=False,
                tokenizer=self.tokenizer,
                **given,
            )

        ends = set(self.stop_ids)
        if config.stop_strings:
            ends.add(pad_token_id)  # all that shows that a string ended a row

        replies = []
        for row in output[:, ids.shape[1] :].tolist():
            end = next((number for number, token in enumerate(row, start=1) if token in ends), None)
            text = self.tokenizer.decode(row[:end], skip_special_tokens=True)
            replies.append(Reply(str(text), end is not None))

        return replies


# A server

RETRIED = (408, 409, 425, 429)  # and all from 500 on: the server may answer later
NOT_TAKEN = (400, 413, 422)  # the server does not take this request, but maybe others
REFUSED = "a prompt that the server refuses"
CUT = "length"  # why an answer ended, as servers say it; all others are parts of an answer, or more than a text
ENDED = ("stop", "eos_token", "stop_sequence", None)
LONGEST_WAIT_SECONDS = 60.0
THOUGHTS = ("reasoning_content", "reasoning")  # names that servers give to thoughts


@dataclass
class ChatEndpoint:
    """An OpenAI-compatible server that answers prompts. Threads may share it.

    Args:
        url (`str`): Its address, such as `http://localhost:8000/v1`.
        model (`str`): The name by which the server knows the model.
        api_key (`str`, *optional*): The key, which is never shown.
        timeout_seconds (`float`): The longest time for an answer.
        num_tries (`int`): How often a request is made before it fails.
        num_at_once (`int`): Requests at once.
        template_kwargs (`dict`): Arguments for the chat template, which are sent to servers that take them.
        sleep: What lets seconds pass.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    timeout_seconds: float = 600.0
    num_tries: int = 6
    num_at_once: int = 16
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    sleep: Callable[[float], None] = time.sleep
    context: ClassVar[None] = None  # of the server's business

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise OptionError(f"`endpoint` must begin with http:// or https://, but it is `{self.url}`.")

        self.url = self.url.rstrip("/")
        # A fresh client of the kind that the Hub's library has: its own one refuses to work in offline mode.
        client = type(get_session())
        http = import_module(client.__module__)  # `httpx` or `httpx2`: at most 100 connections unless they are told
        limits = http.Limits(max_connections=self.num_at_once, max_keepalive_connections=self.num_at_once)
        self._client = client(timeout=self.timeout_seconds, limits=limits)

    @property
    def settings(self) -> dict[str, Any]:
        """What all answers of a file must share: the name of the model; its server may move."""
        return {"endpoint_model": self.model}

    def batches(self, lengths: Mapping[int, int], options: RegenerateOptions) -> dict[int, list[int]]:  # noqa: ARG002
        """Each row by itself, for the server makes its own batches."""
        return {row: [row] for row in lengths}

    def answer(
        self, prompts: Sequence[Prompt], options: RegenerateOptions, seed: int
    ) -> list[Reply | UnusableRowError]:
        """The answers of the server, or what it says of a prompt that it refuses.

        How it draws, besides seed and temperature, is its own business.

        Raises:
            [`EndpointError`]: the server takes no request, or does not answer in all tries.
        """
        sent: dict[str, Any] = {
            "model": self.model,
            "max_tokens": options.max_new_tokens,
            "temperature": options.temperature,
            "seed": seed,
        }
        if self.template_kwargs:
            sent["chat_template_kwargs"] = dict(self.template_kwargs)

        found = []
        for prompt in prompts:
            messages = [{"role": message["role"], "content": message["content"]} for message in prompt.messages]
            found.append(self._ask({**sent, "messages": messages}))

        return found

    def _ask(self, body: Mapping[str, Any]) -> Reply | UnusableRowError:
        """Make a request until it is answered."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        said = ""
        for number in range(self.num_tries):
            if number:
                self.sleep(min(2.0 ** (number - 1), LONGEST_WAIT_SECONDS))

            try:
                response = self._client.post(f"{self.url}/chat/completions", json=body, headers=headers)
            except HTTPError as error:
                said = f"{type(error).__name__}: {error}"
                continue

            said = f"status {response.status_code}, {response.text[:300]!r}".replace(self.api_key or "\0", "(key)")
            if response.status_code in NOT_TAKEN:
                return UnusableRowError(REFUSED, f"the server must take the prompt, but says {said}.")
            if response.status_code in RETRIED or response.is_server_error:
                continue
            if not response.is_success:
                break

            try:
                choice = response.json()["choices"][0]
                ending = choice.get("finish_reason")
                if ending not in (*ENDED, CUT):
                    fault = f"the server must write the answer to its end, but ended it by {ending!r}."
                    return UnusableRowError(REFUSED, fault)

                return _reply(choice)
            except (ValueError, LookupError, TypeError, AttributeError):
                continue  # no chat completion

        raise EndpointError(
            f"`{self.url}` must answer requests for the model `{self.model}`, but it does not: {said}. Check address, "
            "model and the key in `OPENAI_API_KEY`; what is answered is kept, and the same command goes on from there."
        )


def _reply(choice: Mapping[str, Any]) -> Reply:
    """The answer in a chat completion; a `TypeError` if there is no text in it."""
    message = choice["message"]
    thought = next((message[name] for name in THOUGHTS if message.get(name)), "")
    text = message.get("content") or ""
    if not isinstance(text, str) or not isinstance(thought, str):
        raise TypeError("an answer must be a text")

    return Reply(text, choice.get("finish_reason") != CUT, thought)
