"""Runs of a target: with and without a drafter from the same seed, and one forward at a time."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from tests.doubles import InformedDrafter
from tests.tiny import make_prompt
from transformers_falcon_spec import DraftTree, GenerationStats, SpeculationConfig
from transformers_falcon_spec.generation.stock_cache import new_cache
from transformers_falcon_spec.generation.target import Target
from transformers_falcon_spec.transformers_versions import CACHE

BUSHY = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 10, 11]  # 12 drafted nodes, depth 7, with siblings and a deep branch
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3}


@dataclass(frozen=True)
class Pair:
    """The outcomes of the same call without and with a drafter, and the random states after them."""

    plain: Any
    drafted: Any
    plain_state: Tensor
    drafted_state: Tensor

    @property
    def stats(self) -> GenerationStats:
        """What speculation did."""
        return self.drafted.speculation

    def assert_equal(self, is_kept: bool = True) -> None:
        """The same text, and the random stream in the same state; and something of the drafts was kept."""
        assert self.drafted.sequences.tolist() == self.plain.sequences.tolist()
        assert self.drafted_state.equal(self.plain_state)
        assert not is_kept or self.stats.acceptance_length > 1


def plain(target: PreTrainedModel, prompt: Tensor | None = None, seed: int = 0, **options: Any) -> Any:
    """What `target` writes alone; 24 tokens by default."""
    torch.manual_seed(seed)
    return seedless(target, options.pop("assistant_model", None), prompt, **options)


def seedless(target: PreTrainedModel, drafter: Any, prompt: Tensor | None = None, **options: Any) -> Any:
    """What `target` writes with a drafter, from wherever the random stream is."""
    options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, **options}
    return target.generate(make_prompt() if prompt is None else prompt, assistant_model=drafter, **options)


def drafted(target: PreTrainedModel, drafter: Any, prompt: Tensor | None = None, **options: Any) -> Any:
    """The same with a drafter."""
    return plain(target, prompt, assistant_model=drafter, **options)


def both(target: PreTrainedModel, drafter: Any, prompt: Tensor | None = None, **options: Any) -> Pair:
    """The same call without and with `drafter`, from the same seed."""
    without = plain(target, prompt, **options)
    state = torch.get_rng_state()
    return Pair(without, drafted(target, drafter, prompt, **options), state, torch.get_rng_state())


def informed(target: PreTrainedModel, drafter: Any, prompt: Tensor | None = None, **options: Any) -> Pair:
    """The same with a drafter that knows most of the coming text, as an untrained one keeps next to nothing."""
    without = plain(target, prompt, **options)
    state, mask = torch.get_rng_state(), options.get("attention_mask")
    knowing = InformedDrafter(drafter, without.sequences, mask=mask)
    return Pair(without, drafted(target, knowing, prompt, **options), state, torch.get_rng_state())


def assert_texts_of_every_shape(target: PreTrainedModel, drafter: Any, tree: dict[str, Any], **options: Any) -> None:
    """With a tree that grows, a chain and this static tree the text is the target's own, and drafts are kept."""
    for shape in ({}, {"dynamic_tree": False}, {"draft_tree": tree}):
        drafter.generation_config = SpeculationConfig(**shape)
        pair = informed(target, drafter, **options)
        alone = both(target, drafter, **options)
        pair.assert_equal()
        alone.assert_equal(is_kept=False)
        assert alone.stats.num_drafted > alone.stats.num_steps


def traces(target: PreTrainedModel, cache: Any = None) -> dict[str, Any]:
    """What a call could leave behind on a target and on a cache of the user's."""
    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in target.modules()]
    return {
        "hooks": sum(hooks),
        "attention": target.config._attn_implementation,
        "is_training": target.training,
        "recording": [getattr(layer, "record_past", False) for layer in cache.layers] if cache else None,
        "windows": [getattr(layer, "sliding_window", None) for layer in cache.layers] if cache else None,
    }


@torch.no_grad()
def prefilled(model: PreTrainedModel, prompt: Tensor, mask: Tensor | None = None) -> Target:
    """A `Target` that has read `prompt` as `generate` would have it; features are not caught."""
    target = Target(model, ())
    mask = torch.ones_like(prompt) if mask is None else mask
    kwargs = {CACHE: new_cache(model.config), "use_cache": True, "attention_mask": mask}
    if "position_ids" in inspect.signature(model.forward).parameters:
        kwargs["position_ids"] = model._prepare_position_ids_for_generation(prompt, kwargs)
    target.prefill(prompt, GenerationConfig(max_length=prompt.shape[1]), kwargs)
    return target


@torch.no_grad()
def tree_logits(target: Target, token_ids: list[int], parents: list[int]) -> Tensor:
    """Logits `[nodes, vocab]` of a tree read in one forward; its slots stay in the cache."""
    return target.read(torch.tensor([token_ids]), DraftTree.from_lists(parents)).logits[0]
