"""Prompt sets from JSON lines files: `{"id": ..., "messages": [...]}` or `{"id": ..., "prompt": ...}` a row."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase

from ..errors import ConversationError


@dataclass(frozen=True)
class Prompt:
    """One prompt and where it comes from."""

    set_name: str
    prompt_id: str
    messages: tuple[tuple[str, str], ...]  # role and content

    def input_ids(self, tokenizer: PreTrainedTokenizerBase) -> Tensor:
        """Token ids `[1, tokens]`: through the chat template where there is one, else the plain text."""
        if tokenizer.chat_template is None:
            return tokenizer("\n".join(content for _, content in self.messages), return_tensors="pt")["input_ids"]
        messages = [{"role": role, "content": content} for role, content in self.messages]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        return cast(BatchEncoding, encoded)["input_ids"]

    @property
    def text(self) -> str:
        """What the user says last."""
        return self.messages[-1][1]


def read_prompts(paths: list[str], limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of each file; a set is named after its file.

    Raises:
        [`ConversationError`]: a file is missing, or a row is no prompt; names file and line.
    """
    return [prompt for path in paths for prompt in _read(Path(path))[:limit]]


def _read(path: Path) -> list[Prompt]:
    if not path.is_file():
        raise ConversationError(
            f"The prompt file `{path}` does not exist. Give JSON lines with `prompt` or `messages`."
        )
    lines = path.read_text(encoding="utf-8").split("\n")
    return [_prompt(line, path, number) for number, line in enumerate(lines, start=1) if line.strip()]


def _prompt(line: str, path: Path, number: int) -> Prompt:
    try:
        row = json.loads(line)
        messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        upto = max(place for place, message in enumerate(messages) if message["role"] == "user") + 1
        turns = tuple((message["role"], message["content"]) for message in messages[:upto])
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConversationError(
            f"{path}, line {number}: a prompt needs `prompt` or `messages` with a user turn: {error}."
        ) from None
    return Prompt(path.name.removesuffix(".jsonl"), str(row.get("id", number)), turns)
