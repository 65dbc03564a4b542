"""Who answers prompts in place of the answers of training data: a target in this process, or a server that has it.

[`TargetAnswerer`] reads batches of prompts of like length. [`ChatEndpoint`] asks a server that speaks OpenAI's chat
completions, and asks again where that may help.
"""

import copy
import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import torch
from huggingface_hub import get_session
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # that of `httpx` or `httpx2`
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel

from ..errors import EndpointError, FalconSpecError, OptionError
from ..provenance import weights_fingerprint
from .chat_template import ChatTemplate, Message
from .options import RegenerateOptions

logger = logging.getLogger(__name__)


class RefusedPromptError(FalconSpecError):
    """A prompt gets no answer, but others may."""


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

SORT_WINDOW = 64  # batches whose rows are sorted by length together, for less padding

# What a generation config may ask for, and what holds instead: one text for each prompt, token by token.
ONE_TEXT = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "cache_implementation": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "use_mtp": None,
    "penalty_alpha": None,
    "dola_layers": None,
}


class TargetAnswerer:
    """Answers as the target writes them.

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
        self.num_retried = 0  # batches
        self.config = one_text_config(target)

        stops = self.config.eos_token_id
        self.stop_ids = set(stops if isinstance(stops, list) else [stops])
        if self.config.pad_token_id is None:
            known = (self.tokenizer.pad_token_id, *self.stop_ids, 0)
            self.config.pad_token_id = next(token for token in known if token is not None)
        if self.config.stop_strings:
            self.stop_ids.add(self.config.pad_token_id)  # all that shows that a string ended a row

    @property
    def settings(self) -> dict[str, Any]:
        """What all answers of a file must share: the target, with hashes of its weights and generation config."""
        generation = self.target.generation_config.to_json_string(ignore_metadata=True)
        return {
            "target": self.target.name_or_path,
            "weights": weights_fingerprint(self.target),
            "generation_config": hashlib.blake2b(generation.encode(), digest_size=8).hexdigest(),
        }

    def batches(self, lengths: Mapping[int, int], options: RegenerateOptions) -> dict[int, list[int]]:
        """Batches of rows with prompts of like length, by a number for their seed; `lengths` are tokens of prompts."""
        rows: list[int] = []
        for window in _parts(list(lengths), SORT_WINDOW * options.batch_size):
            rows += sorted(window, key=lengths.__getitem__)
        return dict(enumerate(_parts(rows, options.batch_size)))

    def answer(
        self, prompts: Sequence[Prompt], options: RegenerateOptions, seed: int
    ) -> Sequence[Reply | FalconSpecError]:
        """The answer to each prompt, or the error because of which it has none.

        A batch for which there is too little memory is read row by row.
        """
        config = self.target.generation_config
        try:
            self.target.generation_config = self.config
            with torch.random.fork_rng():
                torch.manual_seed(seed)  # `generate` draws from the global stream, which is restored afterwards
                return self._replies(prompts, options)
        finally:
            self.target.generation_config = config

    def close(self) -> None:
        """Nothing runs on."""

    def _replies(self, prompts: Sequence[Prompt], options: RegenerateOptions) -> Sequence[Reply | FalconSpecError]:
        embeddings: Any = self.target.get_input_embeddings()
        num_known = embeddings.weight.shape[0]
        largest = max(max(prompt.ids) for prompt in prompts)
        if largest >= num_known:  # a GPU would give up all later work, too
            fault = f"token ids must be below {num_known}, the number of the target's embeddings"
        else:
            try:
                return self._generate(prompts, options)
            except (MemoryError, RuntimeError) as error:
                is_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
                if not is_of_memory and "DefaultCPUAllocator" not in str(error):
                    raise
            fault = "it needs more memory than there is, so lower `max_prompt_tokens` or `max_new_tokens`"

        if len(prompts) == 1:  # outside of the block, for its error keeps what was computed
            return [RefusedPromptError(f"A prompt of {len(prompts[0].ids)} tokens cannot be answered: {fault}.")]

        self.num_retried += 1
        logger.warning(
            "%d prompts cannot be answered at once, so each is answered alone, as in %d batches so far: %s.",
            len(prompts),
            self.num_retried,
            fault,
        )
        return [self._replies([prompt], options)[0] for prompt in prompts]

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[Prompt], options: RegenerateOptions) -> list[Reply]:
        """Generate an answer to each prompt; it ends with the first stop token, which padding follows."""
        given: dict[str, Any] = {"do_sample": False}
        if options.temperature:
            given = {"do_sample": True, "temperature": options.temperature, "top_k": 0}
        if self.config.stop_strings:
            given["tokenizer"] = self.tokenizer

        ids, mask = self._padded(prompts)
        output = self.target.generate(  # type: ignore[operator]  # `PreTrainedModel` does not declare it
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=options.num_tokens,
            return_dict_in_generate=False,
            **given,
        )
        replies = []
        for row in output[:, ids.shape[1] :].tolist():
            end = next((number for number, token in enumerate(row, start=1) if token in self.stop_ids), None)
            text = self.tokenizer.decode(row[:end], skip_special_tokens=True)
            replies.append(Reply(str(text), end is not None))
        return replies

    def _padded(self, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
        """Token ids and mask `[rows, tokens]` of prompts, with padding on the left."""
        rows = [torch.tensor(prompt.ids) for prompt in prompts]
        ids = pad_sequence(rows, True, float(self.config.pad_token_id), "left")
        mask = pad_sequence(list(map(torch.ones_like, rows)), True, 0, "left")
        return ids.to(self.target.device), mask.to(self.target.device)


def one_text_config(target: PreTrainedModel) -> GenerationConfig:
    """A copy of the target's generation config that asks for one text, token by token; a warning says what is lost."""
    config = copy.deepcopy(target.generation_config)
    changed = []
    for name, value in ONE_TEXT.items():
        asked = getattr(config, name, None)
        if asked not in (None, value):
            changed.append(f"`{name}` of {asked}")
            setattr(config, name, value)

    if changed:
        logger.warning("Each prompt gets one answer, token by token: nothing comes of %s.", ", ".join(changed))
    return config


def _parts(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


# A server

RETRIED = (408, 409, 425, 429)  # and all from 500 on: the server may answer later
REFUSED = (400, 413, 422)  # the server does not take this request, but maybe others
FIRST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0
THOUGHTS = ("reasoning_content", "reasoning")  # names that servers give to thoughts
NUM_SHOWN = 300  # characters of an answer that errors show


class RefusedRequestError(RefusedPromptError, EndpointError):
    """The server does not take one request, but maybe others."""


class UnusableEndpointError(EndpointError):
    """The server takes no request: the key, the model or the address is wrong."""


class _MayComeError(EndpointError):
    """There is no answer yet; the server may say when to ask again."""

    def __init__(self, text: str, wait_seconds: float | None = None) -> None:
        super().__init__(text)
        self.wait_seconds = wait_seconds


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

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            raise OptionError(
                "`endpoint` must be an address such as `http://localhost:8000/v1`, without a name or key in it, but "
                f"it is `{self.url.rpartition('@')[2]}`. A key belongs into the variable `OPENAI_API_KEY`."
            )

        self.api_key = (self.api_key or "").strip() or None
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise OptionError("The key in `OPENAI_API_KEY` must be one line of plain characters, but it is not.")
        if not 0 < self.timeout_seconds < math.inf:
            raise OptionError(f"`timeout_seconds` must be above 0, but it is {self.timeout_seconds}.")
        if self.num_at_once < 1:
            raise OptionError(f"`concurrency` must be at least 1, but it is {self.num_at_once}.")

        self.url = self.url.rstrip("/").removesuffix("/chat/completions")
        if not urlsplit(self.url).path:
            self.url += "/v1"
        # A fresh client of the kind that the Hub's library has: its own one refuses to work in offline mode.
        self._client = type(get_session())(timeout=self.timeout_seconds)

    def close(self) -> None:
        """Close all connections; requests that run fail."""
        self._client.close()

    @property
    def settings(self) -> dict[str, Any]:
        """What all answers of a file must share: the name of the model; its server may move."""
        return {"endpoint_model": self.model}

    def batches(self, lengths: Mapping[int, int], options: RegenerateOptions) -> dict[int, list[int]]:  # noqa: ARG002
        """Each row by itself, for the server makes its own batches."""
        return {row: [row] for row in lengths}

    def answer(
        self, prompts: Sequence[Prompt], options: RegenerateOptions, seed: int
    ) -> Sequence[Reply | FalconSpecError]:
        """The answers of the server; an [`UnusableEndpointError`] if it takes no request.

        How it draws, besides seed and temperature, is its own business.
        """
        sent: dict[str, Any] = {"max_tokens": options.num_tokens, "temperature": options.temperature, "seed": seed}
        if self.template_kwargs:
            sent["chat_template_kwargs"] = dict(self.template_kwargs)

        found: list[Reply | FalconSpecError] = []
        for prompt in prompts:
            messages = [{"role": message["role"], "content": message["content"]} for message in prompt.messages]
            try:
                found.append(self.ask(messages, **sent))
            except UnusableEndpointError:
                raise
            except EndpointError as error:
                found.append(error)

        return found

    def ask(self, messages: Sequence[Message], **options: Any) -> Reply:
        """Ask for the next turn of a conversation; `options` are further fields of the request.

        Raises:
            [`EndpointError`]: the server cannot be reached, does not answer in time, answers garbage or refuses, each
                after the tries that are worth it.
        """
        body = {"model": self.model, "messages": list(messages), **options}
        failure = ""
        for number in range(self.num_tries):
            try:
                return self._post(body)
            except _MayComeError as error:
                failure = str(error)
                backoff = FIRST_WAIT_SECONDS * 2**number if error.wait_seconds is None else error.wait_seconds
            if number + 1 < self.num_tries:
                self.sleep(min(backoff, LONGEST_WAIT_SECONDS))

        raise EndpointError(f"`{self.url}` must answer, but in {self.num_tries} tries it did not: {failure}.")

    def _post(self, body: Mapping[str, Any]) -> Reply:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            response = self._client.post(f"{self.url}/chat/completions", json=body, headers=headers)
        except HTTPError as error:
            raise _MayComeError(f"{type(error).__name__}: {error}") from error

        text = response.text.replace(self.api_key or "\0", "(key)")
        said = f"status {response.status_code}, {text[:NUM_SHOWN]!r}"
        if response.status_code in RETRIED or response.is_server_error:
            wait = response.headers.get("retry-after", "").strip()  # seconds, or a date, which is not read
            raise _MayComeError(said, float(wait) if wait.isdecimal() else None)
        if response.status_code in REFUSED:
            raise RefusedRequestError(f"`{self.url}` refuses a request: {said}.")
        if not response.is_success:
            raise UnusableEndpointError(
                f"`{self.url}` must answer requests for the model `{self.model}`, but it does not: {said}. Check "
                "address, model and the key in `OPENAI_API_KEY`."
            )

        try:
            return _reply(response.json()["choices"][0])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _MayComeError(f"what it says is no chat completion: {said}") from error


def _is_address(url: str) -> bool:
    """Whether a text is the address of a server, without a name or a password in it."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and "@" not in url
    except ValueError:
        return False


def _reply(choice: Mapping[str, Any]) -> Reply:
    """The answer in a chat completion; a `TypeError` if there is no text in it."""
    message = choice["message"]
    thought = next((message[name] for name in THOUGHTS if message.get(name)), "")
    text = message.get("content") or ""
    is_text = isinstance(text, str) and isinstance(thought, str)
    if not is_text or not (text or thought or "content" in message):
        raise TypeError("an answer must be a text")
    return Reply(text, choice.get("finish_reason") != "length", thought)
