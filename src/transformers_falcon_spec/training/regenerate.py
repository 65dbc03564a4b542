"""Replacing the answers of training data by the target's own, so that a drafter learns the text that it will draft.

Conversations go in; the same conversations with the answers of the target go into a file. Each is cut at the turns of
the assistant, and whoever answers, the target in this process or a server, is asked for one turn after the other.

Lines are written as answers come, and put into the order of the rows at the end. Beside the file stands how it was
begun, so that a run that was interrupted goes on with the rows that have no line yet, and with nothing else.
"""

import hashlib
import json
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import ConversationError, FalconSpecError, OptionError
from ..provenance import portable
from .answers import ChatEndpoint, Prompt, RefusedPromptError, Reply, TargetAnswerer
from .chat_template import ChatTemplate, Message
from .conversations import ConversationSet, check_whole
from .options import RegenerateOptions
from .row_encoding import NUM_NAMED, UnusableRowError, short

logger = logging.getLogger(__name__)

CUT = "an answer that was cut at `max_new_tokens`"
CUT_THOUGHT = "a thought that was cut at `max_new_tokens`"
EMPTY = "an empty answer"
NUM_BEGINNING = 40  # letters at the end of a prompt, with which an answer may begin
MOST_FAILURES = 10  # rows one after the other without an answer, after which the answerer is given up


def regenerate(
    answerer: PreTrainedModel | ChatEndpoint,
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
        [`EndpointError`]: the server gave no answer to some rows. All others are in the file.
        [`OptionError`]: an option or a file is not as it must be.
    """
    template = ChatTemplate(tokenizer, template_kwargs or {})
    options = (options or RegenerateOptions()).for_template(template)
    data = rows if isinstance(rows, ConversationSet) else ConversationSet(rows=rows)
    asked = answerer if isinstance(answerer, ChatEndpoint) else TargetAnswerer(answerer, template)
    try:
        return _Run(asked, template, options, data, Path(output)).write()
    finally:
        asked.close()


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
    error: FalconSpecError | None = None  # because of which the conversation is asked about again

    @property
    def goes_on(self) -> bool:
        """Whether a further turn may be answered."""
        return not self.ending and self.error is None

    def add(self, opening: list[Message], reply: Reply, prompt: str) -> None:
        """Add a turn and its answer, unless this is empty, or cut within a thought, which the `prompt` may begin."""
        if reply.thought:
            is_thinking = not reply.text.strip()
        else:
            _, begin, thought = (prompt[-NUM_BEGINNING:] + reply.text).rpartition("<think>")
            is_thinking = bool(begin) and "</think>" not in thought

        if not reply.is_complete:
            self.ending = CUT_THOUGHT if is_thinking else CUT
        elif not reply.text.strip() and not reply.thought:
            self.ending = EMPTY

        try:
            check_whole(reply.text + reply.thought, "the answer")
        except UnusableRowError as error:
            self.ending = error.reason

        if self.ending in ("", CUT):
            answer = {"role": "assistant", "content": reply.text}
            if reply.thought:
                answer["reasoning_content"] = reply.thought
            self.messages += [*opening, answer]

    def line(self, row: int, name: Any = None) -> str:
        """The line of the file for the conversation with this number, and with this `id` if it has one."""
        entry: dict[str, Any] = {"row": row}
        if name is not None:
            entry["id"] = name
        entry["messages"] = self.messages
        if self.ending:
            entry["ended_by"] = self.ending
        return json.dumps(entry, ensure_ascii=False) + "\n"


class _Run:
    """What the batches of a run share."""

    def __init__(
        self,
        answerer: TargetAnswerer | ChatEndpoint,
        template: ChatTemplate,
        options: RegenerateOptions,
        data: ConversationSet,
        output: Path,
    ) -> None:
        self.answerer = answerer
        self.template = template
        self.options = options
        self.openings = list(map(openings_of, data.rows))
        self.names = data.origins or [f"row {number}" for number in range(len(data.rows))]
        self.ids = data.ids or [None] * len(data.rows)

        settings = {
            **asdict(options),
            **answerer.settings,
            "chat_template": hash_of(template.tokenizer.get_chat_template()),
            "template_kwargs": dict(template.kwargs),
            "num_rows": len(data.rows),
            "rows": hash_of([self.openings, self.ids]),
        }
        self.file = AnswerFile(output, settings)
        self.lock = threading.Lock()  # a tokenizer may serve one thread at a time, and so does the file
        self.num_told = Counter[str]()
        self.failures: list[FalconSpecError] = []  # of rows that got no answer, the newest last
        self.num_failed_in_a_row = 0

    def write(self) -> int:
        """Answer all rows that are not answered yet; returns how many are in the file."""
        lengths = {}
        unusable = {}
        for row, openings in enumerate(self.openings):
            try:
                lengths[row] = len(self.prompt(openings[0]).ids)
            except UnusableRowError as error:
                unusable[row] = error.reason
                self.tell(row, 0, error)
        self.file.add({}, unusable)

        done = self.file.done
        batches = self.answerer.batches(lengths, self.options)
        todo = {number: batch for number, batch in batches.items() if not done.issuperset(batch)}
        num_todo = sum(map(len, todo.values()))
        with tqdm(total=len(lengths), initial=len(lengths) - num_todo, desc="regenerate", unit="row") as bar:
            self.answer_all(todo, bar)

        lines = self.file.finish()
        totals = self.totals(lines)
        self.check_failures(len(lines))
        if not lines:
            raise ConversationError(f"At least one conversation must get an answer, but none did. {totals}")
        return len(lines)

    def answer_all(self, todo: Mapping[int, list[int]], bar: Any) -> None:
        """Answer batches, so many at once; each is in the file as soon as it is answered, however this ends."""
        waiting = SimpleQueue[tuple[int, list[int]]]()
        ended = SimpleQueue[Exception]()
        for numbered in todo.items():
            waiting.put(numbered)

        num_at_once = self.answerer.num_at_once
        try:
            if num_at_once == 1:
                self.work(waiting, ended, bar)
            else:  # threads that do not keep the process from ending, as those of a pool would
                for _ in range(num_at_once):
                    threading.Thread(target=self.work, args=(waiting, ended, bar), daemon=True).start()

            for _ in range(num_at_once):
                error = ended.get()
                if not isinstance(error, Empty):
                    raise error
        finally:
            while not waiting.empty():  # nobody begins another batch
                with suppress(Empty):
                    waiting.get_nowait()

    def work(self, waiting: SimpleQueue[tuple[int, list[int]]], ended: SimpleQueue[Exception], bar: Any) -> None:
        """Answer batches until none is `waiting` or one fails: `ended` gets the error, `Empty` or another."""
        try:
            while True:
                answered = self.answer_batch(*waiting.get_nowait())
                with self.lock:
                    self.record(answered)
                    bar.update(len(answered))
        except Exception as error:  # noqa: BLE001  who waits for the end gets it
            ended.put(error)

    def answer_batch(self, number: int, batch: Sequence[int]) -> dict[int, Answered]:
        """Answer the turns of conversations in order; each ends with its first turn that has no whole answer."""
        answered = {row: Answered() for row in batch}
        num_turns = max(len(self.openings[row]) for row in batch)
        for turn in range(num_turns):
            prompts = self.prompts(answered, turn)
            if not prompts:
                break

            seed = self.options.seed + 1000 * number + turn
            replies = self.answerer.answer(list(prompts.values()), self.options, seed)
            for (row, prompt), reply in zip(prompts.items(), replies, strict=True):
                if isinstance(reply, FalconSpecError):
                    answered[row].error = reply
                else:
                    answered[row].add(self.openings[row][turn], reply, prompt.text)

        return answered

    def prompts(self, answered: Mapping[int, Answered], turn: int) -> dict[int, Prompt]:
        """The prompt of each conversation that has this turn; one without a prompt ends here."""
        prompts: dict[int, Prompt] = {}
        for row, conversation in answered.items():
            if not conversation.goes_on or turn >= len(self.openings[row]):
                continue
            try:
                prompts[row] = self.prompt(conversation.messages + self.openings[row][turn])
            except UnusableRowError as error:
                conversation.ending = error.reason
                self.tell(row, turn, error)

        return prompts

    def prompt(self, messages: list[Message]) -> Prompt:
        """The prompt that ends with these messages; an [`UnusableRowError`] if there is none."""
        for message in messages:
            check_whole("".join(message.values()), f"what the {message['role']} says")

        try:
            with self.lock:
                text = self.template.text(messages, add_generation_prompt=True)
                ids = self.template.ids(text)
        except Exception as error:  # templates and tokenizers are code of others
            fault = f"chat template and tokenizer must take the prompt, but say {short(error)}."
            raise UnusableRowError("a prompt that the chat template refuses", fault) from error

        if not ids:
            raise UnusableRowError("an empty prompt", "a prompt must have a token, but the chat template gives none.")

        most = self.options.max_prompt_tokens
        if len(ids) > most:
            fault = f"a prompt must have at most {most} tokens, but it has {len(ids)}."
            raise UnusableRowError("a prompt longer than `max_prompt_tokens`", fault)
        return Prompt(messages, text, ids)

    def record(self, answered: Mapping[int, Answered]) -> None:
        """Write the lines of a batch, note why rows have none, and give the answerer up if it failed too often."""
        lines = {}
        left_out = {}
        for row, conversation in answered.items():
            if conversation.error is not None:
                self.failures.append(conversation.error)
                self.num_failed_in_a_row += 1
                logger.warning("No answer: %s: %s", self.names[row], conversation.error)
                continue

            self.num_failed_in_a_row = 0
            if conversation.messages:
                lines[row] = conversation.line(row, self.ids[row])
            else:
                left_out[row] = conversation.ending

        self.file.add(lines, left_out)
        if self.num_failed_in_a_row >= MOST_FAILURES:
            last = self.failures[-1]
            raise type(last)(
                f"Rows must get answers, but {self.num_failed_in_a_row} rows in a row got no answer: {last} "
                f"What is answered is kept in `{self.file.path}`; the same command goes on from there."
            )

    def check_failures(self, num_written: int) -> None:
        """Raise an error if rows got no answer after all tries; refused ones are told."""
        if not self.failures:
            return

        last = self.failures[-1]
        num_refused = sum(isinstance(failure, RefusedPromptError) for failure in self.failures)
        if num_refused:
            logger.warning("%d rows were refused: left out. %s", num_refused, last)
        if num_refused < len(self.failures) or not num_written:
            raise type(last)(
                f"All rows must get answers, but {len(self.failures)} got none, the last one because: {last} "
                f"{num_written} are kept in `{self.file.path}`; the same command tries the others again."
            )

    def tell(self, row: int, turn: int, error: UnusableRowError) -> None:
        """Log why a conversation ends before a turn, for the first ones of each reason."""
        self.num_told[error.reason] += 1
        if self.num_told[error.reason] <= NUM_NAMED:
            logger.warning("No answer: %s, turn %d: %s", self.names[row], turn + 1, error)

    def totals(self, lines: Sequence[Mapping[str, Any]]) -> str:
        """Log and return how many conversations are in the file, cut short and left out, and why."""
        left_out = Counter(self.file.left_out.values())
        endings = Counter(line["ended_by"] for line in lines if "ended_by" in line)
        roles = Counter(message["role"] for line in lines for message in line["messages"])

        parts = [f"Of {len(self.openings)} conversations {len(lines)} are in `{self.file.path}`"]
        for what, reasons in (("cut short", endings), ("left out", left_out)):
            if reasons:
                named = ", ".join(f"{number} by {reason}" for reason, number in reasons.items())
                parts.append(f"{sum(reasons.values())} are {what} ({named})")

        parts.append(f"{roles['assistant']} of {sum(map(len, self.openings))} turns have an answer")
        text = f"{'; '.join(parts)}. `max_new_tokens` is {self.options.num_tokens}."
        logger.log(logging.WARNING if endings or left_out else logging.INFO, "%s", text)
        return text


class AnswerFile:
    """A file of answers that is begun, or gone on with.

    Args:
        path (`Path`): The JSON lines file.
        settings (`dict`): What all answers of the file must share.

    Raises:
        [`OptionError`]: the file was begun with other settings, or by somebody else, or cannot be written, or what
            stands beside it is damaged.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.settings = json.loads(json.dumps(portable(dict(settings))))
        self._progress_path = path.with_name(path.name + ".progress.json")
        self.left_out = self._progress()  # by row, why it has no line
        with _explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._save()  # before the file, so that a file without progress is not ours
            path.touch()

        self.rows = {line["row"] for line in self.finish()}  # that have a line
        if self.rows:
            logger.info("%s: going on after %d conversations.", path, len(self.rows))

    @property
    def done(self) -> set[int]:
        """The rows that have a line, or are left out."""
        return self.rows | self.left_out.keys()

    def add(self, lines: Mapping[int, str], left_out: Mapping[int, str]) -> None:
        """Write the lines of rows at once, and note the reasons why others have none."""
        self.left_out |= left_out
        self.rows |= lines.keys()
        with _explained(self.path):
            with self.path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
                file.write("".join(lines.values()))
            self._save()

    def finish(self) -> list[dict[str, Any]]:
        """Put the lines into the order of the rows, without those that are damaged; returns what they hold."""
        entries = {}
        lines = {}
        with _explained(self.path):
            for line in self.path.read_bytes().split(b"\n"):
                with suppress(ValueError, KeyError, TypeError, RecursionError):
                    entry = json.loads(line)
                    if isinstance(entry["row"], int) and isinstance(entry["messages"], list):
                        entries[entry["row"]] = entry
                        lines[entry["row"]] = line + b"\n"
            rows = sorted(lines)
            _replace(self.path, b"".join(lines[row] for row in rows))
        return [entries[row] for row in rows]

    def _progress(self) -> dict[int, str]:
        """The rows that earlier runs left out, and why."""
        if not self._progress_path.exists():
            if self.path.exists():
                raise OptionError(
                    f"`{self.path}` exists but was not begun by `regenerate`. Delete it or write to another file."
                )
            return {}

        try:
            progress = json.loads(self._progress_path.read_bytes())
            begun = dict(progress["options"])
            left_out = {int(row): str(reason) for row, reason in progress["left_out"].items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise OptionError(
                f"`{self._progress_path}` must say how `{self.path.name}` was begun, but it is damaged "
                f"({type(error).__name__}: {error}). Delete both files, or write to another one."
            ) from None

        if begun != self.settings:
            names = sorted(begun | self.settings)
            changed = [name for name in names if begun.get(name) != self.settings.get(name)]
            then = {name: begun.get(name) for name in changed}
            now = {name: self.settings.get(name) for name in changed}
            raise OptionError(
                f"`{self.path}` was begun with {then}, but the options now are {now}. Go on with the old options and "
                "data, or write to another file."
            )

        return left_out

    def _save(self) -> None:
        progress = {"options": self.settings, "left_out": self.left_out}
        _replace(self._progress_path, json.dumps(progress).encode())


def hash_of(value: Any) -> str:
    """A short hash of what JSON can say."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OptionError(
            f"`{path}` must be a file that can be written, but {error}. Make room or name another; what is "
            "answered so far is kept, and the same command goes on from there."
        ) from error


def _replace(path: Path, content: bytes) -> None:
    """Replace a file at once, so that an interruption leaves the old one."""
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_bytes(content)
    fresh.replace(path)
