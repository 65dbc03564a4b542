"""The texts of all rows: which may still grow, what the caller's streamer gets, and how they are returned as one batch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..core.sampling import CoupledDraws, ForeseeableDraws, GeneratorDraws, choose, row_seeds
from . import processors as row_processors
from .sequence_state import SequenceState, answers, processed

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


class SequenceBatch:
    """One [`SequenceState`] for each row. Rows grow at their own pace; the caller sees what a batch without a drafter shows.

    Where the caller's processors or criteria may tell rows apart by their places, rows grow in step: token by token, all of them are
    shown together.

    Args:
        input_ids (`torch.Tensor` of shape `(rows, prompt)`): The prompts.
        mask (`torch.Tensor` of shape `(rows, prompt)`, *optional*): 0 at padding.
        processors ([`~transformers.LogitsProcessorList`]): Of several rows each gets its own.
        criteria ([`~transformers.StoppingCriteriaList`]): Called for each row with its own text, or in step for all of them.
        config ([`~transformers.GenerationConfig`]): As `generate` resolved it.
        is_coupled (`bool`): Draws that a drafter can foresee.
        streamer (`BaseStreamer`, *optional*): Gets each token of all rows once the last of them has it.
    """

    def __init__(
        self,
        input_ids: Tensor,
        mask: Tensor | None,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        *,
        is_coupled: bool = False,
        streamer: "BaseStreamer | None" = None,
    ) -> None:
        num_rows, self.is_drawn = len(input_ids), bool(config.do_sample)
        self.is_in_step = num_rows > 1 and bool(row_processors.of_batches(processors, criteria))
        self._processors, self._criteria = processors, criteria
        self._shown_scores: tuple[Tensor, ...] = ()  # in step, of all rows
        of_row, draws = [processors], _draws(num_rows, input_ids.device, is_coupled, self.is_drawn)
        if num_rows > 1:
            of_row = [row_processors.of_row(processors, row) for row in range(num_rows)]
        own = StoppingCriteriaList() if self.is_in_step else criteria  # in step nobody asks for a row alone
        self.rows = [
            SequenceState(input_ids[row : row + 1], of_row[row], own, config, draws[row], self._stream)
            for row in range(num_rows)
        ]
        self.prompt_len = input_ids.shape[1]
        self._streamer, self._num_streamed = streamer, 0
        ends_rows = any(hasattr(criterion, "eos_token_id") for criterion in criteria)  # the test that `generate` makes
        self._pad: Tensor | None = config._pad_token_tensor if ends_rows else None
        self.prompt_ids = input_ids
        is_text = torch.ones_like(input_ids) if mask is None else mask[:, -self.prompt_len :].to(input_ids.device)
        self.held_columns = [row.nonzero()[:, 0] for row in is_text]  # of the prompt, where there is no padding

    def __len__(self) -> int:
        """Rows."""
        return len(self.rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.rows))

    def is_closed(self, row: int) -> bool:
        """Whether a row gets no more tokens. Without a token that ends rows, complete ones grow with the others."""
        transcript = self.rows[row]
        if not transcript.is_complete or self._pad is not None:
            return transcript.is_complete
        if self.is_in_step:
            return all(other.is_complete for other in self.rows)
        return len(transcript) >= self.longest

    def end_of(self, row: int, max_length: int) -> int:
        """How long a row may get: complete ones as long as the others, which in step nobody knows yet."""
        return self.longest if self.rows[row].is_complete and not self.is_in_step else max_length

    def commit_in_step(self, logits: Mapping[int, Tensor], chosen: Mapping[int, int] | None = None) -> dict[int, int]:
        """The next token of rows that stand at one length, with the calls of decoding without a drafter; returns it by row.

        Args:
            logits (`Mapping[int, torch.Tensor]`): The target's raw logits `[1, vocab]` of the rows that go on. Ended ones count 0.
            chosen (`Mapping[int, int]`, *optional*): Tokens that another process chose.
        """
        ids = self.sequences
        blank = torch.zeros_like(next(iter(logits.values())), dtype=torch.float32, device=ids.device)
        raw = torch.cat([logits.get(row, blank).to(blank) for row in range(len(self))])
        scores = processed(self._processors, ids, raw.clone(), self.is_drawn)
        for row in logits:
            transcript, own = self.rows[row], scores[row : row + 1]
            token = choose(own, self.is_drawn, transcript.draws) if chosen is None else ids.new_tensor([chosen[row]])
            transcript.append(token, raw[row : row + 1], own)
        self._shown_scores += () if self.rows[0].scores is None else (scores,)
        is_done = answers(self._criteria, self.sequences, self._shown_scores or None)
        for transcript, is_complete in zip(self.rows, is_done.tolist(), strict=True):
            transcript.is_complete |= is_complete
        return {row: int(self.rows[row].input_ids[0, -1]) for row in logits}

    @property
    def is_complete(self) -> bool:
        """Whether no row gets more tokens."""
        return all(map(self.is_closed, range(len(self))))

    @property
    def roots(self) -> Tensor:
        """The newest token of each row, `[rows, 1]`."""
        return torch.cat([transcript.input_ids[:, -1:] for transcript in self.rows])

    @property
    def sequences(self) -> Tensor:
        """All texts, `[rows, tokens]`; rows that ended early are padded."""
        return torch.cat([self._padded(transcript.input_ids) for transcript in self.rows])

    @property
    def token_ids(self) -> Tensor:
        """All texts without padding, `[rows, tokens]`, left-aligned."""
        if len(self) == 1 and len(self.held_columns[0]) == self.prompt_len:
            return self.rows[0].input_ids
        texts = [
            torch.cat([row.input_ids[0, held], row.input_ids[0, self.prompt_len :]])
            for row, held in zip(self.rows, self.held_columns, strict=True)
        ]
        return pad_sequence(texts, batch_first=True)

    @property
    def num_token_ids(self) -> tuple[int, ...]:
        """Tokens of each row without padding."""
        pairs = zip(self.rows, self.held_columns, strict=True)
        return tuple(len(row) - self.prompt_len + len(held) for row, held in pairs)

    def outputs(self, name: str) -> tuple[Tensor, ...] | None:
        """`scores` or `logits` of each step, `[rows, vocab]`; zeros where a row had ended."""
        rows = [getattr(transcript, name) for transcript in self.rows]
        if rows[0] is None or len(rows) == 1:
            return rows[0]
        blank = torch.zeros_like(rows[0][0])
        num_steps = max(map(len, rows))
        return tuple(torch.cat([row[step] if step < len(row) else blank for row in rows]) for step in range(num_steps))

    def end(self) -> None:
        """No more tokens come."""
        if self._streamer is not None:
            self._stream()
            self._streamer.end()

    def _padded(self, ids: Tensor) -> Tensor:
        num_missing = self.longest - ids.shape[1]
        return ids if self._pad is None else torch.cat([ids, self._pad.expand(1, num_missing).to(ids)], dim=-1)

    def _stream(self) -> None:
        """Put the tokens of every step that all rows have taken."""
        if self._streamer is None:
            return
        for column in range(self.prompt_len + self._num_streamed, self.longest):
            if any(len(row) <= column and not (row.is_complete and self._pad is not None) for row in self.rows):
                return
            self._streamer.put(torch.cat([self._padded(row.input_ids)[:, column] for row in self.rows]).cpu())
            self._num_streamed += 1


def _draws(num_rows: int, device: torch.device, is_coupled: bool, do_sample: bool) -> list[ForeseeableDraws]:
    """One row draws from the global stream as plain decoding does; of several each has a stream of its own."""
    if num_rows == 1 or not do_sample:
        return [CoupledDraws.from_global_stream() if is_coupled else GeneratorDraws() for _ in range(num_rows)]
    seeds = row_seeds(num_rows)
    if is_coupled:
        return [CoupledDraws(seed) for seed in seeds]
    return [GeneratorDraws(torch.Generator(device).manual_seed(seed)) for seed in seeds]
