"""Replays of a single step: what a text was chosen from there, and what plain decoding chooses from other logits.

A replay makes the very call that was compared, seed and length limit included, and only stops after the step.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ..core.sampling import GeneratorDraws, multinomial_noise
from ..generation.timed import Options, Run, timed_generate


@dataclass(frozen=True)
class GenerateCall:
    """A call of `generate`, but for the drafter."""

    target: PreTrainedModel
    input_ids: Tensor
    max_new_tokens: int
    options: Options
    seed: int

    def run(self, drafter: nn.Module | None, **arguments: Any) -> Run:
        """Make the call, with a drafter or without."""
        return timed_generate(
            self.target, self.input_ids, self.max_new_tokens, self.options, self.seed, drafter, **arguments
        )


@dataclass(frozen=True)
class ReplayedStep:
    """The step that chose one token: the text so far and the numbers that decided."""

    new_ids: list[int]  # the chosen token last
    logits: Tensor  # [vocab] the target's own, in float32
    scores: Tensor  # [vocab] the same after the logits processors
    noise: Tensor | None = None  # [vocab] of the draw, ones if greedy; None with a drafter or if it cannot be rebuilt

    @property
    def token_id(self) -> int:
        """The chosen token."""
        return self.new_ids[-1]

    @property
    def gap(self) -> float | None:
        """The gap between the best two tokens in what decides: the scores, less the log of the draw's noise."""
        if self.noise is None:
            return None
        best = (self.scores.double() - self.noise.double().log()).topk(2).values
        return float(best[0] - best[1])


class _StopAfter(StoppingCriteria):
    """Ends a text at a length that the drafter does not know, since its trees depend on the length limit."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, _scores: Any, **_: Any) -> Tensor:
        return torch.full(input_ids.shape[:1], input_ids.shape[1] >= self.length, device=input_ids.device)


class _StepObserver(LogitsProcessor):
    """Keeps the random state of step `index` of plain decoding, and replaces its logits by `given`, if they are."""

    def __init__(self, index: int, given: Tensor | None) -> None:
        self.index, self.given = index, given
        self.state: Tensor | None = None
        self._num_chosen = 0

    def __call__(self, _input_ids: Tensor, scores: Tensor) -> Tensor:
        self._num_chosen += 1
        return scores

    def hook(self, _module: nn.Module, _args: Any, outputs: Any) -> Any:
        """The forward hook of the target."""
        if self._num_chosen == self.index:
            if self.given is not None:
                outputs.logits = self.given[None, None]
            self.state = GeneratorDraws().get_state(outputs.logits.device)
        return outputs


def replay_plain(call: GenerateCall, index: int, given: Tensor | None = None) -> ReplayedStep | None:
    """The target's own step that chooses new token `index`, from the logits `given` or its own; None past the end."""
    observer = _StepObserver(index, given)
    handle = call.target.register_forward_hook(observer.hook)
    try:
        run = _run_until(call, index, None, logits_processor=LogitsProcessorList([observer]))
    finally:
        handle.remove()
    step = _step_of(run, index)
    if step is None or observer.state is None:
        return None
    is_drawn = call.options.get("do_sample", call.target.generation_config.do_sample)
    noise = _noise(step.scores, observer.state, step.token_id) if is_drawn else torch.ones_like(step.scores)
    return replace(step, noise=noise)


def replay_drafted(call: GenerateCall, index: int, drafter: nn.Module) -> ReplayedStep | None:
    """The step with a drafter that chooses new token `index`; None if the text ends before."""
    return _step_of(_run_until(call, index, drafter), index)


def _step_of(run: Run, index: int) -> ReplayedStep | None:
    if len(run.new_ids) <= index:
        return None
    return ReplayedStep(run.new_ids[: index + 1], run.output.logits[index][0], run.output.scores[index][0])


def _run_until(call: GenerateCall, index: int, drafter: nn.Module | None, **arguments: Any) -> Run:
    criteria = StoppingCriteriaList([_StopAfter(call.input_ids.shape[1] + index + 1)])
    return call.run(drafter, **arguments, stopping_criteria=criteria, output_logits=True, output_scores=True)


def _noise(scores: Tensor, state: Tensor, token_id: int) -> Tensor | None:
    """The noise of a draw from the random stream in `state`; None if that draw does not give the token."""
    generator = torch.Generator(scores.device)
    generator.set_state(state)
    probs = torch.softmax(scores[None], dim=-1)
    noise = multinomial_noise(probs, generator)
    return noise[0] if int((probs / noise).argmax()) == token_id else None
