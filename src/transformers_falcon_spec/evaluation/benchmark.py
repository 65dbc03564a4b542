"""Interleaved runs of the target alone and with drafters, on the same prompts with the same seeds and stopping rule.

Every run is appended to a JSON lines file at once, so that an interrupted benchmark goes on; `summary.py` makes rates of them.
"""

import json
import logging
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .decoding import decoding_options, repetition_rate, timed_generate
from .prompts import Prompt

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
    drafters: Mapping[str, PreTrainedModel]
    prompts: list[Prompt]
    decodings: list[str]
    max_new_tokens: int = 128
    repeats: int = 1
    seed: int = 0
    with_baseline: bool = True

    def run(self, records: Path) -> list[dict[str, Any]]:
        """Make every run that `records` does not hold yet; returns all of them."""
        done = read_records(records)
        cells = [cell for cell in self._cells() if cell.key not in done]
        if done:
            logger.info("%s holds %d runs; %d are left.", records, len(done), len(cells))
        if cells:
            self._warm_up()
        records.parent.mkdir(parents=True, exist_ok=True)
        with records.open("a", encoding="utf-8") as file:
            for cell in tqdm(cells, desc="bench", unit="run"):
                done[cell.key] = self._measure(cell)
                file.write(json.dumps({"key": cell.key, **done[cell.key]}) + "\n")
                file.flush()
        return list(done.values())

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


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """Runs by key; a last line cut short by a kill is passed over and cut off."""
    if not path.is_file():
        return {}
    whole, found = 0, {}
    data = path.read_bytes()
    for line in data.split(b"\n")[:-1]:
        row = json.loads(line)
        found[row.pop("key")] = row
        whole += len(line) + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
    return found
