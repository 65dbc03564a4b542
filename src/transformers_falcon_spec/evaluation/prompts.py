"""Prompt sets, read as conversations are: `{"id": ..., "messages": [...]}` or `{"id": ..., "prompt": ...}` a row.

Other forms and files are those of `training.conversations`, but every row must be a prompt, for none is left out.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase

from ..drafters.config_fields import context_of
from ..errors import ConversationError
from ..training.conversations import messages_of, rows_of
from ..training.row_encoding import UnusableRowError

SET_NAMES = {"gsm8k": "GSM8K", "humaneval": "HumanEval", "mt_bench": "MT-Bench", "held_out": "held-out"}  # for readers


@dataclass(frozen=True)
class Prompt:
    """A prompt of a set, its `origin` in words for error messages, and arguments for the chat template."""

    set_name: str
    prompt_id: str
    messages: tuple[tuple[str, str], ...]  # role and content
    origin: str = field(default="", compare=False)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def input_ids(self, tokenizer: PreTrainedTokenizerBase) -> Tensor:
        """Token ids `[1, tokens]` of the chat template, or of the plain text."""
        if tokenizer.chat_template is None:
            return tokenizer("\n".join(content for _, content in self.messages), return_tensors="pt")["input_ids"]

        messages = [{"role": role, "content": content} for role, content in self.messages]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt", **self.template_kwargs
        )

        return cast(BatchEncoding, encoded)["input_ids"]

    @property
    def digest(self) -> str:
        """A digest of what the target is asked, by which a measurement is known to be that of this prompt."""
        asked = json.dumps([self.messages, dict(self.template_kwargs)], sort_keys=True)
        return hashlib.blake2b(asked.encode(), digest_size=8).hexdigest()

    @property
    def text(self) -> str:
        """The user's last turn."""
        return self.messages[-1][1]

    @property
    def title(self) -> str:
        """The beginning of its first line."""
        return self.text.split("\n")[0][:70]


def read_prompts(
    paths: Sequence[str], limit: int | None = None, template_kwargs: Mapping[str, Any] | None = None
) -> list[Prompt]:
    """Read the first `limit` prompts of each file, after which a set is named; all rows are checked."""
    kept: list[Prompt] = []
    owners: dict[tuple[str, str], str] = {}
    for path in paths:
        set_name = Path(path).name.partition(".")[0]
        prompts = [_prompt(row, set_name, origin) for origin, row in rows_of(path)]
        if not prompts:
            raise ConversationError(
                f"`{path}` must hold a prompt in each line, but it is empty. Fill it or leave it out."
            )

        kept += prompts[:limit]

        for prompt in prompts:
            key = (prompt.set_name, prompt.prompt_id)
            if key in owners:
                raise ConversationError(
                    f"{prompt.origin}: each prompt of a set needs an `id` of its own, but {prompt.prompt_id!r} is "
                    f"also that of {owners[key]}. Rename one; files of one name are one set."
                )

            owners[key] = prompt.origin

    return [replace(prompt, template_kwargs=template_kwargs or {}) for prompt in kept]


def check_lengths(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, config: Any, max_new_tokens: int
) -> None:
    """Refuse prompts that leave no space for `max_new_tokens` in the context of a target: [`ConversationError`]."""
    context = context_of(config)
    if context is None:
        return

    for prompt in prompts:
        length = prompt.input_ids(tokenizer).shape[1]
        if length + max_new_tokens > context:
            raise ConversationError(
                f"{prompt.origin}: a prompt and its {max_new_tokens} new tokens must fit into the target's context of "
                f"{context} tokens, but the prompt has {length}. Shorten it, leave it out, or lower `max_new_tokens`."
            )


def _prompt(row: Any, set_name: str, origin: str) -> Prompt:
    number = origin.rpartition(" ")[2]
    name = row.get("id", number) if isinstance(row, Mapping) else number

    try:
        messages = messages_of(row, needs_answers=False)
    except UnusableRowError as error:
        raise ConversationError(f"{origin}: {error}") from error

    while messages and messages[-1]["role"] != "user":  # what comes behind the last question
        messages.pop()

    if not messages:
        raise ConversationError(f"{origin}: a row must hold a turn of the user, but it has none. Add what is asked.")

    for message in messages:
        if not message["content"].strip():
            raise ConversationError(
                f"{origin}: the {message['role']}'s turn must be a text that is not empty. Fill it, or take the row "
                "out."
            )

    return Prompt(set_name, str(name), tuple((each["role"], each["content"]) for each in messages), origin)
