"""Interleaved runs of several methods on the same prompts with the same seeds and stopping rule.

An interrupted benchmark goes on; a method that raises is left out from there on, and the others finish.
"""

import logging
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafters.fingerprint import template_digest
from ..errors import BenchmarkError, OptionError
from ..generation.timed import watched_stats
from ..provenance import current_commit, portable, weights_fingerprint
from ..records import Records
from .methods import BASELINE, Method, decoding_options, repetition_rate, target_alone
from .prompts import Prompt, check_lengths

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 16
Stage = Literal["loading", "warming up", "writing"]


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

    def to_json(self) -> dict[str, Any]:
        """All fields and a line of text, for a results file."""
        progress = f"after {self.num_done} of {self.num_planned} prompts"
        when = progress if self.stage == "writing" else f"while {self.stage}"
        text = f"failed {when}: {self.error}: {' '.join(self.message.split())}"
        return {**asdict(self), "text": text}


@contextmanager
def noting(failures: list[Failure], target: str, method: str, stage: Stage, **counts: int) -> Iterator[None]:
    """Inside, whatever a method raises becomes a failure, so that the others go on."""
    try:
        yield
    except Exception as error:
        logger.error("`%s` failed on `%s` and is left out from here on.", method, target, exc_info=error)
        message = portable(str(error))
        failures.append(Failure(target, method, stage, type(error).__name__, message, **counts))


@dataclass
class Outcome:
    """All runs of a benchmark, those of earlier calls included, and the methods that failed in this call."""

    records: list[dict[str, Any]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def complete(self) -> list[dict[str, Any]]:
        """All runs, if every method finished; else a [`BenchmarkError`]."""
        if self.failures:
            listed = "; ".join("`{method}` on `{target}` {text}".format(**each.to_json()) for each in self.failures)
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
                f"are called {[method.name for method in methods]}. Rename one."
            )

    def run(self, path: Path) -> Outcome:
        """Make every run that the file at `path` does not hold yet; a method that raises is left out from there on."""
        check_lengths(self.prompts, self.tokenizer, self.target.config, self.max_new_tokens)
        records = self._open(path)
        cells = self._cells()
        left = dict(cells)
        num_done = Counter[str]()
        for row in records.entries:
            if row["key"] in left:
                name, *_ = left.pop(row["key"])
                num_done[name] += 1
        if num_done:
            logger.info("%s holds %d of these runs; %d are left.", path, num_done.total(), len(left))

        num_planned = Counter(name for name, _, _ in cells.values())
        failures: list[Failure] = []
        origin = {"conditions": self._conditions, "commit": current_commit(), "target": self.target_name}

        for name in self._methods:
            if num_done[name] == num_planned[name]:
                continue
            with noting(failures, self.target_name, name, "warming up"):  # first calls allocate, probe and compile
                ids = self.prompts[0].input_ids(self.tokenizer)
                self._methods[name].run(self.target, ids, WARM_UP_TOKENS, decoding_options("greedy"), self.seed)

        for key, (name, decoding, prompt) in tqdm(left.items(), desc=f"bench {self.target_name}", unit="run"):
            if any(failure.method == name for failure in failures):
                continue
            counts = {"num_done": num_done[name], "num_planned": num_planned[name]}
            with noting(failures, self.target_name, name, "writing", **counts):
                measured = self._measure(self._methods[name], decoding, prompt)
                records.append({"key": key, "identity": self._identities[name], **origin, "method": name, **measured})
                num_done[name] += 1

        return Outcome([row for row in records.entries if row["key"] in cells], failures)

    def describe(self, outcome: Outcome) -> list[dict[str, Any]]:
        """The entry of each method in the results file, with the conditions of its runs, None where there are none."""
        failed = {failure.method: failure.to_json() for failure in outcome.failures}
        entries = []
        for name, method in self._methods.items():
            own = [row for row in outcome.records if row["method"] == name]
            entries.append(
                {
                    "target": self.target_name,
                    **method.describe(),
                    "conditions": own[-1]["conditions"] if own else None,
                    "commits": list(dict.fromkeys(str(row["commit"]) for row in own)),
                    "failure": failed.get(name),
                }
            )

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
        if self.prompts[0].template_kwargs:
            self._conditions["template_kwargs"] = dict(self.prompts[0].template_kwargs)

        for row in records.entries:
            if row["target"] != self.target_name:
                continue
            made = (row["identity"], row["conditions"])
            now = (self._identities.get(row["method"], row["identity"]), self._conditions)
            if made != now:
                raise OptionError(
                    f"`{path}` must hold runs of the same models, settings, revision, chat template and way of "
                    f"thinking, but those of `{row['method']}` on `{self.target_name}` were made with {made}, and now "
                    f"it is {now}. Delete it, write to another file, or give the method another name."
                )

        return records

    def _cells(self) -> dict[str, tuple[str, str, Prompt]]:
        """All runs to make, by key: prompt by prompt, the methods of a prompt one after the other in random order."""
        order = random.Random(self.seed)
        cells = {}
        for decoding in self.decodings:
            for prompt in self.prompts:
                methods = list(self._methods)
                order.shuffle(methods)
                for name in methods:
                    key = (self.target_name, name, decoding, prompt.set_name, prompt.prompt_id)
                    cells["|".join(key)] = (name, decoding, prompt)

        return cells

    def _measure(self, method: Method, decoding: str, prompt: Prompt) -> dict[str, Any]:
        """Make one timed run; the counts of a stock method come from a second run that hooks timed."""
        ids = prompt.input_ids(self.tokenizer)
        options = decoding_options(decoding)
        first = method.run(self.target, ids, 1, options, self.seed)
        run = method.run(self.target, ids, self.max_new_tokens, options, self.seed)
        stats = None if method.is_stock else run.output.speculation
        if method.is_stock and method.drafts:
            with method.path(self.target):
                stats = watched_stats(self.target, ids, self.max_new_tokens, options, self.seed, method.arguments())

        return {
            "decoding": decoding,
            "set": prompt.set_name,
            "prompt": prompt.prompt_id,
            "num_tokens": len(run.new_ids),
            "seconds": run.seconds,
            "prefill_seconds": first.seconds,
            "repetition_rate": repetition_rate(run.new_ids),
            "token_ids": run.new_ids,
            "block_size": method.block_size,
            "speculation": None if stats is None else vars(stats),
        }
