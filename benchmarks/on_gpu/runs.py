"""Cells are measured turn by turn: every way of a cell writes the same batch, in random order, from the same seed.

A turn is stored when all of its ways have written, so that what is compared was always written side by side.
"""

import logging
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.batches import padded, texts
from transformers_falcon_spec.evaluation.methods import DECODINGS, Method
from transformers_falcon_spec.evaluation.parity import GenerateCall
from transformers_falcon_spec.generation.timed import Run, timed_generate
from transformers_falcon_spec.provenance import portable
from transformers_falcon_spec.records import Records
from transformers_falcon_spec.transformers_versions import CACHE

from .cells import EAGER, ORACLES, Cell, Way
from .floor import step_bytes
from .pairs import Pair
from .phases import HOST, WorkWatch, watched_work
from .texts import VERDICTS, Texts, verdict

logger = logging.getLogger(__name__)


class Deadline:
    """The time that a call of the script may take; the turn that is under way is finished."""

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def is_over(self) -> bool:
        """Whether nothing new should be begun."""
        return self._end is not None and time.monotonic() >= self._end


def turns_of(cell: Cell, entries: Sequence[dict[str, Any]]) -> set[int]:
    """The turns of a cell that are stored."""
    return {row["turn"] for row in entries if row["cell"] == cell.name and "turn" in row}


def failures_of(cell: Cell, entries: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Ways of a cell that failed, and why; they are not tried again with the same file."""
    return {row["way"]: row["failure"] for row in entries if row["cell"] == cell.name and "failure" in row}


@dataclass
class CellRun:
    """One cell with a pair, and the records that it adds to."""

    cell: Cell
    pair: Pair
    prompts: Sequence[Tensor]  # `[1, tokens]` each, sets in turn
    records: Records
    bandwidth: float  # bytes a second
    max_new_tokens: int
    seed: int = 0
    _methods: dict[Way, Method] = field(default_factory=dict, init=False)
    _warm_up: dict[Way, WorkWatch] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.options = DECODINGS[self.cell.decoding]
        self.num_new = self.cell.max_new_tokens or self.max_new_tokens
        self.failures = failures_of(self.cell, self.records.entries)  # by way: what went wrong, in earlier calls too

    def run(self, deadline: Deadline) -> None:
        """Make all turns that the records lack, or as many as the time allows."""
        done = turns_of(self.cell, self.records.entries)
        order = random.Random(self.seed)
        with self._endless():
            for turn in range(self.cell.planned):
                ways = order.sample(self.cell.ways, len(self.cell.ways))
                if turn in done:
                    continue
                if deadline.is_over:
                    return
                if not self._methods:
                    self._prepare(turn)
                self._take(turn, ways)

    @contextmanager
    def _endless(self) -> Iterator[None]:
        """Inside, no token ends the text if the cell says so."""
        options = self.pair.target.generation_config
        before = options.eos_token_id
        options.eos_token_id = None if self.cell.is_endless else before
        try:
            yield
        finally:
            options.eos_token_id = before

    def batch(self, turn: int) -> tuple[Tensor, Tensor]:
        """Ids and mask of a turn's prompts, padded on the left."""
        first = turn * self.cell.rows
        chosen = [self.prompts[index % len(self.prompts)] for index in range(first, first + self.cell.rows)]
        return padded(chosen, self.pair.tokenizer.pad_token_id)

    def _prepare(self, turn: int) -> None:
        """Make the methods and call each once: first calls allocate, compile and capture."""
        longest = max(self.batch(each)[0].shape[1] for each in range(self.cell.planned))
        for way in self.cell.ways:
            if way.name in self.failures:
                continue
            with self._noting(way):
                self._methods[way] = self.pair.method(way, longest + self.num_new)
                self._tell(way, self.batch(turn))
                with watched_work(self.pair.device) as watch:
                    self._write(way, self.batch(turn), self.num_new)
                self._warm_up[way] = watch

    def _take(self, turn: int, ways: Sequence[Way]) -> None:
        """Let every way write the batch of a turn, and store what all of them made."""
        batch, rows, found = self.batch(turn), [], {}
        for way in ways:
            if way.name in self.failures:
                continue
            with self._noting(way):
                found[way], measured = self._measured(way, batch)
                origin = {"cell": self.cell.name, "setting": self.cell.setting, "turn": turn, "way": way.name}
                rows.append({**origin, **measured})

        plain = self._compared_with(turn, batch, found) if found else None
        for way, row in zip(found, rows, strict=True):
            if plain is not None:
                row["verdicts"] = self._verdicts(batch, plain, found[way])
            self.records.append(row)

    @contextmanager
    def _noting(self, way: Way) -> Iterator[None]:
        """Inside, whatever a way raises becomes a failure of this way alone."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  every way of a stranger's machine may fail in a way of its own
            logger.warning("`%s` is left out of `%s`: %s", way.name, self.cell.name, error)
            self.failures[way.name] = portable(f"{type(error).__name__}: {' '.join(str(error).split())}")
            self.records.append({"cell": self.cell.name, "way": way.name, "failure": self.failures[way.name]})
            if self.pair.device.type == "cuda":
                torch.cuda.empty_cache()

    def _write(self, way: Way, batch: tuple[Tensor, Tensor], num_new: int) -> Run:
        """One timed call."""
        method, (ids, mask) = self._methods[way], batch
        arguments = method.arguments()
        if CACHE in arguments:
            arguments[CACHE].reset()
        with method.path(self.pair.target):
            return timed_generate(
                self.pair.target, ids, num_new, self.options, self.seed, attention_mask=mask, **arguments
            )

    def _tell(self, way: Way, batch: tuple[Tensor, Tensor]) -> None:
        """Let an oracle know what plain decoding, the first way of its cell, writes behind these prompts."""
        if way.who not in ORACLES:
            return
        sequences = self._write(self.cell.ways[0], batch, self.num_new).output.sequences.cpu()
        num_padding = (1 - batch[1]).sum(dim=-1).tolist()
        oracle: Any = self._methods[way].assistant
        oracle.texts = [row[num:] for row, num in zip(sequences, num_padding, strict=True)]

    def _measured(self, way: Way, batch: tuple[Tensor, Tensor]) -> tuple[Texts, dict[str, Any]]:
        """The texts of one way, and what they cost."""
        self._tell(way, batch)
        on_cuda = self.pair.device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(self.pair.device)
        with watched_work(self.pair.device) as watch:
            run = self._write(way, batch, self.num_new)
        new_ids = self._new_ids(run, batch)
        measured = {
            "seconds": run.seconds,
            "num_tokens": sum(map(len, new_ids)),
            "peak_bytes": torch.cuda.max_memory_allocated(self.pair.device) if on_cuda else None,
            "capture_seconds": watch.capture_seconds,
            "warm_up_capture_seconds": self._warm_up[way].capture_seconds,
            "num_captures": watch.num_captures,
            "warm_up_num_captures": self._warm_up[way].num_captures,
            "is_captured": bool(watch.marks),
            "uncaptured": sorted(watch.uncaptured),
            "prompt_len": int(batch[1].sum()) / len(batch[1]),
            "bandwidth": self.bandwidth,
        }
        counts = self._stock_counts(way, batch, run) if way.is_stock else self._own_counts(way, run, watch, measured)
        return new_ids, {**measured, **counts, "texts": new_ids if way.who == EAGER else None}

    def _own_counts(self, way: Way, run: Run, watch: WorkWatch, measured: dict[str, Any]) -> dict[str, Any]:
        """Steps, phases and the memory floor of a call of this package's loop."""
        stats = run.output.speculation
        num_steps = max((row.num_steps for row in stats.rows), default=stats.num_steps)
        decode_seconds = stats.total_seconds - stats.prefill_seconds - watch.capture_seconds
        other = decode_seconds - stats.draft_seconds - stats.verify_seconds
        by_host = {"draft": stats.draft_seconds, "read": stats.verify_seconds, "accept": other}
        drafter = self._methods[way].assistant
        floor = self._floor(drafter, measured, stats.num_passes / max(num_steps, 1))

        return {
            "num_steps": num_steps,
            "num_accepted": stats.num_accepted,
            "num_row_steps": stats.num_steps,
            "decode_seconds": decode_seconds,
            "phases": watch.seconds() if watch.by != HOST and watch.marks else by_host | watch.seconds(),
            "phases_by": watch.by if watch.marks else HOST,
            "floor_bytes": floor,
            "notes": stats.notes,
        }

    def _stock_counts(self, way: Way, batch: tuple[Tensor, Tensor], run: Run) -> dict[str, Any]:
        """The same of a stock call, which writes a token a step."""
        prefill_seconds = self._write(way, batch, 1).seconds
        num_steps = run.output.sequences.shape[1] - batch[0].shape[1] - 1
        measured = {"prompt_len": int(batch[1].sum()) / len(batch[1])}

        return {
            "num_accepted": 0,
            "num_steps": num_steps,
            "num_row_steps": num_steps * self.cell.rows,
            "decode_seconds": run.seconds - prefill_seconds,
            "floor_bytes": self._floor(None, measured, 0.0),
            "notes": [],
        }

    def _floor(self, drafter: Any, measured: dict[str, Any], num_passes: float) -> float:
        text_len = measured["prompt_len"] + self.num_new / 2
        return step_bytes(self.pair.target, drafter, rows=self.cell.rows, text_len=text_len, num_passes=num_passes)

    def _compared_with(self, turn: int, batch: tuple[Tensor, Tensor], found: dict[Way, Texts]) -> Texts | None:
        """The texts of eager plain decoding: of this turn, of a cell with the same prompts, or written now.

        A stock call draws for all rows of a batch at once, this package row by row: sampled batches are compared with the first way.
        """
        if self.cell.rows > 1 and self.options["do_sample"]:
            return found.get(self.cell.ways[0])
        eager = Way(EAGER)
        if eager in found:
            return found[eager]
        stored = (row for row in self.records.entries if row.get("texts") and row["turn"] == turn)
        for row in stored:
            if row.get("setting") == self.cell.setting:
                return row["texts"]

        self._methods.setdefault(eager, self.pair.method(eager, 0))
        return self._new_ids(self._write(eager, batch, self.num_new), batch)

    def _new_ids(self, run: Run, batch: tuple[Tensor, Tensor]) -> Texts:
        """The new tokens of each row up to its end."""
        eos = self.pair.target.generation_config.eos_token_id
        return texts(run.output.sequences, batch[0].shape[1], eos if isinstance(eos, list) else [eos])

    def _verdicts(self, batch: tuple[Tensor, Tensor], plain: Texts, written: Texts) -> dict[str, int]:
        """How many rows are plain decoding's, and what the others are."""
        counts = dict.fromkeys(VERDICTS, 0)
        can_replay = not self.options["do_sample"] or self.cell.rows == 1
        for row, (left, right) in enumerate(zip(plain, written, strict=True)):
            prompt = batch[0][row][batch[1][row].bool()][None]
            call = (
                GenerateCall(self.pair.target, prompt, self.num_new, self.options, self.seed) if can_replay else None
            )
            counts[verdict(call, left, right)] += 1

        return counts
