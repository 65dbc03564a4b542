"""One conversation as examples: as a whole, or answer by answer where the chat template rewrites earlier turns.

An example is what the target reads and writes when it gives its answers. Templates of targets that think take thoughts
out of earlier turns, so there each answer has an example of its own: the text in which it stands last.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ..errors import ConversationError
from .chat_template import ChatTemplate, Message, RefusedByTemplateError

Example = dict[str, Any]  # `input_ids` and `assistant_mask`; a `FeatureCache` adds tensors `[tokens, width]`

WHOLE = "whole"
TURN_BY_TURN = "turn by turn"
AS_WRITTEN = "as written"  # answers behind their prompts, for the template never shows them as the target writes them
GIVEN = "tokenised before"
TREATMENTS = (WHOLE, TURN_BY_TURN, AS_WRITTEN, GIVEN)  # other keys of counts are reasons why rows were left out
NUM_NAMED = 3  # rows that the log names for each such reason
_PROBE = "ANSWER-7f3a"  # stands for an answer, to see what the template writes around it
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")


class UnusableRowError(ConversationError):
    """A row cannot be used, for a reason that is counted."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class Turn:
    """An answer of the assistant, where it is the last one."""

    messages: Sequence[Message]  # up to the answer
    prompt: str  # the text before it
    text: str  # the text with it
    is_shown: bool  # all that the answer holds stands behind the prompt


def encode_row(row: Sequence[Message], template: ChatTemplate) -> tuple[str, list[Example]]:
    """The treatment of a conversation, and its examples; what follows the last answer is left out.

    Raises:
        [`UnusableRowError`]: an answer lacks the thought that the prompt begins, or has one that the prompt rules out.
        [`RefusedByTemplateError`]: the template refuses the conversation.
    """
    turns = []
    for number, message in enumerate(row, start=1):
        if message["role"] == "assistant":
            turns.append(_turn(row[:number], template))

    if template.has_marks:
        last = turns[-1]
        if all(last.text.startswith(turn.text) for turn in turns):
            return WHOLE, [_marked(last, template)]

        return TURN_BY_TURN, [_marked(turn, template, is_last=True) for turn in turns]

    if not all(turn.is_shown for turn in turns):
        return AS_WRITTEN, [_last(_as_written(turn, template), template) for turn in turns]

    whole = _whole(turns, template)
    if whole is not None:
        return WHOLE, [whole]

    return TURN_BY_TURN, [_last(turn, template) for turn in turns]


def describe_rows(counts: Mapping[str, int]) -> str:
    """The share of rows by treatment, in words.

    Example:

    ```python
    >>> describe_rows({"whole": 6, "turn by turn": 1, "tools": 2, "an unknown role": 1})
    '10 rows: 6 whole (60%), 1 turn by turn (10%), 3 left out (30%: 2 tools, 1 an unknown role)'

    ```
    """
    num_rows = sum(counts.values())
    parts = [f"{counts[name]} {name} ({counts[name] / num_rows:.0%})" for name in TREATMENTS if counts.get(name)]
    num_left_out = 0
    reasons = []
    for reason, number in counts.items():
        if reason not in TREATMENTS and number:
            num_left_out += number
            reasons.append(f"{number} {reason}")

    if reasons:
        parts.append(f"{num_left_out} left out ({num_left_out / num_rows:.0%}: {', '.join(reasons)})")

    return f"{num_rows} rows: {', '.join(parts)}"


def _turn(messages: Sequence[Message], template: ChatTemplate) -> Turn:
    """The turn as the template renders it; an empty thought that the template puts in belongs to the prompt."""
    answer = messages[-1]
    prompt = template.text(messages[:-1], add_generation_prompt=True)
    text = template.text(messages)
    behind = text.removeprefix(prompt)
    thought = answer.get("reasoning_content", "")
    said = re.split("</?think>", answer["content"])
    is_shown = text.startswith(prompt) and all(part.strip() in behind for part in (thought, *said))

    inserted = _EMPTY_THOUGHT.match(behind)
    has_thought = bool(thought) or "think>" in answer["content"]
    if is_shown and inserted is not None and not has_thought:
        prompt += inserted.group()

    words = said[-1].strip()
    closing = text.removeprefix(prompt).partition(words)[2] if words else text
    if not any(word in closing for word in template.special_words):
        text += _stop(messages, closing, template)

    return Turn(messages, prompt, text, is_shown)


def _stop(messages: Sequence[Message], closing: str, template: ChatTemplate) -> str:
    """The special token with which the next turn begins, where nothing else ends an answer, as in GLM's templates."""
    further = [{"role": "assistant", "content": _PROBE}, {"role": "user", "content": "?"}]
    try:
        text = template.text([*messages[:-1], *further])
    except RefusedByTemplateError:
        return ""

    follows = text.rpartition(_PROBE)[2].removeprefix(closing) if _PROBE in text else ""
    return next((word for word in template.special_words if follows.startswith(word)), "")


def _as_written(turn: Turn, template: ChatTemplate) -> Turn:
    """The answer behind its prompt as the target writes it, with what the template writes at the end of a turn."""
    answer = turn.messages[-1]
    probe = template.text([*turn.messages[:-1], {"role": "assistant", "content": _PROBE}])
    said = answer["content"]
    thought = answer.get("reasoning_content")
    if thought:
        said = f"<think>\n{thought.strip()}\n</think>\n\n{said}"

    num_before = _num_shared(turn.prompt, template.text(turn.messages[:-1]))
    begun = turn.prompt[num_before:]  # of the turn, by the prompt
    if "</think>" in begun and "</think>" in said:
        raise UnusableRowError(
            "a thought where none is asked for",
            "the prompt asks for an answer without a thought, but it has one. Change `chat_template_kwargs`.",
        )

    if "<think>" in begun and "</think>" not in begun:  # the prompt begins the thought
        said = said.lstrip().removeprefix("<think>").lstrip("\n")
        if "</think>" not in said:
            raise UnusableRowError(
                "an answer without a thought",
                "the prompt begins a thought, but the answer has none. Let the target answer it.",
            )

    closing = probe.rpartition(_PROBE)[2]
    if not any(word in closing for word in template.special_words):
        closing += _stop(turn.messages, closing, template)

    return Turn(turn.messages, turn.prompt, turn.prompt + said + closing, True)


def _whole(turns: Sequence[Turn], template: ChatTemplate) -> Example | None:
    """All answers in one example; None where the text of the last one does not begin with those of all others."""
    ids = template.ids(turns[-1].text)
    mask = [0] * len(ids)
    for turn in turns:
        before = template.ids(turn.prompt)
        after = template.ids(turn.text)
        end = _end_of_answer(after, len(before), template)
        if ids[:end] != after[:end] or after[: len(before)] != before:
            return None

        mask[len(before) : end] = [1] * (end - len(before))

    return {"input_ids": ids, "assistant_mask": mask}


def _last(turn: Turn, template: ChatTemplate) -> Example:
    """The last answer alone counts. Its tokens follow those of the prompt, as when the target writes it."""
    before = template.ids(turn.prompt)
    ids = template.ids(turn.text)
    if ids[: len(before)] != before:
        ids = before + template.ids(turn.text.removeprefix(turn.prompt))

    end = _end_of_answer(ids, len(before), template)
    mask = [0] * len(before) + [1] * (end - len(before)) + [0] * (len(ids) - end)
    return {"input_ids": ids, "assistant_mask": mask}


def _end_of_answer(ids: list[int], start: int, template: ChatTemplate) -> int:
    """Where an answer ends: with the first special token behind its words, for the target stops there."""
    special = template.special_ids
    end = len(ids)
    while end > start and (ids[end - 1] in special or not str(template.tokenizer.decode(ids[end - 1 : end])).strip()):
        end -= 1

    for number in range(end, len(ids)):
        if ids[number] in special:
            return number + 1

    return len(ids)


def _marked(turn: Turn, template: ChatTemplate, is_last: bool = False) -> Example:
    """What is marked counts; where the last answer alone is to count, what is marked behind its prompt."""
    encoded = template.encoded(turn.messages, return_assistant_tokens_mask=True)
    ids = encoded["input_ids"]
    mask = encoded["assistant_masks"]
    start = _num_shared(template.ids(turn.prompt), ids) if is_last else 0
    return {"input_ids": ids, "assistant_mask": [0] * start + list(mask[start:])}


def _num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How long the beginning is that two texts, or two lists of tokens, have in common."""
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return len(list(shared))
