"""Replacing the answers of training data by the target's own, so that a drafter learns the text that it will draft.

Conversations go in; the same conversations with the answers of the target go into a file. Each is cut at the turns of
the assistant, and whoever answers, the target in this process or a server, is asked for one turn after the other.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import ConversationError, FalconSpecError
from .answer_file import Answered, AnswerFile, hash_of, openings_of
from .answers import Answerer, Prompt, RefusedPromptError, RegenerateOptions
from .chat_template import ChatTemplate, Message
from .conversations import ConversationSet, check_whole
from .row_encoding import NUM_NAMED, UnusableRowError, short
from .target_answers import TargetAnswerer

logger = logging.getLogger(__name__)

MOST_FAILURES = 10  # rows one after the other without an answer, after which the answerer is given up


def regenerate(
    answerer: PreTrainedModel | Answerer,
    tokenizer: PreTrainedTokenizerBase,
    rows: ConversationSet | list[list[Message]],
    output: str | Path,
    options: RegenerateOptions | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> int:
    """Write conversations to a file, with every assistant turn replaced by an answer of the target.

    A second call with the same arguments continues where the first stopped. A conversation ends before a prompt that
    is longer than `max_prompt_tokens` or that the chat template refuses, before an empty answer, and at an answer
    that reaches `max_new_tokens`, or before it if that is within a thought. One without any answer is left out. The
    log counts both by reason, and names the first of each.

    Args:
        answerer ([`~transformers.PreTrainedModel`] or [`Answerer`]): The target, or a server that has it.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The target's tokenizer, with a chat template.
        rows ([`ConversationSet`] or `list[list[dict]]`): Conversations as `read_conversations` returns them.
        output (`str` or `Path`): The JSON lines file to write or continue.
        options ([`RegenerateOptions`], *optional*): How answers are generated.
        template_kwargs (`dict`, *optional*): Arguments for the chat template.

    Returns:
        `int`: the number of conversations in the file.

    Raises:
        [`ConversationError`]: no conversation got an answer.
        [`EndpointError`]: the server gave no answer to some rows. All others are in the file.
        [`OptionError`]: an option or a file is not as it must be.
    """
    template = ChatTemplate(tokenizer, template_kwargs or {})
    options = (options or RegenerateOptions()).for_template(template)
    data = rows if isinstance(rows, ConversationSet) else ConversationSet(rows=rows)
    asked = TargetAnswerer(answerer, template) if isinstance(answerer, nn.Module) else answerer
    try:
        return _Run(asked, template, options, data, Path(output)).write()
    finally:
        asked.close()


class _Run:
    """What the batches of a run share."""

    def __init__(
        self,
        answerer: Answerer,
        template: ChatTemplate,
        options: RegenerateOptions,
        data: ConversationSet,
        output: Path,
    ) -> None:
        self.answerer, self.template, self.options = answerer, template, options
        self.openings = [openings_of(row) for row in data.rows]
        self.names = data.origins or [f"row {number}" for number in range(len(data.rows))]
        self.ids = data.ids or [None] * len(data.rows)
        kwargs = {"template_kwargs": dict(template.kwargs)} if template.kwargs else {}
        settings = {
            **asdict(options),
            **kwargs,
            **answerer.settings,
            "chat_template": hash_of(template.tokenizer.get_chat_template()),
            "num_rows": len(data.rows),
            "rows": hash_of([self.openings, self.ids]),
        }
        self.file = AnswerFile(output, settings)
        self.lock = threading.Lock()  # a tokenizer may serve one thread at a time
        self.num_told = Counter[str]()
        self.num_failed, self.num_refused, self.num_failed_in_a_row = 0, 0, 0
        self.failure: FalconSpecError | None = None  # the newest

    def write(self) -> int:
        """Answer all rows that are not answered yet; returns how many are in the file."""
        unusable = Counter[str]()
        lengths = {}
        for row, openings in enumerate(self.openings):
            try:
                lengths[row] = len(self.prompt(openings[0]).ids)
            except UnusableRowError as error:
                unusable[error.reason] += 1
                self.tell(row, 0, error)

        done = self.file.done
        batches = self.answerer.batches(lengths, self.options)
        todo = {number: batch for number, batch in batches.items() if not done.issuperset(batch)}
        num_todo = sum(map(len, todo.values()))
        with tqdm(total=len(lengths), initial=len(lengths) - num_todo, desc="regenerate", unit="row") as bar:
            self.answer_all(todo, bar)

        lines = self.file.finish()
        left_out = unusable + Counter({reason: len(rows) for reason, rows in self.file.left_out.items()})
        totals = self.totals(lines, left_out)
        self.check_failures(len(lines))
        if not lines:
            raise ConversationError(f"At least one conversation must get an answer, but none did. {totals}")
        return len(lines)

    def answer_all(self, todo: Mapping[int, list[int]], bar: Any) -> None:
        """Answer batches, so many at once; what is answered is in the file, however this ends."""
        waiting, pending = iter(todo.items()), list[_Answers]()
        num_at_once = self.answerer.num_at_once
        try:
            while True:
                for number, batch in islice(waiting, num_at_once - len(pending)):
                    pending.append(_started(self.answer_batch, number, batch, in_thread=num_at_once > 1))
                if not pending:
                    break
                finished, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in finished:
                    pending.remove(future)
                    self.record(future.result())
                    bar.update(len(future.result()))
                self.check_answerer()
        finally:
            for future in pending:
                if future.done() and future.exception() is None:
                    self.record(future.result())

    def answer_batch(self, number: int, batch: Sequence[int]) -> dict[int, Answered]:
        """Answer the turns of conversations in order; each ends with its first turn that has no whole answer."""
        answered = {row: Answered() for row in batch}
        going = list(batch)
        for turn in range(max(len(self.openings[row]) for row in batch)):
            prompts = dict(self.prompts(turn, {row: answered[row] for row in going}))
            if not prompts:
                break
            seed = self.options.seed + 1000 * number + turn
            replies = self.answerer.answer(list(prompts.values()), self.options, seed)
            for (row, prompt), reply in zip(prompts.items(), replies, strict=True):
                if isinstance(reply, FalconSpecError):
                    answered[row].error = reply
                else:
                    answered[row].add(self.openings[row][turn], reply, prompt.text)
            going = [row for row in prompts if answered[row].goes_on]
        return answered

    def prompts(self, turn: int, going: Mapping[int, Answered]) -> Iterator[tuple[int, Prompt]]:
        """The prompts for a turn; a conversation without one has ended."""
        for row, answered in going.items():
            if turn == len(self.openings[row]):
                continue
            try:
                yield row, self.prompt(answered.messages + self.openings[row][turn])
            except UnusableRowError as error:
                answered.ending = error.reason
                self.tell(row, turn, error)

    def prompt(self, messages: list[Message]) -> Prompt:
        """The prompt that ends with these messages; an [`UnusableRowError`] if there is none."""
        for message in messages:
            check_whole("".join(message.values()), f"what the {message['role']} says")
        try:
            with self.lock:
                text = self.template.text(messages, add_generation_prompt=True)
                ids = self.template.ids(text)
        except Exception as error:  # templates and tokenizers are code of others
            text = f"chat template and tokenizer must take the prompt, but say {short(error)}."
            raise UnusableRowError("a prompt that the chat template refuses", text) from error
        if not ids:
            raise UnusableRowError("an empty prompt", "a prompt must have a token, but the chat template gives none.")
        if len(ids) > self.options.max_prompt_tokens:
            text = f"a prompt must have at most {self.options.max_prompt_tokens} tokens, but it has {len(ids)}."
            raise UnusableRowError("a prompt longer than `max_prompt_tokens`", text)
        return Prompt(messages, text, ids)

    def record(self, answered: Mapping[int, Answered]) -> None:
        """Write the lines of a batch, and note why rows have none."""
        lines, left_out = {}, {}
        for row, each in answered.items():
            if each.error is not None:
                is_refused = isinstance(each.error, RefusedPromptError)
                self.num_refused += is_refused
                self.num_failed += not is_refused
                self.num_failed_in_a_row += 1
                self.failure = each.error
                logger.warning("No answer: %s: %s", self.names[row], each.error)
                continue
            self.num_failed_in_a_row = 0
            if each.messages:
                lines[row] = each.line(row, self.ids[row])
            else:
                left_out[row] = each.ending
        self.file.add(lines, left_out)

    def tell(self, row: int, turn: int, error: UnusableRowError) -> None:
        """Log why a conversation ends before a turn, for the first ones of each reason."""
        self.num_told[error.reason] += 1
        if self.num_told[error.reason] <= NUM_NAMED:
            logger.warning("No answer: %s, turn %d: %s", self.names[row], turn + 1, error)

    def totals(self, lines: Sequence[Mapping[str, Any]], left_out: Mapping[str, int]) -> str:
        """Log and return how many conversations are in the file, cut short and left out, and why."""
        endings = Counter(line["ended_by"] for line in lines if "ended_by" in line)
        num_turns = sum(map(len, self.openings))
        num_answers = sum(message["role"] == "assistant" for line in lines for message in line["messages"])
        parts = [f"Of {len(self.openings)} conversations {len(lines)} are in `{self.file.path}`"]
        for what, reasons in (("cut short", endings), ("left out", left_out)):
            named = ", ".join(f"{number} by {reason}" for reason, number in reasons.items())
            parts += [f"{sum(reasons.values())} are {what} ({named})"] if reasons else []
        parts.append(f"{num_answers} of {num_turns} turns have an answer")
        text = f"{'; '.join(parts)}. `max_new_tokens` is {self.options.num_tokens}."
        logger.log(logging.WARNING if endings or left_out else logging.INFO, "%s", text)
        return text

    def check_answerer(self) -> None:
        """Give the answerer up if it failed too often."""
        if self.failure is not None and self.num_failed_in_a_row >= MOST_FAILURES:
            raise type(self.failure)(
                f"Rows must get answers, but {self.num_failed_in_a_row} rows in a row got no answer: {self.failure} "
                f"What is answered is kept in `{self.file.path}`; the same command goes on from there."
            )

    def check_failures(self, num_written: int) -> None:
        """Raise an error if rows got no answer after all tries; refused ones are told."""
        if self.failure is None:
            return
        if self.num_refused:
            logger.warning("%d rows were refused: left out. %s", self.num_refused, self.failure)
        if self.num_failed or not num_written:
            num_missing = self.num_failed + self.num_refused
            raise type(self.failure)(
                f"All rows must get answers, but {num_missing} got none, the last one because: {self.failure} "
                f"{num_written} are kept in `{self.file.path}`; the same command tries the others again."
            )


_Answers = Future[dict[int, Answered]]


def _started(
    work: Callable[..., dict[int, Answered]], number: int, batch: Sequence[int], in_thread: bool
) -> "_Answers":
    """Start work, maybe in a thread that does not keep the process from ending, as those of a pool would."""
    future: _Answers = Future()

    def run() -> None:
        try:
            future.set_result(work(number, batch))
        except Exception as error:  # noqa: BLE001  who waits for the result gets it
            future.set_exception(error)

    if in_thread:
        threading.Thread(target=run, daemon=True).start()
    else:
        run()
    return future
