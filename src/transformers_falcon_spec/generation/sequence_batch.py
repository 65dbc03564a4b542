"""The texts of all rows of a call, which grow at their own pace and are shown like a batch without a drafter."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..core.sampling import CoupledDraws, ForeseeableDraws, GeneratorDraws, row_seeds
from ..core.verification import AcceptedPath
from ..errors import GenerationError
from . import processors as row_processors
from .distributed import Decision
from .modes import variable_set
from .verifier import TOKEN_MATCHING, Verifier

if TYPE_CHECKING:
    from .acceptors import NodeScores

_SEEDS: ContextVar[Sequence[int] | None] = ContextVar("seeds", default=None)


def seeded_rows(seeds: Sequence[int]) -> AbstractContextManager[None]:
    """Let each row of the batches sampled inside, on this thread, draw as a call of its own does from its seed."""
    return variable_set(_SEEDS, seeds)


class TokenScores(NamedTuple):
    """The target's scores of one next token, both `[1, vocab]`."""

    raw: Tensor  # as the target gave them, in float32
    processed: Tensor  # after the logits processors


class SequenceState:
    """The text of one row, with the processors and draws that plain decoding would use to write it."""

    def __init__(
        self,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        config: GenerationConfig,
        draws: ForeseeableDraws,
    ) -> None:
        # [1, tokens] on the device of the prompt and on the host, as far as somebody has asked for them
        self._input_ids = input_ids
        self._host_ids = input_ids.cpu()
        self.prompt_len = input_ids.shape[1]
        self._new_ids: list[int] = []  # all tokens behind the prompt
        self.has_ended = False  # as its stopping criteria say
        is_dict = config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if is_dict and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if is_dict and config.output_logits else None
        self.keeps_scores = self.logits is not None or self.scores is not None
        self.draws = draws
        self.do_sample = bool(config.do_sample)
        self._processors = processors
        # whether the next token is the best of the target's own scores, and nobody looks at these
        self.takes_best = not (self.do_sample or processors or self.keeps_scores)
        # whether tokens can be chosen before those in front of them are text: no processor looks at it
        can_take_back = not self.do_sample or not isinstance(draws, CoupledDraws)
        self.can_choose_ahead = can_take_back and row_processors.read_scores_alone(processors)

    def __len__(self) -> int:
        """The number of tokens, those of the prompt included."""
        return self.prompt_len + len(self._new_ids)

    @property
    def host_ids(self) -> Tensor:
        """The text `[1, tokens]` on the host, padding of the prompt included."""
        self._host_ids = self._with_new(self._host_ids)
        return self._host_ids

    @property
    def input_ids(self) -> Tensor:
        """The same on the device of the prompt."""
        self._input_ids = self._with_new(self._input_ids)
        return self._input_ids

    def _with_new(self, ids: Tensor) -> Tensor:
        new_ids = self._new_ids[ids.shape[1] - self.prompt_len :]
        if not new_ids:
            return ids
        new = torch.tensor([new_ids], dtype=ids.dtype).to(ids.device, non_blocking=True)  # nobody waits for the device
        return torch.cat([ids, new], dim=-1)

    def process(self, ids: Tensor, logits: Tensor) -> TokenScores:
        """The scores of the tokens that follow `ids` `[rows, tokens]`, from the target's logits `[rows, vocab]`."""
        raw = logits.to(dtype=torch.float32, copy=True, device=ids.device)
        kept = raw if self.logits is None else raw.clone()  # processors may write in place
        return TokenScores(kept, processed(self._processors, ids, raw, self.do_sample))

    def append(self, token_id: int, scores: TokenScores | None) -> None:
        """Add a token to the text, and the scores that it was chosen by to the outputs, where those are kept."""
        if scores is not None:
            self.logits = None if self.logits is None else (*self.logits, scores.raw)
            self.scores = None if self.scores is None else (*self.scores, scores.processed)
        self._new_ids.append(token_id)


class SequenceBatch:
    """The [`SequenceState`] of each row of a call. Rows grow at their own pace, each with its own processors.

    Where the caller's processors or criteria may treat rows by their index, rows grow in lockstep: token by token,
    with calls that show all rows together. `mask` is 0 at padding of the prompts. The streamer gets a token of all
    rows once the last of them has it. `rows` are those that are still read; whoever is given a row's index counts
    these, and `numbers` says which of `all_rows` they are.
    """

    def __init__(
        self,
        input_ids: Tensor,
        mask: Tensor | None,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        *,
        verifier: Verifier = TOKEN_MATCHING,
        streamer: BaseStreamer | None = None,
    ) -> None:
        num_rows = len(input_ids)
        self.do_sample = bool(config.do_sample)
        self.verifier = verifier
        self.is_lockstep = num_rows > 1 and bool(row_processors.of_batches(processors, criteria))
        self.processors = processors
        self._criteria = criteria
        self.reader = row_processors.reader_in(processors, criteria)  # that runs code of the caller's
        self._criteria_of = row_processors.criteria_of_rows(criteria, num_rows)
        self._has_row_criteria = all(type(each) in row_processors.ROW_CRITERIA for each in criteria)
        self._first_end, self._end_ids = row_processors.possible_ends(criteria)
        self._shown_scores: tuple[Tensor, ...] = ()  # in lockstep, of all rows
        self.rows: list[SequenceState] = []
        for row, draws in enumerate(_draws(num_rows, input_ids.device, verifier.couples_draws, self.do_sample)):
            row_list = processors if num_rows == 1 else row_processors.of_row(processors, row, num_rows)
            self.rows.append(SequenceState(input_ids[row : row + 1], row_list, config, draws))

        self.all_rows = self.rows
        self.numbers = list(range(num_rows))
        self.is_open = [True] * num_rows  # of each row that is read whether it gets more tokens
        self.prompt_len = input_ids.shape[1]
        self._streamer = streamer
        self._num_streamed = 0
        ends_rows = any(hasattr(criterion, "eos_token_id") for criterion in criteria)  # the test that `generate` makes
        # fills up rows that have ended; None: they may grow again
        self.pad: Tensor | None = config._pad_token_tensor if ends_rows else None
        self.prompt_ids = input_ids
        # on which drawn tokens are verified; with several rows the device of their random generators
        self.probs_device = torch.device("cpu") if num_rows == 1 else input_ids.device
        self.is_padded = mask is not None and not mask.all()  # some row, in the prompt or in a cache before it
        is_text = torch.ones_like(input_ids) if mask is None else mask[:, -self.prompt_len :].to(input_ids.device)
        self.prompt_columns = [row.nonzero()[:, 0] for row in is_text]  # of the prompt, where there is no padding

    def __len__(self) -> int:
        """The number of rows of the call."""
        return len(self.all_rows)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest row."""
        return max(map(len, self.all_rows))

    def has_ended(self, row: int) -> bool:
        """Whether a row gets no more tokens. Without a token that ends rows, ended ones grow with the others."""
        sequence = self.rows[row]
        if not sequence.has_ended or self.pad is not None:
            return sequence.has_ended
        if self.is_lockstep:
            return all(other.has_ended for other in self.rows)
        return len(sequence) >= self._least_length

    @property
    def _least_length(self) -> int:
        """The fewest tokens of all texts in the end: those of the longest, and the next one of an open row."""
        return max(len(row) + (not row.has_ended) for row in self.all_rows)

    def draft_depths(self, max_length: int, num_to_context: Sequence[int]) -> tuple[int, ...]:
        """The most tokens to draft for each row: `num_to_context` fit, and texts end at `max_length`.

        A row that has ended becomes as long as the others, unless rows grow in lockstep.
        """
        depths = []
        for row, (sequence, num_fitting) in enumerate(zip(self.rows, num_to_context, strict=True)):
            end = self._least_length if sequence.has_ended and not self.is_lockstep else max_length
            depth = min(end - len(sequence) - 1, num_fitting) if self.is_open[row] else 0
            depths.append(max(depth, 0))
        return tuple(depths)

    def noise_ahead(self, vocab_size: int) -> Callable[[int, int], Tensor]:
        """The noise of coming draws by row and depth. A guess that shares it meets the target's token more often."""
        known: dict[int, Callable[[int], Tensor]] = {}

        def noise(row: int, depth: int) -> Tensor:
            if row not in known:  # made when asked for: plain steps never ask
                known[row] = self.rows[row].draws.noise_ahead(vocab_size, self.prompt_ids.device)
            return known[row](depth)

        return noise

    def score_together(self, nodes: Mapping[int, int], scores: Sequence["NodeScores"]) -> None:
        """Process logits after a node of each open row in the call that plain decoding makes; 0 in rows that ended."""
        ids = self.sequences
        logits = {self.numbers[row]: scores[row].logits[node : node + 1] for row, node in nodes.items()}
        zeros = torch.zeros_like(next(iter(logits.values())), dtype=torch.float32, device=ids.device)
        raw = torch.cat([logits.get(number, zeros).to(zeros) for number in range(len(self))])
        together = processed(self.processors, ids, raw.clone(), self.do_sample)
        for row, node in nodes.items():
            own = slice(self.numbers[row], self.numbers[row] + 1)
            scores[row].by_node[node] = TokenScores(raw[own], together[own])

        self._shown_scores += () if self.all_rows[0].scores is None else (together,)

    def emit(self, accepted: Mapping[int, AcceptedPath], scores: Sequence[Any]) -> dict[int, AcceptedPath]:
        """Make accepted tokens text, one by one, as far as the stopping criteria let the rows grow and draw nothing.

        Returns the part of each path that became text.
        """
        emitted = {}
        for row, path in accepted.items():
            num_tokens = 0
            for node, token_id in zip(path.path, path.token_ids, strict=True):
                if self.do_sample:
                    scores[row].settle_draws(node)
                self._append(row, node, token_id, scores)
                num_tokens += 1
                if self.has_ended(row) or not (self._has_row_criteria or scores[row].is_settled(node)):
                    break

            emitted[row] = path.cut(num_tokens)

        self._note_open_rows()
        return emitted

    def _note_open_rows(self) -> None:
        self.is_open = [not self.has_ended(row) for row in range(len(self.rows))]

    def _append(self, row: int, node: int, token_id: int, scores: Sequence["NodeScores"]) -> None:
        """Append the token after a node to its row; then ask the row's criteria if it may end there, and stream it."""
        sequence = self.rows[row]
        token_id = int(token_id)  # a rule of the caller's may give a tensor, which no set of ids would hold
        sequence.append(token_id, scores[row].after(node) if sequence.keeps_scores else None)
        if token_id in self._end_ids or len(sequence) >= self._first_end:
            shown = sequence.host_ids if self._has_row_criteria else sequence.input_ids
            sequence.has_ended |= bool(answers(self._criteria_of[row], shown, sequence.scores))
        if self._streamer is not None:
            self._stream(self._streamer)

    def emit_together(self, tokens: Mapping[int, tuple[int, int]], scores: Sequence["NodeScores"]) -> None:
        """In lockstep: append a token to each open row, given with its node before; then ask for all rows at once."""
        for row, (node, token_id) in tokens.items():
            sequence = self.rows[row]
            sequence.append(token_id, scores[row].after(node) if sequence.keeps_scores else None)

        is_done = answers(self._criteria, self.sequences, self._shown_scores or None)
        for sequence, has_ended in zip(self.all_rows, is_done.tolist(), strict=True):
            sequence.has_ended |= has_ended
        self._note_open_rows()
        if self._streamer is not None:
            self._stream(self._streamer)

    def decision(self, paths: list[AcceptedPath]) -> Decision:
        """The decision that other processes follow, after a step in which these paths became text."""
        draws = [row.draws.get_state(self.prompt_ids.device) for row in self.rows] if self.do_sample else []
        return Decision(paths, [row.has_ended for row in self.rows], draws)

    def follow(self, decision: Decision, scores: Sequence["NodeScores"]) -> list[AcceptedPath]:
        """Emit the paths that the first process emitted, with the same calls; returns them, one for each row."""
        paths = [list(zip(path.path, path.token_ids, strict=True)) for path in decision.paths]
        if self.is_lockstep:
            for number in range(max(map(len, paths))):
                tokens = {row: path[number] for row, path in enumerate(paths) if number < len(path)}
                self.score_together({row: node for row, (node, _) in tokens.items()}, scores)
                self.emit_together(tokens, scores)
        else:
            for row, path in enumerate(paths):
                for node, token_id in path:
                    self._append(row, node, token_id, scores)

        for row, sequence in enumerate(self.rows):
            sequence.has_ended = decision.has_ended[row]
            if decision.draws:
                sequence.draws.set_state(decision.draws[row], self.prompt_ids.device)

        self._note_open_rows()
        return decision.paths

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these of the rows that are read; the others get no more tokens."""
        self.rows = [self.rows[row] for row in rows]
        self.numbers = [self.numbers[row] for row in rows]
        self.prompt_columns = [self.prompt_columns[row] for row in rows]
        self._criteria_of = [self._criteria_of[row] for row in rows]
        self._note_open_rows()

    @property
    def roots(self) -> Tensor:
        """The newest token of each row, `[rows, 1]`."""
        return torch.cat([sequence.input_ids[:, -1:] for sequence in self.rows])

    @property
    def sequences(self) -> Tensor:
        """All texts, `[rows, tokens]`; rows that ended early are padded."""
        return torch.cat([self._padded(sequence.input_ids) for sequence in self.all_rows])

    @property
    def texts(self) -> tuple[Tensor, tuple[int, ...]]:
        """All texts without padding, `[rows, tokens]`, left-aligned, and the number of tokens of each."""
        if len(self.rows) == 1 and len(self.prompt_columns[0]) == self.prompt_len:  # nothing to launch on a device
            ids = self.rows[0].input_ids
            return ids, (ids.shape[1],)

        texts = []
        for row, held in zip(self.rows, self.prompt_columns, strict=True):
            texts.append(torch.cat([row.input_ids[0, held], row.input_ids[0, self.prompt_len :]]))
        return pad_sequence(texts, batch_first=True), tuple(map(len, texts))

    def outputs(self, name: str) -> tuple[Tensor, ...] | None:
        """`scores` or `logits` of each step, `[rows, vocab]`; zeros where a row had ended."""
        rows = [getattr(sequence, name) for sequence in self.all_rows]
        if rows[0] is None or len(rows) == 1:
            return rows[0]
        steps = zip_longest(*rows, fillvalue=torch.zeros_like(rows[0][0]))
        return tuple(map(torch.cat, steps))

    def end(self) -> None:
        """Give the streamer what it lacks, and end it."""
        if self._streamer is not None:
            self._stream(self._streamer)
            self._streamer.end()

    def _padded(self, ids: Tensor) -> Tensor:
        num_missing = self.longest - ids.shape[1]
        return ids if self.pad is None else torch.cat([ids, self.pad.expand(1, num_missing).to(ids)], dim=-1)

    def _stream(self, streamer: BaseStreamer) -> None:
        for column in range(self.prompt_len + self._num_streamed, self.longest):
            if any(len(row) <= column and not (row.has_ended and self.pad is not None) for row in self.all_rows):
                return
            streamer.put(torch.cat([self._padded(row.host_ids)[:, column] for row in self.all_rows]))
            self._num_streamed += 1


def processed(processors: LogitsProcessorList, ids: Tensor, raw: Tensor, do_sample: bool) -> Tensor:
    """Let the processors score the tokens after `ids`, from `raw` logits `[rows, vocab]`, which they may overwrite."""
    scores: Tensor = processors(ids, raw)  # type: ignore[arg-type]  # `LongTensor` there means any ids
    if scores.shape != raw.shape:
        raise GenerationError(
            f"Logits processors must return scores of shape {tuple(raw.shape)}, but one returned "
            f"{tuple(scores.shape)}. Each must give back one score for each token of the vocabulary."
        )

    if do_sample and not scores.amax().isfinite():  # plain sampling fails there, too
        raise GenerationError(
            f"Sampling needs a finite best score, but after the logits processors it is {float(scores.amax())}. Look "
            "for a processor that divides by zero or forbids every token, or a target whose own logits overflow."
        )

    return scores


def answers(criteria: StoppingCriteriaList, ids: Tensor, scores: tuple[Tensor, ...] | None) -> Tensor:
    """Ask the stopping criteria which rows of `ids` `[rows, tokens]` have ended; a single answer is for all rows."""
    is_done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for criterion in criteria:
        answer = torch.as_tensor(criterion(ids, scores), dtype=torch.bool, device=ids.device)
        if answer.shape not in ((), (1,), (len(ids),)):
            raise GenerationError(
                f"A stopping criterion must give one answer for each of the {len(ids)} rows that it is shown, but "
                f"`{type(criterion).__qualname__}` gave answers of shape {tuple(answer.shape)}. Let it return a "
                f"tensor of shape `(len(input_ids),)`."
            )

        is_done = is_done | answer

    return is_done


def _draws(num_rows: int, device: torch.device, is_coupled: bool, do_sample: bool) -> list[ForeseeableDraws]:
    """The draws of each row: of the global random stream for a single row, as in plain decoding, else of its own."""
    if num_rows == 1 or not do_sample:
        return [CoupledDraws.from_global_stream() if is_coupled else GeneratorDraws() for _ in range(num_rows)]
    seeds = _SEEDS.get() or row_seeds(num_rows)
    assert len(seeds) == num_rows  # those of the caller, too
    if is_coupled:
        return [CoupledDraws(seed) for seed in seeds]
    return [GeneratorDraws(torch.Generator(device).manual_seed(seed)) for seed in seeds]
