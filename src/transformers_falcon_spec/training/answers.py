"""What is asked and what is answered in place of the answers of training data, and who may answer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Protocol

from ..errors import FalconSpecError, OptionError
from .chat_template import ChatTemplate, Message
from .conversations import check_whole
from .row_encoding import UnusableRowError

PLAIN_TOKENS, THINKING_TOKENS = 256, 4096  # lengths of answers, without and with a thought before them
LENGTH_HELP = (
    f"Most tokens of an answer; None is {PLAIN_TOKENS}, or {THINKING_TOKENS} where the chat template shows that "
    "answers begin with a thought."
)


CUT = "an answer that was cut at `max_new_tokens`"
CUT_THOUGHT = "a thought that was cut at `max_new_tokens`"
EMPTY = "an empty answer"
NUM_BEGINNING = 40  # letters at the end of a prompt, with which an answer may begin


class RefusedPromptError(FalconSpecError):
    """A prompt gets no answer, but others may."""


@dataclass(frozen=True)
class RegenerateOptions:
    """How answers are generated. The same options and rows give the same file, even if the run is interrupted."""

    max_new_tokens: int | None = field(default=None, metadata={"help": LENGTH_HELP})
    max_prompt_tokens: int = 512
    batch_size: int = 32
    temperature: float = 0.7  # 0 is greedy
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_prompt_tokens", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"`{name}` must be at least 1, but it is {value}.")
        if self.temperature < 0 or not isfinite(self.temperature):
            raise OptionError(f"`temperature` must be 0 (greedy) or more, but it is {self.temperature}.")

    def for_template(self, template: ChatTemplate) -> "RegenerateOptions":
        """The options with a length of answers that fits the chat template, unless one was given."""
        fitting = THINKING_TOKENS if template.thinks else PLAIN_TOKENS
        return self if self.max_new_tokens is not None else replace(self, max_new_tokens=fitting)

    @property
    def num_tokens(self) -> int:
        """The most tokens of an answer."""
        return self.max_new_tokens or PLAIN_TOKENS


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


@dataclass
class Answered:
    """A conversation with the answers that it got so far."""

    messages: list[Message] = field(default_factory=list)
    ending: str = ""  # why no further turn is answered
    error: FalconSpecError | None = None  # because of which the conversation is asked about again

    @property
    def goes_on(self) -> bool:
        """Whether a further turn may be answered."""
        return not self.ending and self.error is None

    def add(self, opening: list[Message], reply: Reply, prompt: str) -> None:
        """Add a turn and its answer, unless this is empty, or cut within a thought, which the `prompt` may begin."""
        _, begin, thought = (prompt[-NUM_BEGINNING:] + reply.text).rpartition("<think>")
        is_thinking = not reply.text.strip() if reply.thought else begin and "</think>" not in thought
        if not reply.is_complete:
            self.ending = CUT_THOUGHT if is_thinking else CUT
        elif not reply.text.strip() and not reply.thought:
            self.ending = EMPTY
        try:
            check_whole(reply.text + reply.thought, "the answer")
        except UnusableRowError as error:
            self.ending = error.reason

        if self.ending in ("", CUT):
            kept_apart = {"reasoning_content": reply.thought} if reply.thought else {}
            self.messages += [*opening, {"role": "assistant", "content": reply.text, **kept_apart}]

    def line(self, row: int, name: Any = None) -> str:
        """The line of the file for the conversation with this number, and with this `id` if it has one."""
        entry = {"row": row, "id": name, "messages": self.messages, "ended_by": self.ending or None}
        given = {key: value for key, value in entry.items() if value is not None}
        return json.dumps(given, ensure_ascii=False) + "\n"


class Answerer(Protocol):
    """Who answers prompts: the target in this process, or a server that has it."""

    @property
    def num_at_once(self) -> int:
        """How many batches are asked at once, each in a thread of its own if it is not one."""

    @property
    def settings(self) -> dict[str, Any]:
        """What all answers of a file must share, besides the options."""

    def batches(self, lengths: Mapping[int, int], options: RegenerateOptions) -> dict[int, list[int]]:
        """Rows to be answered together, by a number for their seed; `lengths` has the tokens of each row's prompt."""

    def answer(
        self, prompts: Sequence[Prompt], options: RegenerateOptions, seed: int
    ) -> Sequence[Reply | FalconSpecError]:
        """The answer to each prompt, or the error because of which it has none."""

    def close(self) -> None:
        """End what still runs."""


def openings_of(row: list[Message]) -> list[list[Message]]:
    """For each assistant turn the messages since the one before; a question at the end is to be answered, too."""
    openings: list[list[Message]] = [[]]
    for message in row:
        if message["role"] == "assistant":
            openings.append([])
        else:
            openings[-1].append(message)
    has_question = bool(openings[-1]) and openings[-1][-1]["role"] == "user"
    return openings if has_question else openings[:-1]
