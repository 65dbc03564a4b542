"""The text being written: one token at a time through processors, choice, streamer and stopping criteria."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..core.sampling import Draws, choose

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
        self._processors, self._criteria, self._draws, self._streamer = processors, criteria, draws, streamer
        self._do_sample = bool(config.do_sample)

    def commit_token(self, logits: Tensor) -> int:
        """Choose the token that follows the text, given the target's raw logits `[1, vocab]`, and append it."""
        raw = logits.to(dtype=torch.float32, copy=True, device=self.input_ids.device)
        if self.logits is not None:
            self.logits += (raw.clone(),)
        scores = self._processors(self.input_ids, raw)  # type: ignore[arg-type]  # `LongTensor` there means any ids
        if self.scores is not None:
            self.scores += (scores,)
        token = choose(scores, self._do_sample, self._draws)
        self.input_ids = torch.cat([self.input_ids, token[:, None]], dim=-1)
        if self._streamer is not None:
            self._streamer.put(token.cpu())
        self.is_complete = bool(self._criteria(self.input_ids, self.scores).all())
        return int(token)

    def end(self) -> None:
        """No more tokens come."""
        if self._streamer is not None:
            self._streamer.end()


def _if(config: GenerationConfig, name: str) -> tuple[Any, ...] | None:
    """An empty tuple where an output is asked for."""
    return () if config.return_dict_in_generate and getattr(config, name) else None
