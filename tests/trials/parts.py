"""The models of a trial: targets of every family, kept for the next call, and drafters of every kind, made anew for each."""

from collections.abc import Callable
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from tests import runs
from tests.doubles import RandomDrafter
from tests.drafters.diffuspec.stand_ins import make_diffusion
from tests.drafters.eagle.kinds import make_eagle
from tests.drafters.easyspec.kinds import make_drafter as make_easyspec
from tests.drafters.medusa.makers import make_medusa
from tests.families import DRAFTED, VOCAB_SIZE
from tests.thresholds import thresholds
from tests.tiny import make_drafter, make_target
from tests.trials.call import Call
from tests.trials.changes import OFFLOADS
from transformers_falcon_spec import DraftTree, LookaheadDrafter, SpeculationConfig

VERIFIED = tuple(family for family in DRAFTED if family != "qwen4_exp")  # whose inner hidden states are wider
_BUSHY = DraftTree.from_lists(runs.BUSHY)
DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "random": lambda _: RandomDrafter(num_nodes=12),
    "random that reads features": lambda _: RandomDrafter(num_nodes=9, feature_layers=(0, 1, -1)),
    "random with lookahead nodes": lambda _: RandomDrafter(num_nodes=14, num_lookahead=4, proposals=0.8),
    "random that asks for choices": lambda _: RandomDrafter(num_nodes=6, wants_node_choices=True),
    "falcon": lambda target: make_drafter(target, block_size=2, draft_tree=_BUSHY.to_json()),
    "falcon of three": lambda target: make_drafter(
        target, block_size=3, recurrence="token", num_hidden_layers=2, draft_tree=_BUSHY.to_json()
    ),
    "falcon of one": lambda target: make_drafter(target, block_size=1, draft_tree=_BUSHY.to_json()),
    "falcon of inner layers": lambda target: make_drafter(
        target, block_size=4, feature_layers=[1, -1], draft_tree=_BUSHY.pruned(4, num_nodes=12).to_json()
    ),
    "eagle-1": lambda target: make_eagle(target, "eagle-1"),
    "eagle-1 with biases": lambda target: make_eagle(target, "eagle-1 with biases"),
    "eagle-3": lambda target: make_eagle(target, "eagle-3"),
    "eagle-3.1": lambda target: make_eagle(target, "eagle-3.1"),
    "speculators": lambda target: make_eagle(target, "speculators"),
    "medusa": lambda target: make_medusa(target, num_heads=3),
    "lookahead": lambda target: LookaheadDrafter.from_target(target, window_size=4, ngram_len=4, num_guesses=4),
    "easyspec": lambda target: make_easyspec(target, changes={"attention_dropout": 0.3}),
    "easyspec of qwen3": lambda target: make_easyspec(target, "qwen3"),
    "diffuspec": make_diffusion,
    "diffuspec of trees": lambda target: make_diffusion(target, search="tree"),
    "diffuspec that sees all": lambda target: make_diffusion(target, attention="full"),
    "diffuspec, adaptive": lambda target: make_diffusion(
        target, draft_length="adaptive", min_draft_tokens=2, growth=3
    ),
    "medusa of two": lambda target: make_medusa(target, num_heads=2),
}
DRAWING = tuple(name for name in DRAFTERS if name.startswith(("falcon", "eagle", "easyspec", "medusa")))
READING_INNER = ("random that reads features", "falcon of inner layers", "eagle-3", "eagle-3.1", "speculators")
GROWING = tuple(name for name in DRAFTERS if name.startswith(("falcon", "eagle", "easyspec")) and "inner" not in name)


def target_of(call: Call) -> Any:
    """The target of a call; the same model again for the next call of its kind, unless something broken may leave marks on it."""
    make = _target if call.fault is None and call.change not in OFFLOADS else _target.__wrapped__
    return make(call.family, call.attention, call.dtype, "tilt" in call.extras, call.threshold, call.threshold_length)


@lru_cache(maxsize=24)
def _target(
    family: str, attention: str, dtype: str, is_tilted: bool, threshold: str | None, threshold_length: int
) -> Any:
    changes = {} if threshold is None else thresholds(family, threshold_length)[threshold]
    target = make_target(family, seed=7, attn_implementation=attention, **changes)
    if target._can_set_experts_implementation():  # grouped products of experts know no double precision
        target.set_experts_implementation("eager")
    if is_tilted:
        target.__class__ = _tilted(type(target))
    return target.to(getattr(torch, dtype))


def _tilted(kind: type) -> type:
    """A target whose `forward` takes an argument of its own, which favours some tokens."""

    def forward(self: Any, *args: Any, tilt: Tensor | None = None, **kwargs: Any) -> Any:
        outputs = kind.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        if tilt is not None:
            ramp = torch.linspace(-4, 4, VOCAB_SIZE, dtype=outputs.logits.dtype)
            outputs.logits = favoured(outputs.logits, tilt.to(ramp), ramp)
        return outputs

    forward.__signature__ = _with_tilt(kind.forward)  # type: ignore[attr-defined]
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def favoured(logits: Tensor, tilt: Tensor, ramp: Tensor) -> Tensor:
    """Logits `[rows, tokens, vocab]` with `ramp` added, as much of it as `tilt` `[rows, 1]` says."""
    return logits + tilt[..., None] * ramp


def _with_tilt(forward: Any) -> Any:
    """The signature of `forward` with the argument, which `generate` looks for."""
    found = signature(forward)
    given = [each for each in found.parameters.values() if each.kind != Parameter.VAR_KEYWORD]
    rest = [each for each in found.parameters.values() if each.kind == Parameter.VAR_KEYWORD]
    return found.replace(parameters=[*given, Parameter("tilt", Parameter.KEYWORD_ONLY, default=None), *rest])


def drafter_of(call: Call, target: Any) -> Any:
    """A fresh drafter for a call, with the call's options."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(call.seed)
        drafter = DRAFTERS[call.drafter](target)
    if isinstance(drafter, torch.nn.Module):
        drafter = drafter.to(target.dtype).train(call.is_training)
    drafter.generation_config = SpeculationConfig(**{"tune": call.is_tuned, **call.speculation})
    return drafter
