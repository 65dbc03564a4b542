"""Files of answered conversations: what stands in them, how far they are, and how many answers were cut."""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from ..errors import OptionError
from ..provenance import portable
from .chat_template import ChatTemplate, Message

logger = logging.getLogger(__name__)
NUM_BEGINNING = 40  # letters at the end of a prompt, with which an answer may begin


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
    is_cut: bool = False  # the last answer did not come to its end

    def add(self, opening: list[Message], reply: Reply, prompt: str) -> None:
        """Add a turn and its answer, unless this was cut within its thought, which the `prompt` may begin."""
        self.is_cut = not reply.is_complete
        _, begin, thought = (prompt[-NUM_BEGINNING:] + reply.text).rpartition("<think>")
        is_thinking = not reply.text.strip() if reply.thought else begin and "</think>" not in thought
        if self.is_cut and is_thinking:
            return
        kept_apart = {"reasoning_content": reply.thought} if reply.thought else {}
        self.messages += [*opening, {"role": "assistant", "content": reply.text, **kept_apart}]

    def line(self, row: int) -> str:
        """The line of the file for the conversation with this number."""
        cut = {"is_cut": True} if self.is_cut else {}
        return json.dumps({"row": row, "messages": self.messages, **cut}, ensure_ascii=False) + "\n"


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


def prompt_ids(template: ChatTemplate, messages: list[Message]) -> list[int]:
    """The token ids of a prompt; none if the chat template refuses it."""
    try:
        return template.encoded(messages, add_generation_prompt=True)["input_ids"]
    except TemplateError:
        return []


def settings_of(options: Any, template: ChatTemplate, **others: Any) -> dict[str, Any]:
    """What all answers of a file must share."""
    kwargs = {"template_kwargs": dict(template.kwargs)} if template.kwargs else {}
    return {**asdict(options), **kwargs, **others}


def begin(output: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Read how far an earlier run came, which is stored next to its file, or start anew.

    Raises:
        [`OptionError`]: the file was begun with other settings, or by somebody else.
    """
    settings = portable(dict(settings))
    progress: dict[str, Any] = {"options": settings}
    output.parent.mkdir(parents=True, exist_ok=True)
    if _progress_file(output).exists():
        progress = json.loads(_progress_file(output).read_text(encoding="utf-8"))
        if portable(progress["options"]) != settings:
            raise OptionError(
                f"`{output}` was begun with {progress['options']}, but the options now are {settings}. "
                "Go on with the old options, or write to another file."
            )
        logger.info("%s: going on.", output)
    elif output.exists():
        raise OptionError(f"`{output}` exists but was not begun by `regenerate`. Delete it or write to another file.")
    write_progress(progress, output)  # before the file itself, so that a file without progress is not ours
    output.touch()
    return progress


def write_progress(progress: Mapping[str, Any], output: Path) -> None:
    """Store how far a run came."""
    path = _progress_file(output)
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(progress), encoding="utf-8")
    fresh.replace(path)


def log_left_out(num_rows: int) -> None:
    """Log how many rows cannot be asked about."""
    if num_rows:
        logger.warning("%d prompts exceed `max_prompt_tokens` or do not fit the template: left out.", num_rows)


def log_cuts(output: Path, num_tokens: int, num_without: int) -> None:
    """Log how many conversations were cut at `num_tokens`: those in the file, and `num_without` any answer."""
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").split("\n") if line]
    num_cut = sum("is_cut" in line for line in lines) + num_without
    text = "Of %d conversations %d ended with an answer that was cut at `max_new_tokens`, which is %d."
    numbers = [len(lines) + num_without, num_cut, num_tokens]
    if num_without:
        text += " %d of these are left out, for the first answer was cut within its thought."
        numbers.append(num_without)
    logger.log(logging.WARNING if num_cut else logging.INFO, text, *numbers)


def _progress_file(output: Path) -> Path:
    return output.with_name(output.name + ".progress.json")
