"""Interleaved runs of several methods on the same prompts with the same seeds and stopping rule.

An interrupted benchmark goes on where it stopped.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafters.fingerprint import template_digest
from ..errors import BenchmarkError, OptionError
from ..generation.timed import watched_stats
from ..provenance import current_commit, weights_fingerprint
from ..records import Records
from .methods import BASELINE, Method, decoding_options, repetition_rate, target_alone
from .prompts import Prompt, check_lengths

WARM_UP_TOKENS = 16
Run = dict[str, Any]


@dataclass
class Benchmark:
    """A benchmark of one target: methods that answer the same prompts under the same rules."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    methods: Sequence[Method]  # beside the target alone, which is measured, too
    prompts: list[Prompt]
    decodings: list[str]  # names from `DECODINGS`
    max_new_tokens: int = 128  # of all methods
    seed: int = 0  # of the sampling and of the order of methods

    def __post_init__(self) -> None:
        self._methods = {BASELINE: target_alone()}
        for method in self.methods:
            if method.name in self._methods:
                raise OptionError(
                    f"Each method needs a name of its own, and `{BASELINE}` is that of the target alone, but two "
                    f"are called `{method.name}`. Rename one."
                )

            self._methods[method.name] = method

    def run(self, path: Path) -> list[Run]:
        """Make every run that the file at `path` does not hold yet, and return all of them.

        Raises:
            [`BenchmarkError`]: a method raised; what was measured before is kept in the file.
        """
        check_lengths(self.prompts, self.tokenizer, self.target.config, self.max_new_tokens)
        records, identities = self._open(path)
        cells = self._cells()
        known = {row["key"] for row in records.entries}
        for name in dict.fromkeys(cell[0] for key, cell in cells.items() if key not in known):
            with _naming(name):  # first calls allocate, probe and compile
                ids = self.prompts[0].input_ids(self.tokenizer)
                self._methods[name].run(self.target, ids, WARM_UP_TOKENS, decoding_options("greedy"), self.seed)

        commit = current_commit()

        def measured(cell: tuple[str, str, Prompt]) -> Run:
            name, decoding, prompt = cell
            origin = {"identity": identities[name], "commit": commit, "target": BASELINE}
            with _naming(name):
                return {**origin, "method": name, **self._measure(self._methods[name], decoding, prompt)}

        return records.measured(cells, measured, "bench")

    def describe(self, runs: Sequence[Run]) -> list[dict[str, Any]]:
        """The entry of each method in the results file, with the conditions and the commits of its runs."""
        conditions = self._conditions()
        entries = []
        for name, method in self._methods.items():
            commits = dict.fromkeys(str(row["commit"]) for row in runs if row["method"] == name)
            entry = {"target": BASELINE, **method.describe(), "conditions": conditions, "commits": list(commits)}
            entries.append(entry)

        return entries

    def _open(self, path: Path) -> tuple[Records, dict[str, str]]:
        """Open the file of runs, which were made with this target; returns the identity of each method, too."""
        settings = {"max_new_tokens": self.max_new_tokens, "seed": self.seed, "threads": torch.get_num_threads()}
        target = f"{weights_fingerprint(self.target)}/{self.target.device.type}"
        records = Records(path, {**settings, "target": target, **self._conditions()})
        identities = {name: method.identity() for name, method in self._methods.items()}

        for row in records.entries:
            now = identities.get(row["method"])
            if now not in (None, row["identity"]):
                raise OptionError(
                    f"`{path}` must hold runs of the same methods, but those of `{row['method']}` were made with "
                    "other weights or settings. Delete it, write to another file, or give the method another name."
                )

        return records, identities

    def _conditions(self) -> dict[str, Any]:
        """How the target is asked: its revision, and what its chat template makes of prompts."""
        conditions: dict[str, Any] = {
            "revision": getattr(self.target.config, "_commit_hash", None),
            "template": template_digest(self.tokenizer) if self.tokenizer.chat_template is not None else None,
        }
        if self.prompts[0].template_kwargs:
            conditions["template_kwargs"] = dict(self.prompts[0].template_kwargs)

        return conditions

    def _cells(self) -> dict[str, tuple[str, str, Prompt]]:
        """All runs to make, by key: prompt by prompt, the methods of a prompt one after the other in random order."""
        order = random.Random(self.seed)
        cells = {}
        for decoding in self.decodings:
            for prompt in self.prompts:
                methods = list(self._methods)
                order.shuffle(methods)
                for name in methods:
                    key = (BASELINE, name, decoding, prompt.set_name, prompt.prompt_id, prompt.digest)
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
            "speculation": None if stats is None else vars(stats),
        }


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Inside, whatever a method raises says which one it was."""
    try:
        yield
    except Exception as error:
        raise BenchmarkError(
            f"All methods must finish, but `{name}` raised {type(error).__name__}: {error} What is measured is kept: "
            "mend the method or leave it out, and run the same command again."
        ) from error
