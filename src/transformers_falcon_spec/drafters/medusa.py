"""Medusa: heads that all read the target's newest feature, each to draft one token further ahead.

Nodes of one depth take the tokens of one head. Source: arXiv 2401.10774, section 2.1.1. Weights stand one to one as
in the published files, `{head}.{block}.linear` and `{head}.{num_layers}` behind the prefix `heads.`. Typical
acceptance (section 2.3.1) changes what is written, so it is not offered: drafts are accepted by the same verifiers as
those of every other drafter.
"""

from functools import lru_cache
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ..core.options import option
from ..core.tree import DraftTree
from ..errors import OptionError
from ..generation.drafting import TargetView
from ..generation.head import apply_head, head_width
from ..generation.model_parts import device_of
from .base import DrafterModel
from .config_fields import DraftVocabularyConfig
from .draft_vocabulary import DraftVocabulary
from .tree_drafting.proposing import PairGenerator
from .tree_drafting.text import newest_of


@strict
class MedusaConfig(DraftVocabularyConfig):
    """Configuration of [`MedusaDrafter`].

    Args:
        hidden_size (`int`, *optional*, defaults to 4096): Width of what the target's head reads.
        num_heads (`int`, *optional*, defaults to 5): Heads, and with them the deepest draft; the paper finds 5 enough.
        num_layers (`int`, *optional*, defaults to 1): Residual blocks of each head.
        has_lm_heads (`bool`, *optional*, defaults to `True`): Whether each head ends in an LM head of its own, as
            Medusa-1 does, or in the target's, as v2 heads do. A fresh drafter has none where they would have more
            weights than the target.
        vocab_size (`int`, *optional*, defaults to 32000): Size of the target's vocabulary.
        draft_vocab_size (`int`, *optional*): Tokens that can be drafted; None is all of them.
        draft_tree (`dict`, *optional*): `{"parents": [...], "ranks": [...]}`; None drafts the best 16 nodes for heads
            whose every rank is right half as often as the one before.
        target_name_or_path (`str`, *optional*): The target the drafter was trained for.
        target_fingerprint (`dict`, *optional*): What that target was; see
            [`~drafters.fingerprint.TargetFingerprint`]. None checks sizes alone.

    Example:

    ```python
    >>> MedusaConfig(hidden_size=64, vocab_size=100, num_heads=3).num_layers
    1

    ```
    """

    model_type = "medusa_spec"

    hidden_size: int = option(4096, least=1)
    num_heads: int = option(5, least=1)
    num_layers: int = option(1, least=1)
    has_lm_heads: bool = True

    @classmethod
    def sizes_for(cls, target: PreTrainedModel, options: dict[str, Any]) -> dict[str, Any]:
        """The width of what the target's head reads; LM heads of its own unless they outweigh the target.

        With a short list of tokens there are none: rows of the target's head are what they would start as.
        """
        width = head_width(target)
        vocab_size = target.config.get_text_config(decoder=True).vocab_size
        num_weights = options.get("num_heads", cls.num_heads) * vocab_size * width
        is_list = options.get("draft_vocab_size") is not None
        return {"hidden_size": width, "has_lm_heads": num_weights <= target.num_parameters() and not is_list}

    def check(self) -> None:
        """Refuse options out of range or at odds with one another."""
        super().check()
        if self.has_lm_heads and self.has_own_vocabulary:
            raise OptionError(
                "`draft_vocab_size` is for heads that end in the target's, so `has_lm_heads` must be False, but it is "
                "True. Leave one of them out."
            )


DEFAULT_NODES = 16  # of the tree of a drafter without one, root included
DEFAULT_RANKS = 10


class ResidualBlock(nn.Module):
    """`x + SiLU(linear(x))`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, states: Tensor) -> Tensor:
        """The block's output, as wide as its input."""
        return states + functional.silu(self.linear(states))


class MedusaDrafter(DraftVocabulary, DrafterModel):
    """A drafter of `num_heads` tokens in one pass: head i drafts the token i + 2 positions after the feature's own.

    The token right after it is known by then, for the target's own head chose it. Heads see nothing of one another, so
    all nodes of a depth share one list of candidates.

    Example:

    ```python
    >>> drafter = MedusaDrafter(MedusaConfig(hidden_size=32, vocab_size=100, num_heads=3))
    >>> drafter(torch.zeros(2, 3, 32)).shape, drafter.num_nodes
    (torch.Size([2, 3, 100]), 16)

    ```
    """

    config: MedusaConfig
    config_class = MedusaConfig
    main_input_name = "features"
    goes_on = False
    feature_layers = (-1,)  # the input of the target's head

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList(_head(config) for _ in range(config.num_heads))
        self._list_tokens()
        self.post_init()

    @classmethod
    def from_target(cls, target: PreTrainedModel, **options: Any) -> "MedusaDrafter":
        """A fresh drafter for `target`, on its device; `options` are fields of [`MedusaConfig`].

        Every head starts out as the target's own: its blocks add nothing, and an LM head of its own is a copy.
        """
        drafter = cls(MedusaConfig.from_target(target, **options))
        for part in drafter.modules():
            if isinstance(part, ResidualBlock):
                nn.init.zeros_(part.linear.weight)
                nn.init.zeros_(part.linear.bias)

        if drafter.config.has_lm_heads:
            weight = _lm_head_weight(target, drafter.config.hidden_size)
            for head in drafter.heads:
                head.get_submodule(f"{drafter.config.num_layers}").load_state_dict({"weight": weight})

        return drafter.eval().to(device=device_of(target))

    def forward(
        self, features: Float[Tensor, "*tokens heads hidden"], **_: Any
    ) -> Float[Tensor, "*tokens heads width"]:
        """The output of each head for its feature: logits, or what the target's head reads where it has no LM head.

        Fewer features than heads will do: those of the first ones.
        """
        features = features.to(self.dtype)
        outputs = []
        for number in range(features.shape[-2]):
            outputs.append(self.heads[number](features[..., number, :]))

        return torch.stack(outputs, dim=-2)

    @property
    def feature_size(self) -> int:
        """Width of that input."""
        return self.config.hidden_size

    @property
    def default_tree(self) -> DraftTree:  # type: ignore[override]  # follows from the number of heads
        """The best nodes for heads whose every rank is right half as often as the one before."""
        return _default_tree(self.config.num_heads)

    @property
    def block_size(self) -> int:
        """Tokens drafted in one pass: one for each head."""
        return self.config.num_heads


def _head(config: MedusaConfig) -> nn.Sequential:
    blocks: list[nn.Module] = [ResidualBlock(config.hidden_size) for _ in range(config.num_layers)]
    last = [nn.Linear(config.hidden_size, config.vocab_size, bias=False)] if config.has_lm_heads else []
    return nn.Sequential(*blocks, *last)


def _lm_head_weight(target: PreTrainedModel, width: int) -> Tensor:
    """The matrix of the target's head, found by applying it to unit vectors: weights may be packed or offloaded."""
    units = torch.eye(width, device=device_of(target), dtype=target.dtype)
    return (apply_head(target, units) - apply_head(target, torch.zeros_like(units[:1]))).T


@lru_cache
def _default_tree(num_heads: int) -> DraftTree:
    probs = 0.5 ** torch.arange(1, DEFAULT_RANKS + 1, dtype=torch.float)
    return DraftTree.best_first(probs.expand(num_heads, -1), DEFAULT_NODES)


class MedusaCandidateGenerator(PairGenerator):
    """One call's drafting with a [`MedusaDrafter`], in one pass, from each row's newest feature alone."""

    num_layers = 0  # of heads none keeps anything of the text

    def __init__(self, drafter: MedusaDrafter, target: TargetView, max_length: int, rng: torch.Generator) -> None:
        super().__init__(drafter, target, max_length, rng)
        self.block_size = int(self.tree.depths.max())  # heads that the tree needs

    def read_pairs(self, token_ids: Tensor, features: Tensor, num: Tensor) -> Tensor:  # noqa: ARG002  heads see features
        """The newest feature of each row, `[rows, 1, 1, feature]`."""
        return newest_of(features, num - 1)[:, None]

    def draft_logits(self, features: Tensor) -> Tensor:
        """Logits `[rows, 1, heads, vocab]` of the first heads."""
        of_heads = self.to_drafter(features).expand(-1, -1, self.block_size, -1)
        outputs = self.run("forward", of_heads)
        return outputs.float() if self.drafter.config.has_lm_heads else super().draft_logits(outputs)


MedusaDrafter.generator_class = MedusaCandidateGenerator
