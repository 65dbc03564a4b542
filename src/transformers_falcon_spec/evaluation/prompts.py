"""Prompt sets, read from JSON lines files: `{"id": ..., "messages": [...]}` or `{"id": ..., "prompt": ...}` a row."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase

from ..drafters.config_fields import context_of
from ..errors import ConversationError
from ..training.chat_template import THINKING_SWITCHES

SET_NAMES = {"gsm8k": "GSM8K", "humaneval": "HumanEval", "mt_bench": "MT-Bench", "held_out": "held-out"}  # for readers


@dataclass(frozen=True)
class Prompt:
    """A prompt of a set, its `origin` in words for error messages, and arguments for the chat template."""

    set_name: str
    prompt_id: str
    messages: tuple[tuple[str, str], ...]  # role and content
    origin: str = field(default="", compare=False)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def input_ids(self, tokenizer: PreTrainedTokenizerBase, **switches: Any) -> Tensor:
        """Token ids `[1, tokens]` of the chat template, with `switches` over its arguments, or of the plain text."""
        if tokenizer.chat_template is None:
            return tokenizer("\n".join(content for _, content in self.messages), return_tensors="pt")["input_ids"]
        messages = [{"role": role, "content": content} for role, content in self.messages]
        kwargs: dict[str, Any] = {**self.template_kwargs, **switches}
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt", **kwargs
        )
        return cast(BatchEncoding, encoded)["input_ids"]

    def thinking(self, tokenizer: PreTrainedTokenizerBase) -> str | None:
        """Whether the prompt asks for thinking, `"on"` or `"off"`; None if the template has no switch for it.

        `"neither"` means that the prompt differs from those of both settings.
        """
        if tokenizer.chat_template is None:
            return None
        asked = self.input_ids(tokenizer)
        for name in THINKING_SWITCHES:
            on, off = (self.input_ids(tokenizer, **{name: value}) for value in (True, False))
            if not on.equal(off):
                return "on" if asked.equal(on) else "off" if asked.equal(off) else "neither"
        return None

    @property
    def text(self) -> str:
        """The user's last turn."""
        return self.messages[-1][1]


def read_prompts(
    paths: Sequence[str], limit: int | None = None, template_kwargs: Mapping[str, Any] | None = None
) -> list[Prompt]:
    """Read the first `limit` prompts of each file, after which a set is named; all rows are checked."""
    sets = [_read(Path(path)) for path in paths]
    owners: dict[tuple[str, str], str] = {}
    for prompt in (prompt for found in sets for prompt in found):
        key = (prompt.set_name, prompt.prompt_id)
        if key in owners:
            raise ConversationError(
                f"{prompt.origin}: each prompt of a set needs an `id` of its own, but {prompt.prompt_id!r} is "
                f"also that of {owners[key]}. Rename one; files of one name are one set."
            )
        owners[key] = prompt.origin
    kept = (prompt for found in sets for prompt in found[:limit])
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


def _read(path: Path) -> list[Prompt]:
    if not path.is_file():
        raise ConversationError(
            f"The prompt file `{path}` does not exist. Give JSON lines with `prompt` or `messages`."
        )
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ConversationError(f"`{path}` must be UTF-8 text, but {error}. Save it as UTF-8.") from None
    prompts = [_prompt(line, path, number) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise ConversationError(f"`{path}` must hold a prompt in each line, but it is empty. Fill it or leave it out.")
    return prompts


def _prompt(line: str, path: Path, number: int) -> Prompt:
    origin = f"{path}, line {number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConversationError(
            f"{origin}: a row must be one JSON object, but it is not JSON: {error}. Write each prompt in a "
            "line of its own."
        ) from None
    is_row = isinstance(row, dict)
    _check(is_row, origin, "a row must be a JSON object", row, 'Write `{"id": ..., "prompt": ...}`')
    name = row.get("id", number)
    is_name = isinstance(name, str | int) and not isinstance(name, bool) and name != ""
    remedy = "Change it, or leave it out to use the line's number"
    _check(is_name, origin, "`id` must be a text or a whole number", name, remedy)
    return Prompt(path.name.removesuffix(".jsonl"), str(name), _turns(row, origin), origin)


def _turns(row: dict[str, Any], origin: str) -> tuple[tuple[str, str], ...]:
    """Role and content of each turn up to the last one of the user."""
    given = [key for key in ("prompt", "messages") if key in row]
    must = "a row needs either `prompt` or `messages`"
    _check(len(given) == 1, origin, must, given or sorted(row), "Give one of them")
    messages = row["messages"] if given == ["messages"] else [{"role": "user", "content": row["prompt"]}]
    remedy = 'Write `[{"role": "user", "content": ...}]`'
    _check(isinstance(messages, list), origin, "`messages` must be a list", messages, remedy)
    turns = tuple(_turn(message, origin, given[0]) for message in messages)
    roles = [role for role, _ in turns]
    _check("user" in roles, origin, "`messages` must hold a turn of the user", roles, "Add what is asked")
    return turns[: len(roles) - roles[::-1].index("user")]


def _turn(message: Any, origin: str, key: str) -> tuple[str, str]:
    is_turn = isinstance(message, dict) and isinstance(message.get("role"), str)
    _check(is_turn, origin, "each of `messages` must be an object with `role` and `content`", message, "Write it so")
    content = message.get("content")
    name = "`prompt`" if key == "prompt" else f"`content` of the {message['role']}'s turn"
    is_text = isinstance(content, str) and content.strip() != ""
    _check(is_text, origin, f"{name} must be a text that is not empty", content, "Fill it, or take the row out")
    return message["role"], content


def _check(holds: bool, origin: str, must: str, came: Any, remedy: str) -> None:
    if not holds:
        raise ConversationError(f"{origin}: {must}, but it is {json.dumps(came)[:80]}. {remedy}.")
