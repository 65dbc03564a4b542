"""Interleaved runs of several methods on the same prompts with the same seeds and stopping rule.

Every run is appended to a JSON lines file at once, so that an interrupted benchmark goes on; `summary.py` makes rates
of them. A method that raises is left out from there on, and the others finish.
"""

import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafters.compatibility.fingerprint import template_digest
from ..errors import BenchmarkError, OptionError
from ..generation.timed import timed_generate, watched_stats
from ..provenance import portable, weights_fingerprint
from .decoding import decoding_options, repetition_rate
from .methods import BASELINE, Method, target_alone
from .prompts import Prompt, check_lengths
from .records import Records

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 16
Stage = Literal["loading", "warming up", "writing", "measuring memory"]


@dataclass(frozen=True)
class Cell:
    """One run to make: a method on a prompt under a decoding."""

    target: str
    method: str
    decoding: str
    prompt: Prompt

    @property
    def key(self) -> str:
        """The identifier of this run, which no other run of the benchmark has; earlier versions could repeat runs."""
        return "|".join((self.target, self.method, self.decoding, self.prompt.set_name, self.prompt.prompt_id, "0"))


@dataclass(frozen=True)
class Failure:
    """Says at which stage a method raised which exception, and how many of its runs were done."""

    target: str
    method: str
    stage: Stage
    error: str
    message: str
    num_done: int = 0  # runs
    num_planned: int = 0

    @classmethod
    def of(cls, error: Exception, target: str, method: str, stage: Stage, **counts: int) -> "Failure":
        """The failure that an exception stands for."""
        return cls(target, method, stage, type(error).__name__, portable(str(error)), **counts)

    def to_json(self) -> dict[str, Any]:
        """All fields and a line of text, for a results file."""
        progress = f"after {self.num_done} of {self.num_planned} prompts"
        when = progress if self.stage == "writing" else f"while {self.stage}"
        text = f"failed {when}: {self.error}: {' '.join(self.message.split())}"
        return {**asdict(self), "text": text}


@dataclass
class Outcome:
    """All runs of a benchmark, those of earlier calls included, and the methods that failed in this call."""

    records: list[dict[str, Any]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def complete(self) -> list[dict[str, Any]]:
        """All runs, if every method finished; else a [`BenchmarkError`]."""
        if self.failures:
            failed = [failure.to_json() for failure in self.failures]
            listed = "; ".join("`{method}` on `{target}` {text}".format(**failure) for failure in failed)
            raise BenchmarkError(
                f"All methods must finish, but these did not: {listed}. The other methods are measured; run the same "
                "command again to try the rest."
            )
        return self.records


@dataclass
class Benchmark:
    """A benchmark of one target: methods that answer the same prompts under the same rules."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    methods: Sequence[Method]
    prompts: list[Prompt]
    decodings: list[str]  # names from `DECODINGS`
    max_new_tokens: int = 128  # of all methods
    seed: int = 0  # of the sampling and of the order of methods
    with_baseline: bool = True  # also run the target alone
    target_name: str = BASELINE  # in a file that holds runs of several targets

    def __post_init__(self) -> None:
        methods = [target_alone()] * self.with_baseline + list(self.methods)
        self._methods = {method.name: method for method in methods}
        if len(self._methods) < len(methods):
            raise OptionError(
                f"Each method needs a name of its own, and `{BASELINE}` is that of the target alone, but they "
                f"are called {[method.name for method in methods]}. Write `NAME=...`."
            )

    def run(self, path: Path) -> Outcome:
        """Make every run that the file at `path` does not hold yet; a method that raises is left out from there on."""
        check_lengths(self.prompts, self.tokenizer, self.target.config, self.max_new_tokens)
        records = self._open(path)
        cells = list(self._cells())
        done = {row["key"] for row in records.entries}
        todo = [cell for cell in cells if cell.key not in done]
        if len(todo) < len(cells):
            logger.info("%s holds %d of these runs; %d are left.", path, len(cells) - len(todo), len(todo))
        failures = self._warm_up(todo)
        for cell in tqdm(todo, desc=f"bench {self.target_name}", unit="run"):
            if cell.method in failures:
                continue
            try:
                measured = self._measure(cell)
            except Exception as error:  # noqa: BLE001  whatever a method raises, the others go on
                planned = {other.key for other in cells if other.method == cell.method}
                num_done = sum(row["key"] in planned for row in records.entries)
                failures[cell.method] = self._failure(
                    error, cell.method, "writing", num_done=num_done, num_planned=len(planned)
                )
                continue
            origin = {"identity": self._identities[cell.method], "conditions": self._conditions}
            records.append({"key": cell.key, **origin, **measured})
        keys = {cell.key for cell in cells}
        return Outcome([row for row in records.entries if row["key"] in keys], list(failures.values()))

    def describe(self, outcome: Outcome) -> list[dict[str, Any]]:
        """The entry of each method in the results file, with the conditions of its runs, None where one lacks them."""
        failed = {failure.method: failure.to_json() for failure in outcome.failures}
        entries = []
        for name, method in self._methods.items():
            conditions = [row.get("conditions") for row in outcome.records if row["method"] == name]
            known = conditions[0] if conditions and None not in conditions else None
            origin = {"conditions": known, "failure": failed.get(name)}
            entries.append({"target": self.target_name, **method.describe(), **origin})
        return entries

    def _open(self, path: Path) -> Records:
        """Open the file of runs and check that the runs in it were made with these models."""
        settings = {"max_new_tokens": self.max_new_tokens, "seed": self.seed, "threads": torch.get_num_threads()}
        records = Records(path, settings)
        origin = f"{weights_fingerprint(self.target)}/{self.target.device.type}"
        self._identities = {name: f"{origin}/{method.identity()}" for name, method in self._methods.items()}
        self._conditions = {
            "revision": getattr(self.target.config, "_commit_hash", None),
            "template": template_digest(self.tokenizer) if self.tokenizer.chat_template is not None else None,
            "thinking": self.prompts[0].thinking(self.tokenizer),
        }
        for row in records.entries:
            if row["target"] == self.target_name:
                self._check_origin(row, path)
        return records

    def _check_origin(self, row: dict[str, Any], path: Path) -> None:
        """Refuse a run of other models, settings or conditions; earlier versions did not store conditions."""
        expected = self._identities.get(row["method"], row["identity"])
        if expected != row["identity"]:
            raise OptionError(
                f"`{path}` must hold runs of the same models and settings, but those of `{row['method']}` on "
                f"`{self.target_name}` were made with others ({row['identity']}, and now {expected}). Delete "
                "it, write to another file, or give the method another name."
            )
        if row.get("conditions", self._conditions) != self._conditions:
            raise OptionError(
                f"`{path}` must hold runs of one revision, chat template and way of thinking, but those on "
                f"`{self.target_name}` have {row['conditions']}, and now it is {self._conditions}. Delete it, "
                "or write to another file."
            )

    def _cells(self) -> Iterator[Cell]:
        """All runs to make: prompt by prompt, the methods of a prompt one after the other in random order."""
        order = random.Random(self.seed)
        for decoding in self.decodings:
            for prompt in self.prompts:
                methods = list(self._methods)
                order.shuffle(methods)
                yield from (Cell(self.target_name, method, decoding, prompt) for method in methods)

    def _warm_up(self, todo: list[Cell]) -> dict[str, Failure]:
        """Call every method once, since first calls allocate, probe and compile; returns those that already fail."""
        failures = {}
        ids, options = self.prompts[0].input_ids(self.tokenizer), decoding_options("greedy")
        for name in dict.fromkeys(cell.method for cell in todo):
            method = self._methods[name]
            try:
                with method.path(self.target):
                    timed_generate(self.target, ids, WARM_UP_TOKENS, options, self.seed, **method.arguments())
            except Exception as error:  # noqa: BLE001  whatever a method raises, the others go on
                failures[name] = self._failure(error, name, "warming up")
        return failures

    def _failure(self, error: Exception, method: str, stage: Stage, **counts: int) -> Failure:
        logger.error("`%s` failed on `%s` and is left out from here on.", method, self.target_name, exc_info=error)
        return Failure.of(error, self.target_name, method, stage, **counts)

    def _measure(self, cell: Cell) -> dict[str, Any]:
        """Make one timed run; the counts of a stock method come from a second run that hooks timed."""
        method, ids = self._methods[cell.method], cell.prompt.input_ids(self.tokenizer)
        call = (self.target, ids, self.max_new_tokens, decoding_options(cell.decoding), self.seed)
        with method.path(self.target):
            first = timed_generate(self.target, ids, 1, *call[3:], **method.arguments())
            run = timed_generate(*call, **method.arguments())
            stats = None if method.is_stock else run.output.speculation
            if method.is_stock and method.drafts:
                stats = watched_stats(*call, method.arguments())
        return {
            "target": cell.target,
            "method": cell.method,
            "decoding": cell.decoding,
            "set": cell.prompt.set_name,
            "prompt": cell.prompt.prompt_id,
            "num_tokens": len(run.new_ids),
            "seconds": run.seconds,
            "prefill_seconds": first.seconds,
            "repetition_rate": repetition_rate(run.new_ids),
            "token_ids": run.new_ids,
            "block_size": method.block_size,
            "speculation": None if stats is None else vars(stats),
        }
