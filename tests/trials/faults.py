"""Faults that are put in on purpose, each of a kind that the trials must find: the trials are tried by them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from transformers_falcon_spec import GenerationError
from transformers_falcon_spec.core.tree import DraftTree
from transformers_falcon_spec.generation.loop import SpeculativeDecoding
from transformers_falcon_spec.generation.sequence_batch import SequenceBatch, answers
from transformers_falcon_spec.generation.target import Target

Broken = Callable[[], Any]


@dataclass(frozen=True)
class Fault:
    """One row of the table.

    Args:
        broken (`Callable`): A context in which it is there.
        sign (`str`): Words of the difference that shows it.
    """

    broken: Broken
    sign: str


_SLOT_MASK = Target._slot_mask


def _shifted_mask(target: Target, text: Any, tree: DraftTree, kind: Any) -> Tensor:
    """Every node sees the ancestors of the node before it."""
    odd = DraftTree(tree.parents, tree.ranks)
    own = torch.eye(len(tree), dtype=torch.bool)
    vars(odd).update(depths=tree.depths, ancestor_mask=tree.ancestor_mask.roll(1, -2) | own)
    return _SLOT_MASK(target, text, odd, kind)


def _favoured_alone(logits: Tensor, tilt: Tensor, ramp: Tensor) -> Tensor:
    """The model's own argument is lost wherever several tokens are read."""
    return logits if logits.shape[1] > 1 else logits + tilt[..., None] * ramp


def _in_loop(name: str, act: Callable[[Any], None], *, is_before: bool = False, to_output: bool = False) -> Broken:
    """One function of the loop, with something done before or after it, to the loop or to what the function gives."""
    original = getattr(SpeculativeDecoding, name)

    def changed(self: Any, *args: Any) -> Any:
        if is_before:
            act(self)
            return original(self, *args)
        found = original(self, *args)
        act(found if to_output else self)
        return found

    return lambda: patch.object(SpeculativeDecoding, name, changed)


def _asked_twice(*texts: Any) -> Tensor:
    """The criteria are shown everything a second time."""
    answers(*texts)
    return answers(*texts)


def _raise(error: Exception) -> Callable[[Any], None]:
    def act(_: Any) -> None:
        raise error

    return act


def _louder(output: Any) -> None:
    output.scores = (*output.scores[:-1], output.scores[-1] * 1.5 + 1)


def _shorter(output: Any) -> None:
    output.hidden_states = output.hidden_states[:-1]


FAULTS = {
    "mask": Fault(lambda: patch.object(Target, "_slot_mask", _shifted_mask), "the text of row"),
    "argument": Fault(lambda: patch("tests.trials.parts.favoured", _favoured_alone), "the text of row"),
    "draw": Fault(_in_loop("propose", lambda _: torch.rand(1), is_before=True), "random state"),
    "cache": Fault(_in_loop("run", lambda loop: loop.target.cache.crop(-1)), "slots, not"),
    "hook": Fault(
        _in_loop("run", lambda loop: loop.target.model.register_forward_hook(lambda *_: None)),
        "target's hooks changed",
    ),
    "train mode": Fault(_in_loop("run", lambda loop: loop.target.model.train()), "target's training flags changed"),
    "streamer": Fault(lambda: patch.object(SequenceBatch, "end", lambda _: None), "the streamer got"),
    "criteria": Fault(
        lambda: patch("transformers_falcon_spec.generation.sequence_batch.answers", _asked_twice), "the criterion saw"
    ),
    "scores": Fault(_in_loop("run", _louder, to_output=True), "`scores` of row"),
    "states": Fault(_in_loop("run", _shorter, to_output=True), "`hidden_states`"),
    "crash": Fault(_in_loop("run", _raise(KeyError("x")), is_before=True), "an error came of it"),
    "refusal": Fault(_in_loop("run", _raise(GenerationError("no")), is_before=True), "an error came of it"),
}
