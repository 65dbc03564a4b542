"""The text of one row while it is written: each token through processors, choice, streamer and stopping criteria, in that order."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..core.sampling import ForeseeableDraws, GeneratorDraws, choose
from ..errors import GenerationError
from .processors import read_scores_alone


class SequenceState:
    """Commits tokens in the order, and with the calls, of decoding without a drafter.

    Args:
        input_ids (`torch.Tensor` of shape `(1, prompt)`): The prompt, padding included.
        processors ([`~transformers.LogitsProcessorList`]): Called once for each committed token.
        criteria ([`~transformers.StoppingCriteriaList`]): Likewise.
        config ([`~transformers.GenerationConfig`]): `do_sample` and which outputs to keep.
        draws ([`ForeseeableDraws`]): Where samples come from.
        announce (`Callable`): Called when a token was appended, before the criteria see it.
    """

    def __init__(
        self,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        draws: ForeseeableDraws,
        announce: Callable[[], None],
    ) -> None:
        self.input_ids = input_ids
        self.prompt_len = input_ids.shape[1]
        self.is_complete = False
        self.scores: tuple[Tensor, ...] | None = _if(config, "output_scores")
        self.logits: tuple[Tensor, ...] | None = _if(config, "output_logits")
        self.step_scores: list[Tensor] = []  # [1, vocab] processed, of each token of this step
        self.draws = draws
        self._processors, self._criteria, self._announce = processors, criteria, announce
        self._do_sample = bool(config.do_sample)
        self._foreseen: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # raw logits and scores after drafted tokens

    def __len__(self) -> int:
        """Tokens, the prompt's included."""
        return self.input_ids.shape[1]

    def commit_token(self, logits: Tensor) -> int:
        """Choose the token that follows the text, given the target's raw logits `[1, vocab]`, and append it."""
        raw, scores = self._processed(self.input_ids, logits)
        token = choose(scores, self._do_sample, self.draws)
        self.append(token, raw, scores)
        return int(token)

    @property
    def can_choose_ahead(self) -> bool:
        """Whether the choice after every node of a tree can be made at once."""
        is_plain = not self._do_sample or isinstance(self.draws, GeneratorDraws)
        return is_plain and read_scores_alone(self._processors)

    def choose_ahead(self, logits: Tensor, depths: Tensor) -> Callable[[int], int]:
        """The choices after all nodes in one go, which a device makes faster than one by one; given a node, the result commits.

        The random state ends where choosing one by one would have left it. Source: `torch.multinomial` with one sample is the
        argmax of probabilities over exponential noise.

        Args:
            logits (`torch.Tensor` of shape `(nodes, vocab)`): The target's raw logits after each node.
            depths (`torch.Tensor` of shape `(nodes,)`): Depth of each node.
        """
        raw, scores = self._processed(self.input_ids, logits)
        states: list[Tensor] = []
        if self._do_sample:
            assert isinstance(self.draws, GeneratorDraws)  # `can_choose_ahead` says so
            chosen, states = self.draws.categorical_by_depth(torch.softmax(scores, dim=-1), depths)
        else:
            chosen = scores.argmax(dim=-1)
        tokens = chosen.tolist()  # waits for the device once
        num_committed = 0

        def commit(node: int) -> int:
            nonlocal num_committed
            if states:
                self.draws.set_state(states[num_committed], scores.device)
            num_committed += 1
            self.append(chosen[node : node + 1], raw[node : node + 1], scores[node : node + 1])
            return tokens[node]

        return commit

    def probs_after(self, drafted: tuple[int, ...], logits: Tensor) -> Tensor:
        """The distribution `[vocab]` after the text and `drafted` tokens; commits nothing, but calls the processors."""
        ids = torch.cat(
            [self.input_ids, torch.tensor([drafted], dtype=torch.long, device=self.input_ids.device)], dim=-1
        )
        self._foreseen[drafted] = self._processed(ids, logits)
        return torch.softmax(self._foreseen[drafted][1], dim=-1)[0]

    def commit_foreseen(self, token_ids: tuple[int, ...], is_closed: Callable[[], bool]) -> int:
        """Append tokens for whose places `probs_after` was asked; returns how many there were until the text was closed."""
        foreseen, self._foreseen = self._foreseen, {}
        for place, token in enumerate(token_ids):
            self.append(torch.tensor([token], device=self.input_ids.device), *foreseen[token_ids[:place]])
            if is_closed():
                return place + 1
        return len(token_ids)

    def follow(self, token_ids: Sequence[int], logits: Sequence[Tensor]) -> None:
        """Append tokens that another process chose; `logits` are the raw ones `[1, vocab]` before each."""
        self.step_scores = []
        for token, said in zip(token_ids, logits, strict=True):
            raw, scores = self._processed(self.input_ids, said)
            self.append(torch.tensor([token], device=self.input_ids.device), raw, scores)

    def append(self, token: Tensor, raw: Tensor, scores: Tensor) -> None:
        """Append a token `[1]` that was chosen by `scores`, all of `[1, vocab]`, made of the `raw` logits."""
        if self.logits is not None:
            self.logits += (raw,)
        if self.scores is not None:
            self.scores += (scores,)
        self.step_scores.append(scores)
        self.input_ids = torch.cat([self.input_ids, token[:, None]], dim=-1)
        self._announce()
        self.is_complete = bool(answers(self._criteria, self.input_ids, self.scores)) or self.is_complete

    def _processed(self, ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        raw = logits.to(dtype=torch.float32, copy=True, device=ids.device)
        kept = raw if self.logits is None else raw.clone()  # processors may write in place
        return kept, processed(self._processors, ids, raw, self._do_sample)


def processed(processors: LogitsProcessorList, ids: Tensor, raw: Tensor, do_sample: bool) -> Tensor:
    """Processed scores `[rows, vocab]` of the tokens after `ids`, of `raw` logits, into which processors may write.

    Raises:
        [`GenerationError`]: processors return something else, or nothing can be drawn.
    """
    scores: Tensor = processors(ids, raw)  # type: ignore[arg-type]  # `LongTensor` there means any ids
    if scores.shape != raw.shape:
        raise GenerationError(
            f"Logits processors must return scores of shape {tuple(raw.shape)}, but one returned {tuple(scores.shape)}. "
            "Each must give back one score for each token of the vocabulary."
        )
    if do_sample and not scores.amax().isfinite():  # plain sampling fails there, too
        raise GenerationError(
            f"Sampling needs a finite best score, but after the logits processors it is {float(scores.amax())}. Look for a "
            "processor that divides by zero or forbids every token, or a target whose own logits overflow."
        )
    return scores


def answers(criteria: StoppingCriteriaList, ids: Tensor, scores: tuple[Tensor, ...] | None) -> Tensor:
    """Which of the rows `ids` `[rows, tokens]` any of the criteria ends, `[rows]`; what says one thing says it of all rows.

    Raises:
        [`GenerationError`]: one answers for other rows than these.
    """
    is_done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for criterion in criteria:
        answer = torch.as_tensor(criterion(ids, scores), dtype=torch.bool, device=ids.device)
        if answer.shape not in ((), (1,), (len(ids),)):
            raise GenerationError(
                f"A stopping criterion must give one answer for each of the {len(ids)} rows that it is shown, but "
                f"`{type(criterion).__qualname__}` gave answers of shape {tuple(answer.shape)}. Let it return a tensor of shape "
                f"`(len(input_ids),)`."
            )
        is_done = is_done | answer
    return is_done


def _if(config: GenerationConfig, name: str) -> tuple[Tensor, ...] | None:
    """An empty tuple where an output is asked for."""
    return () if config.return_dict_in_generate and getattr(config, name) else None
