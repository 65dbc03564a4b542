"""The text being written: one token at a time through processors, choice, streamer and stopping criteria."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..core.sampling import Draws, choose
from ..errors import GenerationError

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


class Transcript:
    """Commits tokens in the order, and with the calls, of decoding without a drafter.

    Args:
        input_ids (`torch.Tensor` of shape `(1, prompt)`): The prompt.
        processors ([`~transformers.LogitsProcessorList`]): Called once for each committed token.
        criteria ([`~transformers.StoppingCriteriaList`]): Likewise.
        config ([`~transformers.GenerationConfig`]): `do_sample` and which outputs to keep.
        draws ([`Draws`]): Where samples come from.
        streamer (`BaseStreamer`, *optional*): Gets each token as it is committed.
    """

    def __init__(
        self,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        draws: Draws,
        streamer: "BaseStreamer | None" = None,
    ) -> None:
        self.input_ids = input_ids
        self.prompt_len = input_ids.shape[1]
        self.is_complete = False
        self.scores: tuple[Any, ...] | None = _if(config, "output_scores")
        self.logits: tuple[Any, ...] | None = _if(config, "output_logits")
        self.draws = draws
        self._processors, self._criteria, self._streamer = processors, criteria, streamer
        self._do_sample = bool(config.do_sample)
        self._foreseen: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # raw logits and scores after drafted tokens

    def commit_token(self, logits: Tensor) -> int:
        """Choose the token that follows the text, given the target's raw logits `[1, vocab]`, and append it."""
        raw, scores = self._processed(self.input_ids, logits)
        token = choose(scores, self._do_sample, self.draws)
        self._append(token, raw, scores)
        return int(token)

    def probs_after(self, drafted: tuple[int, ...], logits: Tensor) -> Tensor:
        """The distribution `[vocab]` after the text and `drafted` tokens; commits nothing, but calls the processors."""
        ids = torch.cat(
            [self.input_ids, torch.tensor([drafted], dtype=torch.long, device=self.input_ids.device)], dim=-1
        )
        self._foreseen[drafted] = self._processed(ids, logits)
        return torch.softmax(self._foreseen[drafted][1], dim=-1)[0]

    def commit_foreseen(self, token_ids: tuple[int, ...]) -> int:
        """Append tokens for whose places `probs_after` was asked; returns how many there were until the text was complete."""
        foreseen, self._foreseen = self._foreseen, {}
        for place, token in enumerate(token_ids):
            self._append(torch.tensor([token], device=self.input_ids.device), *foreseen[token_ids[:place]])
            if self.is_complete:
                return place + 1
        return len(token_ids)

    def _processed(self, ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Raw logits in float32 and processed scores, both `[1, vocab]`, of the token after `ids`."""
        raw = logits.to(dtype=torch.float32, copy=True, device=ids.device)
        kept = raw if self.logits is None else raw.clone()  # processors may write in place
        scores = self._processors(ids, raw)  # type: ignore[arg-type]  # `LongTensor` there means any ids
        if scores.shape != kept.shape:
            raise GenerationError(
                f"Logits processors must return scores of shape {tuple(kept.shape)}, but one returned {tuple(scores.shape)}. "
                "Each must give back one score for each token of the vocabulary."
            )
        if (
            self._do_sample and not scores.amax().isfinite()
        ):  # plain decoding fails there, too; greedy takes what is best
            raise GenerationError(
                f"Sampling needs a finite best score, but after the logits processors it is {float(scores.amax())}. Look for a "
                "processor that divides by zero or forbids every token, or a target whose own logits overflow."
            )
        return kept, scores

    def _append(self, token: Tensor, raw: Tensor, scores: Tensor) -> None:
        if self.logits is not None:
            self.logits += (raw,)
        if self.scores is not None:
            self.scores += (scores,)
        self.input_ids = torch.cat([self.input_ids, token[:, None]], dim=-1)
        if self._streamer is not None:
            self._streamer.put(token.cpu())
        self.is_complete = bool(self._criteria(self.input_ids, self.scores).all())

    def end(self) -> None:
        """No more tokens come."""
        if self._streamer is not None:
            self._streamer.end()


def _if(config: GenerationConfig, name: str) -> tuple[Any, ...] | None:
    """An empty tuple where an output is asked for."""
    return () if config.return_dict_in_generate and getattr(config, name) else None
