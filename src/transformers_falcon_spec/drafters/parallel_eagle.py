"""P-EAGLE: Eagle-3 of several layers that drafts a block of tokens in one pass (arXiv 2602.01469).

The layers read pairs of token embedding and feature, as Eagle-3 does, and behind the newest pair masks, which hold the
embedding of one token and a learnt feature. The newest pair gives the first token of a block, each mask another one.
"""

import torch
from huggingface_hub.dataclasses import strict
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from ..core.options import option
from ..errors import OptionError
from .base import GrowingDrafter
from .eagle import VERSIONS, EagleCandidateGenerator, EagleConfig, EagleDrafter
from .tree_drafting.text import newest_of


@strict
class ParallelEagleConfig(EagleConfig):
    """Configuration of [`ParallelEagleDrafter`]; it has the fields of [`EagleConfig`], of which `version` must be 3.

    Args:
        num_hidden_layers (`int`, *optional*, defaults to 1): Layers; the first is Eagle-3's, the others are Llama's.
        block_size (`int`, *optional*, defaults to 8): Tokens drafted in one pass.
        mask_token_id (`int`, *optional*, defaults to 0): The token whose embedding masks hold.

    Example:

    ```python
    >>> ParallelEagleConfig(hidden_size=64, num_attention_heads=4, feature_layers=[1, 2, 3], block_size=4).block_size
    4

    ```
    """

    model_type = "peagle_spec"

    version: int = option(VERSIONS[1], one_of=VERSIONS[1:])
    num_hidden_layers: int = option(1, least=1)
    block_size: int = option(8, least=2)
    mask_token_id: int = 0

    def check(self) -> None:
        """Refuse options out of range or at odds with one another."""
        super().check()
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise OptionError(
                f"`mask_token_id` must lie in 0..{self.vocab_size - 1}, the target's vocabulary, but it is "
                f"{self.mask_token_id}. Take the target that the drafter was trained for."
            )


class ParallelEagleDrafter(EagleDrafter):
    """Drafts `block_size` tokens in one pass, each without regard to the others; trees take the likeliest of each.

    Nothing here trains it.

    Example:

    ```python
    >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    >>> drafter = ParallelEagleDrafter(ParallelEagleConfig(feature_layers=[1, 2, 3], block_size=4, **sizes))
    >>> drafter.block_size, drafter.tree_depth
    (4, 4)

    ```
    """

    config: ParallelEagleConfig
    config_class = ParallelEagleConfig
    default_depth = GrowingDrafter.default_depth  # a block's
    goes_on = False
    _no_split_modules = ["StateLayer", "LlamaDecoderLayer"]  # noqa: RUF012  Transformers reads a plain list

    def __init__(self, config: ParallelEagleConfig) -> None:
        super().__init__(config)
        numbers = range(1, config.num_hidden_layers)
        self.layers = nn.ModuleDict({str(number): LlamaDecoderLayer(config, number) for number in numbers})
        self.mask_hidden = nn.Parameter(torch.zeros(config.feature_size))
        self.post_init()

    def attend(
        self,
        token_embeds: Float[Tensor, "rows tokens embed"],
        states: Float[Tensor, "rows tokens hidden"],
        mask: Bool[Tensor, "masks tokens keys"],
        positions: Int[Tensor, "_ tokens"],
        cache: Cache | None = None,
    ) -> Float[Tensor, "rows tokens hidden"]:
        """All layers over rows of embedding and state; keys and values go to `cache`, where one is given."""
        states = super().attend(token_embeds, states, mask, positions, cache)
        inputs = self.attention_inputs(states, mask, positions, cache)
        for layer in self.layers.values():
            states = layer(states, **inputs)
        return states


class ParallelEagleCandidateGenerator(EagleCandidateGenerator):
    """One call's drafting with a [`ParallelEagleDrafter`]; rows share passes, each has its own tree."""

    drafter: ParallelEagleDrafter

    def read_pairs(self, token_ids: Tensor, features: Tensor, num: Tensor) -> Tensor:
        """Read new pairs and masks behind them: the states of a block, `[rows, 1, slots, hidden]`."""
        token_ids, features, num = self.newest_within_reach(token_ids, features, num)
        text = self.text
        num_rows, num_pairs = token_ids.shape
        num_masks = self.block_size - 1
        pairs = text.take_slots(num_pairs, num, num_drafted=num_masks)

        newest = text.cache.lengths + num - 1
        masks = newest + 1 + torch.arange(num_masks, device=num.device)
        positions = torch.cat([pairs, masks], dim=-1)
        seen = text.text_mask(positions, torch.cat([pairs, newest.expand(-1, num_masks)], dim=-1))
        missing = text.cache.view.num_shown - text.num_shown - num_masks
        own = torch.ones(num_masks, num_masks, dtype=torch.bool, device=num.device).tril()
        own = functional.pad(own, (0, missing, num_pairs, 0)).expand(num_rows, -1, -1)

        mask_ids = torch.full_like(masks, self.drafter.config.mask_token_id)
        mask_features = self.drafter.mask_hidden.expand(num_rows, num_masks, -1)
        inputs = self.run("fuse", torch.cat([self.to_drafter(features), mask_features], dim=1))
        embeds = self.embed(torch.cat([token_ids, mask_ids], dim=-1))
        states = self.run("attend", embeds, inputs, torch.cat([seen, own], dim=-1), positions, text.cache)
        text.forget_drafted()

        block = [num - 1, torch.arange(num_pairs, num_pairs + num_masks, device=num.device).expand(num_rows, -1)]
        return newest_of(states, torch.cat(block, dim=-1))[:, None]


ParallelEagleDrafter.generator_class = ParallelEagleCandidateGenerator
