"""Drafters of all kinds that draft in fixed shapes, and a text that is committed to a generator and to its twin."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.drafters.dflash.makers import make_dflash_drafter
from tests.drafters.eagle.kinds import KINDS as EAGLES
from tests.drafters.eagle.kinds import make_eagle, make_eagle_target
from tests.drafters.easyspec.kinds import make_drafter as make_layer_parallel
from tests.drafters.easyspec.twin import IN_ORDER
from tests.drafters.medusa.makers import make_medusa
from tests.drafters.texts import Text, merged, paths
from tests.drafters.trees import random_tree
from tests.tiny import VOCAB_SIZE, make_drafter
from transformers_falcon_spec import Draft, SpeculationConfig
from transformers_falcon_spec.generation.drafting import Committed, DraftBudget, Kept
from transformers_falcon_spec.generation.target import Target

MOST_KEPT = 7

FALCONS: dict[str, dict[str, Any]] = {
    "of the paper": {"block_position_embedding": False},
    "two layers": {"num_hidden_layers": 2},
    "of tokens": {"recurrence": "token"},
    "two LSTMs and a shortcut": {"num_recurrent_layers": 2, "shortcut": True},
    "with a transition": {"transition_rank": 5},
    "with a transition from two tokens": {
        "transition_rank": 5,
        "transition_size": 6,
        "transition_tokens": 2,
        "recurrence": "token",
    },
    "with the newest row": {"norm_inputs": True, "shortcut": True, "newest_row": True, "recurrence": "token"},
    "fewer tokens": {"transition_rank": 16, "transition_size": 16, "draft_vocab_size": 40, "recurrence": "token"},
    "calibrated": {},
}
LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "a small language model": {"layer_groups": [[layer] for layer in range(7)]},
    "layers fused": {},
    "layers in order": {"backend": IN_ORDER},
    "layers with windows": {"kind": "qwen2"},
    "layers with windows in order": {"kind": "qwen2", "backend": IN_ORDER},
    "layers of GPT-NeoX": {"kind": "gpt_neox"},
    "fewer tokens": {"draft_vocab_size": 90},
}
DFLASHES: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash with a window": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "dflash of earlier tokens": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "causal_layer_types": ["sliding_attention"],
    },
    "dflash of the second version": {
        "conv_kernel_size": 2,
        "conv_group_size": 4,
        "selector_rank": 8,
        "selector_top_k": 12,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 9.0,
    },
}
GROWN = {"dynamic_tree": True, "tree_depth": 5, "num_tree_nodes": 12}


def falcon(target: Any, kind: str, block_size: int, is_grown: bool) -> Any:
    """A Falcon drafter whose weights all matter."""
    options: dict[str, Any] = {} if is_grown else {"draft_tree": _tree(2 * block_size + 1)}
    if kind == "calibrated":
        temperatures = {"greedy": [0.5, 0.7, 0.9][:block_size], "sampled": [0.2] * block_size}
        options["confidence_temperatures"] = temperatures
    drafter = make_drafter(target, block_size=block_size, **FALCONS[kind], **options)
    if drafter.draft_token_ids is not None:
        drafter.set_draft_vocabulary(range(1, 81, 2))
    generator = torch.Generator().manual_seed(2)
    for weight in drafter.recurrence.parameters():
        weight.normal_(std=0.25, generator=generator)
    if drafter.config.transition_rank is not None:
        drafter.transition.after.weight.normal_(std=3.0, generator=generator)
    drafter.generation_config = SpeculationConfig(**(GROWN if is_grown else {}))
    return drafter


def eagle(target: Any, kind: str, is_grown: bool) -> Any:
    options = GROWN if is_grown else {"dynamic_tree": False, "draft_tree": _tree(4)}
    return make_eagle(target, kind, **options)


def layer_parallel(target: Any, kind: str, is_grown: bool) -> Any:
    options = GROWN if is_grown else {"dynamic_tree": False, "draft_tree": _tree(4)}
    return make_layer_parallel(target, **LANGUAGE_MODELS[kind], **options)


def dflash(target: Any, kind: str, is_grown: bool) -> Any:
    options = (
        {"tree_depth": None, "dynamic_tree": True, "num_tree_nodes": 12} if is_grown else {"draft_tree": _tree(3)}
    )
    return make_dflash_drafter(target, options, **DFLASHES[kind])


def _tree(depth: int) -> dict[str, list[int]]:
    parents, ranks = random_tree(depth, 9 + 2 * depth, seed=depth)
    return {"parents": parents, "ranks": ranks}


def every_drafter() -> dict[str, Callable[[Any], Any]]:
    """By name what makes a drafter for a target."""
    made: dict[str, Callable[[Any], Any]] = {"medusa": lambda target: make_medusa(target, draft_tree=_tree(4))}
    for is_grown in (False, True):
        shape = "grown" if is_grown else "static"
        for kind in EAGLES:
            made[f"{kind}, {shape}"] = lambda target, kind=kind, is_grown=is_grown: eagle(target, kind, is_grown)
        for kind in DFLASHES:
            made[f"{kind}, {shape}"] = lambda target, kind=kind, is_grown=is_grown: dflash(target, kind, is_grown)
        for kind in LANGUAGE_MODELS:
            made[f"{kind}, {shape}"] = lambda target, kind=kind, is_grown=is_grown: layer_parallel(
                target, kind, is_grown
            )
        for kind in FALCONS:
            for size in (1, 2, 3):
                if kind == "calibrated" and not is_grown:
                    continue
                made[f"falcon-{size} {kind}, {shape}"] = lambda target, kind=kind, size=size, is_grown=is_grown: (
                    falcon(target, kind, size, is_grown)
                )
    return made


DRAFTERS = every_drafter()


class Twins:
    """A generator as ever, and one in fixed shapes, of the same drafter, over the same texts."""

    def __init__(
        self,
        name: str,
        num_rows: int,
        seed: int = 0,
        buffers: Any = None,
        pair: Any = None,
        num_slots: int = 256,
        most_first: int = 20,
    ) -> None:
        self.model, self.drafter = pair or make_pair(name)
        self.target = Target(self.model, self.drafter.feature_layers)
        self.texts = [Text(seed + row, self.target.feature_dim) for row in range(num_rows)]
        self.rng = random.Random(seed)
        self.noise = torch.ones(num_rows, 12, VOCAB_SIZE)  # of this step, where it was drawn
        self._drawn: dict[tuple[int, int], torch.Tensor] = {}
        self._kept: Any = None  # what steps keep, always in the same place
        self.plain, self.fixed = (self._generator() for _ in range(2))
        self.give([self.rng.randint(4, most_first) for _ in self.texts])
        self.buffers = self.fixed.enter_fixed(num_slots, MOST_KEPT, buffers)

    def _generator(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        return self.drafter.candidate_generator(self.target, 1000, generator)

    def give(self, num_new: Sequence[int], is_kept: bool = False, num_ended: int = 0) -> None:
        """Commit so many pairs of each text to both; on the device a text that gets none may have `num_ended` more."""
        committed = merged([text.more(num) for text, num in zip(self.texts, num_new, strict=True)])
        self.plain.commit(committed)
        if is_kept:
            kept = as_kept(committed)
            self._kept = self._kept or as_kept(committed)
            for place, new in ((self._kept.token_ids, kept.token_ids), (self._kept.num, kept.num)):
                place.copy_(new)
            self._kept.features.copy_(kept.features)
            self._kept.num[self._kept.num == 0] = num_ended
            self.fixed.commit_kept(replace(self._kept, num_new=kept.num_new, new_ids=kept.new_ids))
        else:
            self.fixed.commit(committed)
        self._drawn = {}

    def noise_ahead(self, row: int, depth: int) -> torch.Tensor:
        """Noise in buffers that stay where they are, drawn when it is first asked for."""
        if (row, depth) not in self._drawn:
            generator = torch.Generator().manual_seed(self.texts[row].num_pairs + 1000 * depth)
            drawn = torch.empty(VOCAB_SIZE).exponential_(generator=generator)
            self._drawn[row, depth] = self.noise[row, depth].copy_(drawn)
        return self._drawn[row, depth]

    def drafts(self, depths: Sequence[int], temperature: float | None = None, **limits: Any) -> tuple[Any, Any]:
        """What both draft."""
        noise = None if temperature is None else self.noise_ahead
        limits = {"num_nodes": 512, **limits}
        budget = DraftBudget(tuple(depths), temperature=temperature, noise=noise, **limits)
        assert self.fixed.why_not_fixed(budget) is None
        drafts = self.fixed.propose(budget), self.plain.propose(budget)
        return drafts[1], drafts[0]


def make_pair(name: str) -> tuple[Any, Any]:
    """A target in double precision, and a drafter for it."""
    target = make_eagle_target().requires_grad_(False)
    return target, DRAFTERS[name](target)


def as_kept(committed: Committed) -> Kept:
    """The same in fixed shapes, filled up with what must never be read."""
    num_new = committed.num_new
    token_ids = torch.full((len(num_new), MOST_KEPT), 1)
    features = torch.full((len(num_new), MOST_KEPT, committed.features.shape[-1]), 1e3, dtype=torch.double)
    for row, (length, num) in enumerate(zip(committed.lengths, num_new, strict=True)):
        token_ids[row, :num] = committed.sequence_ids[row, length - num : length]
        features[row, :num] = committed.features[row, :num]
    rows = zip(token_ids.tolist(), num_new, strict=True)
    return Kept(
        token_ids, features, torch.tensor(num_new)[:, None], num_new, tuple(tuple(ids[:num]) for ids, num in rows)
    )


def assert_same(plain: Draft, fixed: Draft, num_rows: int) -> None:
    for row in range(num_rows):
        assert paths(fixed, row) == paths(plain, row)
        assert fixed.token_ids[row, 0] == plain.token_ids[row, 0]


def to_meta(*holders: Any) -> None:
    """Move tensors that are attributes, and those that layers hold by name, to the device on which each question to the host is an error."""
    for holder in holders:
        for name, value in list(vars(holder).items()):
            if isinstance(value, torch.Tensor):
                setattr(holder, name, value.to("meta"))
            elif name in {"held", "seen"}:
                setattr(holder, name, {kind: states.to("meta") for kind, states in value.items()})
