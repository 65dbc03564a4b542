"""Replacing the answers of training data by the target's own, so that a drafter learns the text that it will draft.

Conversations go in; the same conversations with the answers of the target go into a file. Each is cut at the turns of
the assistant, and whoever answers, the target in this process or a server, is asked for one turn after the other.

Conversations are recorded beside the file as they are answered, so that a run that was interrupted goes on with the
rest; the file is written at the end, in the order of the rows.
"""

import hashlib
import json
import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafters.checkpoint import write_whole
from ..errors import ConversationError, OptionError, short
from ..records import Records
from .answers import REFUSED, ChatEndpoint, Prompt, Reply, TargetAnswerer
from .chat_template import ChatTemplate, Message
from .conversations import ConversationSet, check_whole
from .options import PLAIN_TOKENS, THINKING_TOKENS, RegenerateOptions
from .row_encoding import NUM_NAMED, UnusableRowError

logger = logging.getLogger(__name__)

CUT = "an answer that was cut at `max_new_tokens`"
CUT_THOUGHT = "a thought that was cut at `max_new_tokens`"
EMPTY = "an empty answer"
NUM_BEGINNING = 40  # letters at the end of a prompt, with which an answer may begin


def regenerate(
    answerer: PreTrainedModel | ChatEndpoint,
    tokenizer: PreTrainedTokenizerBase,
    rows: ConversationSet | list[list[Message]],
    output: str | Path,
    options: RegenerateOptions | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> int:
    """Write conversations to a file, with every assistant turn replaced by an answer of the target.

    A second call with the same arguments continues where the first stopped, and asks again what a server refused. A
    conversation ends before a prompt that is longer than `max_prompt_tokens`, that leaves no space for
    `max_new_tokens` in the target's context, or that is refused; before an empty answer; and at an answer that reaches
    `max_new_tokens`, or before it if that is within a thought. One without any answer is left out. The log counts both
    by reason, and names the first of each.

    Args:
        answerer ([`~transformers.PreTrainedModel`] or [`ChatEndpoint`]): The target, or a server that has it.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The target's tokenizer, with a chat template.
        rows ([`ConversationSet`] or `list[list[dict]]`): Conversations as `read_conversations` returns them.
        output (`str` or `Path`): The JSON lines file to write or continue.
        options ([`RegenerateOptions`], *optional*): How answers are generated.
        template_kwargs (`dict`, *optional*): Arguments for the chat template.

    Returns:
        `int`: the number of conversations in the file.

    Raises:
        [`ConversationError`]: no conversation got an answer.
        [`EndpointError`]: the server does not answer. What it answered before is kept.
        [`OptionError`]: an option is not as it must be, or the file was begun with others.
    """
    template = ChatTemplate(tokenizer, template_kwargs or {})
    options = with_length(options or RegenerateOptions(), template)
    data = rows if isinstance(rows, ConversationSet) else ConversationSet(rows=rows)
    asked = answerer if isinstance(answerer, ChatEndpoint) else TargetAnswerer(answerer, template)
    return _Run(asked, template, options, data).write(Path(output))


def with_length(options: RegenerateOptions, template: ChatTemplate) -> RegenerateOptions:
    """The options with a length of answers that fits the chat template, unless one was given."""
    fitting = THINKING_TOKENS if template.thinks else PLAIN_TOKENS
    return replace(options, max_new_tokens=options.max_new_tokens or fitting)


def openings_of(row: list[Message]) -> list[list[Message]]:
    """For each assistant turn the messages since the one before; a question at the end is to be answered, too."""
    openings: list[list[Message]] = [[]]
    for message in row:
        if message["role"] == "assistant":
            openings.append([])
        else:
            openings[-1].append(message)

    last = openings[-1]
    has_question = bool(last) and last[-1]["role"] == "user"
    return openings if has_question else openings[:-1]


@dataclass
class Answered:
    """A conversation with the answers that it got so far."""

    messages: list[Message] = field(default_factory=list)
    ending: str = ""  # why no further turn is answered

    def add(self, opening: list[Message], reply: Reply, prompt: str) -> None:
        """Add a turn and its answer, unless this is empty, or cut within a thought, which the `prompt` may begin."""
        _, begin, thought = (prompt[-NUM_BEGINNING:] + reply.text).rpartition("<think>")
        is_thinking = bool(begin) and "</think>" not in thought
        if reply.thought:
            is_thinking = not reply.text.strip()

        if not reply.is_complete:
            self.ending = CUT_THOUGHT if is_thinking else CUT
        elif not reply.text.strip() and not reply.thought:
            self.ending = EMPTY

        if self.ending in ("", CUT):
            answer = {"role": "assistant", "content": reply.text}
            if reply.thought:
                answer["reasoning_content"] = reply.thought

            self.messages += [*opening, answer]


class _Run:
    """What the batches of a run share."""

    def __init__(
        self,
        answerer: TargetAnswerer | ChatEndpoint,
        template: ChatTemplate,
        options: RegenerateOptions,
        data: ConversationSet,
    ) -> None:
        self.answerer = answerer
        self.template = template
        self.options = options
        self.openings = [openings_of(row) for row in data.rows]
        self.names = data.origins or [f"row {number}" for number in range(len(data.rows))]
        self.lock = threading.Lock()  # a tokenizer may serve one thread at a time
        self.num_told = Counter[str]()

    def write(self, output: Path) -> int:
        """Answer all rows that are not answered yet, and write the file; returns how many are in it."""
        options = asdict(self.options)
        del options["batch_size"]  # with smaller ones a run goes on that memory was too small for
        settings = {
            **options,
            **self.answerer.settings,
            "chat_template": _hash_of(self.template.tokenizer.get_chat_template()),
            "template_kwargs": dict(self.template.kwargs),
            "rows": _hash_of(self.openings),
        }
        progress = output.with_name(f"{output.name}.progress")
        if output.exists() and not progress.exists():
            raise OptionError(f"`{output}` exists but was not begun by `regenerate`. Write to another file.")

        records = Records(progress, settings)
        # A server that refused a prompt may have been mended since: another longest context, another template.
        done = {entry["row"] for entry in records.entries if entry.get("ended_by") != REFUSED}

        lengths = {}
        for row, openings in enumerate(self.openings):
            try:
                lengths[row] = len(self.prompt(openings[0]).ids)
            except UnusableRowError as error:
                if row not in done:
                    self.tell(row, error)
                    records.append({"row": row, "messages": [], "ended_by": error.reason})

        batches = self.answerer.batches(lengths, self.options)
        todo = [(number, batch) for number, batch in batches.items() if not done.issuperset(batch)]
        with ThreadPool(self.answerer.num_at_once) as pool:
            in_turn = map if self.answerer.num_at_once == 1 else pool.imap_unordered
            answered = in_turn(self.answer_batch, todo)
            for entries in tqdm(answered, total=len(todo), desc="regenerate", unit="batch"):
                for entry in entries:
                    records.append(entry)

        found = {entry["row"]: entry for entry in records.entries}  # a batch may have been answered again
        self.tell_totals(list(found.values()))
        lines = [json.dumps(found[row]) + "\n" for row in sorted(found) if found[row]["messages"]]
        if not lines:
            raise ConversationError("At least one conversation must get an answer, but none did. The log says why.")

        write_whole(output, "".join(lines))
        return len(lines)

    def answer_batch(self, numbered: tuple[int, list[int]]) -> list[dict[str, Any]]:
        """Answer the turns of conversations in order; each ends with its first turn that has no whole answer."""
        number, batch = numbered
        answered = {row: Answered() for row in batch}
        for turn in range(max(len(self.openings[row]) for row in batch)):
            prompts = self.prompts(answered, turn)
            if not prompts:
                break

            seed = self.options.seed + 1000 * number + turn
            replies = self.answerer.answer(list(prompts.values()), self.options, seed)
            for (row, prompt), reply in zip(prompts.items(), replies, strict=True):
                if isinstance(reply, UnusableRowError):
                    answered[row].ending = reply.reason
                    self.tell(row, reply)
                else:
                    answered[row].add(self.openings[row][turn], reply, prompt.text)

        entries = []
        for row, conversation in answered.items():
            entry: dict[str, Any] = {"row": row, "messages": conversation.messages}
            if conversation.ending:
                entry["ended_by"] = conversation.ending

            entries.append(entry)

        return entries

    def prompts(self, answered: Mapping[int, Answered], turn: int) -> dict[int, Prompt]:
        """The prompt of each conversation that has this turn; one without a prompt ends here."""
        prompts: dict[int, Prompt] = {}
        for row, conversation in answered.items():
            if conversation.ending or turn >= len(self.openings[row]):
                continue

            try:
                prompts[row] = self.prompt(conversation.messages + self.openings[row][turn])
            except UnusableRowError as error:
                conversation.ending = error.reason
                self.tell(row, error)

        return prompts

    def prompt(self, messages: list[Message]) -> Prompt:
        """The prompt that ends with these messages; an [`UnusableRowError`] if there is none."""
        for message in messages:
            check_whole(message.values())

        try:
            with self.lock:
                text = self.template.text(messages, add_generation_prompt=True)
                ids = self.template.ids(text)
        except Exception as error:  # templates and tokenizers are code of others
            fault = f"chat template and tokenizer must take the prompt, but say {short(error)}."
            raise UnusableRowError("a prompt that the chat template refuses", fault) from error

        most = self.options.max_prompt_tokens
        if not 0 < len(ids) <= most:
            fault = f"a prompt must have 1 to {most} tokens, but it has {len(ids)}."
            raise UnusableRowError("a prompt longer than `max_prompt_tokens`", fault)

        context, num_new = self.answerer.context, self.options.max_new_tokens or 0
        if context is not None and len(ids) + num_new > context:
            fault = (
                f"a prompt and {num_new} new tokens must fit into the target's context of {context}, but it has "
                f"{len(ids)}."
            )
            raise UnusableRowError("a prompt without space for `max_new_tokens` in the context", fault)

        return Prompt(messages, text, ids)

    def tell(self, row: int, error: UnusableRowError) -> None:
        """Log why a conversation ends, for the first ones of each reason."""
        self.num_told[error.reason] += 1
        if self.num_told[error.reason] <= NUM_NAMED:
            logger.warning("No answer: %s: %s", self.names[row], error)

    def tell_totals(self, entries: list[dict[str, Any]]) -> None:
        """Log how many conversations are answered, cut short and left out, and why."""
        reasons = Counter[str]()
        for entry in entries:
            if "ended_by" in entry:
                reasons[f"{'cut short' if entry['messages'] else 'left out'} by {entry['ended_by']}"] += 1

        named = [f"{number} are {reason}" for reason, number in reasons.items()]
        level = logging.WARNING if named else logging.INFO
        text = "; ".join([f"{len(entries)} conversations", *named])
        logger.log(level, "%s. `max_new_tokens` is %d.", text, self.options.max_new_tokens)


def _hash_of(value: Any) -> str:
    """A short hash of what JSON can say."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
