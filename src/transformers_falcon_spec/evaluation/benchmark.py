"""Interleaved runs of the target alone and with drafters, on the same prompts with the same seeds and stopping rule.

Every run is appended to a JSON lines file at once, so that an interrupted benchmark goes on; `summary.py` makes rates of them.
"""

import logging
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafters.base import DrafterModel
from ..provenance import weights_fingerprint
from .decoding import decoding_options, repetition_rate, timed_generate
from .prompts import Prompt
from .records import Records

logger = logging.getLogger(__name__)

BASELINE = "target"  # the arm without a drafter
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Cell:
    """One run to make: an arm on a prompt under a decoding."""

    arm: str
    decoding: str
    prompt: Prompt
    repeat: int

    @property
    def key(self) -> str:
        """What tells this run from all others of the benchmark."""
        return "|".join([self.arm, self.decoding, self.prompt.set_name, self.prompt.prompt_id, str(self.repeat)])


@dataclass
class Benchmark:
    """A benchmark: the target, drafters by name (None is the target alone), and what they write.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer.
        drafters (`dict`): Drafters by arm name.
        prompts (`list[Prompt]`): What to answer.
        decodings (`list[str]`): Names from `DECODINGS`.
        max_new_tokens (`int`): Same stop for all arms.
        repeats (`int`): Runs of each cell.
        seed (`int`): Of the sampling and of the order of arms.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafters: Mapping[str, DrafterModel]
    prompts: list[Prompt]
    decodings: list[str]
    max_new_tokens: int = 128
    repeats: int = 1
    seed: int = 0
    with_baseline: bool = True

    def run(self, path: Path) -> list[dict[str, Any]]:
        """Make every run that the file at `path` does not hold yet; returns all of them.

        Raises:
            [`OptionError`]: the file holds runs of other models or settings.
        """
        records = Records(path, self._settings())
        done = {row["key"] for row in records.entries}
        cells = [cell for cell in self._cells() if cell.key not in done]
        if done:
            logger.info("%s holds %d runs; %d are left.", path, len(done), len(cells))
        if cells:
            self._warm_up()
        for cell in tqdm(cells, desc="bench", unit="run"):
            records.append({"key": cell.key, **self._measure(cell)})
        return records.entries

    def _settings(self) -> dict[str, Any]:
        """What all runs have in common."""
        drafters = {name: [weights_fingerprint(d), d.draft_settings] for name, d in self.drafters.items()}
        return {
            "target": weights_fingerprint(self.target),
            "drafters": drafters,
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
        }

    def _cells(self) -> Iterator[Cell]:
        """All runs, the arms of a prompt beside each other in random order."""
        order = random.Random(self.seed)
        for repeat in range(self.repeats):
            for decoding in self.decodings:
                for prompt in self.prompts:
                    arms = [BASELINE] * self.with_baseline + list(self.drafters)
                    order.shuffle(arms)
                    yield from (Cell(arm, decoding, prompt, repeat) for arm in arms)

    def _warm_up(self) -> None:
        """First calls allocate, probe and compile; they are not measured."""
        ids = self.prompts[0].input_ids(self.tokenizer)
        for drafter in [None, *self.drafters.values()]:
            timed_generate(self.target, ids, WARM_UP_TOKENS, decoding_options("greedy"), self.seed, drafter)

    def _measure(self, cell: Cell) -> dict[str, Any]:
        ids = cell.prompt.input_ids(self.tokenizer)
        drafter = None if cell.arm == BASELINE else self.drafters[cell.arm]
        options = decoding_options(cell.decoding)
        run = timed_generate(self.target, ids, self.max_new_tokens, options, self.seed + cell.repeat, drafter)
        return {
            "arm": cell.arm,
            "decoding": cell.decoding,
            "set": cell.prompt.set_name,
            "prompt": cell.prompt.prompt_id,
            "repeat": cell.repeat,
            "num_tokens": len(run.new_ids),
            "seconds": run.seconds,
            "repetition_rate": repetition_rate(run.new_ids),
            "token_ids": run.new_ids,
            "speculation": None if drafter is None else vars(run.output.speculation),
        }
