"""Replacing the answers of training data by those of a server: several requests at once, and nothing answered is lost.

Lines are written as answers come, and put into the order of the rows at the end. A run that was interrupted, or in
which the server went down, goes on with the rows that have no line yet.
"""

import json
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..errors import EndpointError, OptionError
from .answer_file import Answered, begin, log_cuts, log_left_out, openings_of, prompt_ids, settings_of, write_progress
from .chat_template import ChatTemplate, Message
from .endpoint import ChatEndpoint, RefusedRequestError, UnusableEndpointError
from .regenerate import RegenerateOptions

logger = logging.getLogger(__name__)

MOST_FAILURES = 10  # rows one after the other without an answer, after which the server is given up
_Futures = dict["Future[Answered]", int]  # the number of the row that is answered


def regenerate_from_endpoint(
    endpoint: ChatEndpoint,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[list[Message]],
    output: str | Path,
    options: RegenerateOptions | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    concurrency: int = 16,
) -> int:
    """Write conversations to a file, with every assistant turn replaced by an answer of a server.

    Prompts are those of [`regenerate`]; how the server draws, besides the temperature, is its own business. A second
    call with the same arguments asks for the rows that have no answer yet.

    Args:
        endpoint ([`ChatEndpoint`]): The server, which is closed at the end.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The target's tokenizer, with a chat template.
        rows (`list[list[dict]]`): Conversations as `read_conversations` returns them.
        output (`str` or `Path`): The JSON lines file to write or continue.
        options ([`RegenerateOptions`], *optional*): How answers are generated; batches are the server's business.
        template_kwargs (`dict`, *optional*): Arguments for the chat template, for servers that take them.
        concurrency (`int`): Requests at once.

    Returns:
        `int`: the number of conversations in the file.

    Raises:
        [`EndpointError`]: the server gave no answer to some rows. All others are in the file.
        [`OptionError`]: an option or a file is not as it must be.
    """
    if concurrency < 1:
        raise OptionError(f"`concurrency` must be at least 1, but it is {concurrency}.")
    template, output = ChatTemplate(tokenizer, template_kwargs or {}), Path(output)
    options = (options or RegenerateOptions()).for_template(template)
    progress = begin(output, settings_of(options, template, num_rows=len(rows), endpoint_model=endpoint.model))
    lines = _whole_lines(output)
    run = _Run(endpoint, template, options, output, progress)
    todo = sorted(set(range(len(rows))) - lines.keys() - set(run.without) - set(run.too_long))
    logger.info("%s: %d rows to answer, %d are answered.", output, len(todo), len(lines))
    with output.open("a", encoding="utf-8", newline="\n") as file:
        run.answer_all(rows, todo, concurrency, file)
    lines = _whole_lines(output)
    _write_in_order(output, lines)
    log_left_out(len(run.too_long))
    log_cuts(output, options.num_tokens, len(run.without))
    run.tell_failures(len(lines))
    return len(lines)


@dataclass
class _Run:
    """What answers share: the server, the chat template, the options, and how far the file is."""

    endpoint: ChatEndpoint
    template: ChatTemplate
    options: RegenerateOptions
    output: Path
    progress: dict[str, Any]
    failure: EndpointError | None = None  # the newest
    num_failed: int = 0
    num_refused: int = 0
    num_failed_in_a_row: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def without(self) -> list[int]:
        """Rows whose first answer was cut within its thought."""
        return self.progress.setdefault("without", [])

    @property
    def too_long(self) -> list[int]:
        """Rows of which no prompt can be made."""
        return self.progress.setdefault("too_long", [])

    def answer_all(self, rows: list[list[Message]], todo: list[int], concurrency: int, file: TextIO) -> None:
        """Answer rows, so many at once; what is answered is in the file, however this ends."""
        numbers, pending = iter(todo), _Futures()
        with tqdm(total=len(rows), initial=len(rows) - len(todo), desc="regenerate", unit="row") as bar:
            try:
                while True:
                    for number in islice(numbers, concurrency - len(pending)):
                        pending[_started(self.answer, number, rows[number])] = number
                    if not pending:
                        break
                    done, _ = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        self.record(pending.pop(future), future, file)
                        bar.update()
                    self.check()
            finally:
                for future in [each for each in pending if each.done() and each.exception() is None]:
                    self.record(pending.pop(future), future, file)
                self.endpoint.close()

    def answer(self, number: int, row: list[Message]) -> Answered:
        """Answer the assistant turns of a row in order, up to one that is cut or whose prompt is too long."""
        answered = Answered()
        for turn, opening in enumerate(openings_of(row)):
            messages = answered.messages + opening
            with self.lock:  # a tokenizer may serve one thread at a time
                num_tokens = len(prompt_ids(self.template, messages))
                if not 0 < num_tokens <= self.options.max_prompt_tokens:
                    break
                prompt = self.template.text(messages, add_generation_prompt=True)
            reply = self.endpoint.answer(
                [{"role": message["role"], "content": message["content"]} for message in messages],
                max_tokens=self.options.num_tokens,
                temperature=self.options.temperature,
                seed=self.options.seed + 1000 * number + turn,
                **({"chat_template_kwargs": dict(self.template.kwargs)} if self.template.kwargs else {}),
            )
            answered.add(opening, reply, prompt)
            if answered.is_cut:
                break
        return answered

    def record(self, number: int, future: "Future[Answered]", file: TextIO) -> None:
        """Write the line of a row, or note why it has no answer."""
        try:
            answered = future.result()
        except EndpointError as error:
            is_refused = isinstance(error, RefusedRequestError)
            self.num_refused += is_refused
            self.num_failed += not is_refused
            self.num_failed_in_a_row += 1
            self.failure = error
            logger.warning("Row %d has no answer: %s", number, error)
            return
        self.num_failed_in_a_row = 0
        if answered.messages:
            file.write(answered.line(number))
            file.flush()
        else:
            (self.without if answered.is_cut else self.too_long).append(number)
            write_progress(self.progress, self.output)

    def check(self) -> None:
        """Give the server up if it takes no request, or if it failed too often."""
        if isinstance(self.failure, UnusableEndpointError):
            raise self.failure
        if self.num_failed_in_a_row >= MOST_FAILURES:
            raise EndpointError(
                f"The server must answer, but {self.num_failed_in_a_row} rows in a row got no answer: {self.failure} "
                f"What is answered is kept in `{self.output}`; the same command goes on from there."
            )

    def tell_failures(self, num_written: int) -> None:
        """Raise an error if rows got no answer after all tries; refused ones are told."""
        if self.num_refused:
            logger.warning("%d rows were refused by the server: left out. %s", self.num_refused, self.failure)
        if self.num_failed or (self.num_refused and not num_written):
            raise EndpointError(
                f"All rows must get answers, but {self.num_failed + self.num_refused} got none, the last one because: "
                f"{self.failure} {num_written} are kept in `{self.output}`; the same command tries the others again."
            )


def _started(work: Callable[..., Answered], *arguments: Any) -> "Future[Answered]":
    """Start work in a thread that does not keep the process from ending, as those of a pool would."""
    future: Future[Answered] = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except Exception as error:  # noqa: BLE001  who waits for the result gets it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _whole_lines(output: Path) -> dict[int, str]:
    """The lines of a file by row; a line that was being written when its run was killed is cut off."""
    content = output.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with output.open("r+b") as file:
            file.truncate(len(whole))
    lines = [line for line in whole.decode("utf-8").split("\n") if line]
    return {json.loads(line)["row"]: line for line in lines}


def _write_in_order(output: Path, lines: Mapping[int, str]) -> None:
    fresh = output.with_name(output.name + ".tmp")
    text = "".join(lines[number] + "\n" for number in sorted(lines))
    fresh.write_text(text, encoding="utf-8", newline="\n")
    fresh.replace(output)
