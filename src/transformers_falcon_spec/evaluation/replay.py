"""One step of a text again: what an arm saw there, and what plain decoding makes of other logits.

A replay makes the very call that was compared, seed and length limit included, and only stops after the step.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ..core.sampling import multinomial_noise
from ..generation.timed import Options, Run, timed_generate


@dataclass(frozen=True)
class Text:
    """The arguments of `generate` that both arms, with a drafter and without, have in common."""

    target: PreTrainedModel
    input_ids: Tensor
    max_new_tokens: int
    options: Options
    seed: int

    def write(self, drafter: nn.Module | None, **arguments: Any) -> Run:
        """Write the text, with a drafter or without."""
        return timed_generate(
            self.target, self.input_ids, self.max_new_tokens, self.options, self.seed, drafter, **arguments
        )


@dataclass(frozen=True)
class Step:
    """The logits, scores and random state with which one arm chose one token.

    Args:
        new_ids (`list[int]`): Its new tokens, the chosen one last.
        logits (`torch.Tensor` of shape `(vocab,)`): The target's own, in float32.
        scores (`torch.Tensor` of shape `(vocab,)`): The same after the logits processors.
        noise (`torch.Tensor` of shape `(vocab,)`, *optional*): Of the draw, ones where nothing is drawn; None if the draw
            could not be rebuilt, and with a drafter.
    """

    new_ids: list[int]
    logits: Tensor
    scores: Tensor
    noise: Tensor | None = None

    @property
    def token_id(self) -> int:
        """The chosen token."""
        return self.new_ids[-1]

    @property
    def gap(self) -> float | None:
        """Between the best token and the second best in what decides: the scores, less the log of the draw's noise."""
        if self.noise is None:
            return None
        best = (self.scores.double() - self.noise.double().log()).topk(2).values
        return float(best[0] - best[1])


class _StopAfter(StoppingCriteria):
    """Ends a text after a number of tokens without telling the drafter, whose trees would change with the length limit."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, _scores: Any, **_: Any) -> Tensor:
        """Whether each row is long enough."""
        is_done = input_ids.shape[1] >= self.length
        return torch.full((input_ids.shape[0],), is_done, device=input_ids.device)


class _Watch(LogitsProcessor):
    """Follows plain decoding to one step; keeps the logits and the random state there, or puts other logits in their place."""

    def __init__(self, place: int, given: Tensor | None) -> None:
        self.place, self.given = place, given
        self.logits: Tensor | None = None
        self.state: Tensor | None = None
        self._num_chosen = 0

    def __call__(self, _input_ids: Tensor, scores: Tensor) -> Tensor:
        """Count the tokens; change nothing."""
        self._num_chosen += 1
        return scores

    def hook(self, _module: nn.Module, _args: Any, outputs: Any) -> Any:
        """A forward hook of the target."""
        if self._num_chosen == self.place:
            if self.given is not None:
                outputs.logits = self.given[None, None]
            self.logits = outputs.logits[0, -1].to(torch.float32, copy=True)
            self.state = _stream(outputs.logits.device).get_state()
        return outputs


def replay_plain(text: Text, place: int, given: Tensor | None = None) -> Step | None:
    """The step at `place` of the target alone, None if its text ends before; `given` takes the place of the logits there."""
    watch = _Watch(place, given)
    handle = text.target.register_forward_hook(watch.hook)
    try:
        run = _write_until(text, place, None, logits_processor=LogitsProcessorList([watch]))
    finally:
        handle.remove()
    if len(run.new_ids) <= place or watch.logits is None or watch.state is None:
        return None
    scores = run.output.scores[place][0]
    is_drawn = text.options.get("do_sample", text.target.generation_config.do_sample)
    noise = _noise(scores, watch.state, run.new_ids[place]) if is_drawn else torch.ones_like(scores)
    return Step(run.new_ids[: place + 1], watch.logits, scores, noise)


def replay_drafted(text: Text, place: int, drafter: nn.Module) -> Step | None:
    """The step at `place` with a drafter, None if the text ends before."""
    run = _write_until(text, place, drafter)
    if len(run.new_ids) <= place:
        return None
    return Step(run.new_ids[: place + 1], run.output.logits[place][0], run.output.scores[place][0])


def _write_until(text: Text, place: int, drafter: nn.Module | None, **arguments: Any) -> Run:
    stop = _StopAfter(text.input_ids.shape[1] + place + 1)
    return text.write(
        drafter,
        **arguments,
        stopping_criteria=StoppingCriteriaList([stop]),
        output_logits=True,
        output_scores=True,
    )


def _noise(scores: Tensor, state: Tensor, token_id: int) -> Tensor | None:
    """The noise of a draw made from the random stream in this state, if it does give the token."""
    generator = torch.Generator(scores.device)
    generator.set_state(state)
    probs = torch.softmax(scores[None], dim=-1)
    noise = multinomial_noise(probs, generator)
    return noise[0] if int((probs / noise).argmax()) == token_id else None


def _stream(device: torch.device) -> torch.Generator:
    """The global random stream of a device."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.get_device_module(device).default_generators[device.index or 0]
