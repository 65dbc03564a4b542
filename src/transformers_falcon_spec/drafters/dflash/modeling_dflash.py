"""The DFlash drafter: Transformers' own model, which fills in a block of masks, behind this package's decoding loop.

Weights, and with them drafts, are those of the stock model. Source: arXiv 2602.06036.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache, MuseGlimmerAssistantModel, PreTrainedModel
from transformers.initialization import no_init_weights
from typing_extensions import Self

from ...core.masks import additive
from ...errors import DrafterMismatchError, OptionError
from ...generation.head import head_width
from ...generation.model_parts import device_of, named
from ...transformers_versions import CACHE
from ..tree_drafting.grown import GrowingDrafter
from .configuration_dflash import LAYER_TYPES, DFlashConfig
from .generator import DFlashCandidateGenerator
from .second_version import CandidateSelector, ConvolvedLayer
from .stock import context_layers


class DFlashDrafter(GrowingDrafter, MuseGlimmerAssistantModel):
    """A drafter of `block_size - 1` tokens in one pass, each a slot that knows nothing of the other slots' tokens.

    The last token of the text and masks behind it attend to one another and to features of the text, hidden states of
    several layers of the target; the target's head reads what comes out at the masks. Trees take the likeliest tokens
    of every slot; with a `draft_tree` that is a chain it drafts what stock `generate` does. Where the config has the
    parts of DFlash2, a token changes how likely those of the next slot are.

    Example:

    ```python
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    >>> target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, **sizes))
    >>> drafter = DFlashDrafter.from_target(target, num_hidden_layers=1, block_size=4)
    >>> drafter.block_size, drafter.feature_layers
    (3, (2, 3, 4))

    ```
    """

    config: DFlashConfig
    config_class = DFlashConfig
    generator_class = DFlashCandidateGenerator
    base_model_prefix = "drafter"
    goes_on = False
    _supports_flash_attn = False  # masks say which slots of a cache hold text
    _supports_flex_attn = False

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        is_second_version = config.selector_rank is not None
        if is_second_version:
            self.layers = nn.ModuleList(ConvolvedLayer(config, index) for index in range(config.num_hidden_layers))
        self.candidate_selector = CandidateSelector(config) if is_second_version else None

    @classmethod
    def from_stock(cls, model: PreTrainedModel, target: PreTrainedModel) -> Self:
        """The drafter with the weights of `model`, Transformers' own DFlash drafter, which both then share.

        Raises:
            [`OptionError`]: the mask of `model` is no token of `target`.
            [`DrafterMismatchError`]: `model` was made for a target of other sizes.
        """
        config = DFlashConfig.of_stock(model.config.to_dict(), target)
        config._attn_implementation = model.config._attn_implementation
        with no_init_weights():
            drafter = cls(config)
        drafter.load_state_dict(model.state_dict(), assign=True)
        drafter.config.dtype = model.dtype
        drafter.eval().to(device=device_of(model))
        drafter.check_target(target)
        return drafter

    def fill_in(
        self,
        noise_embeds: Float[Tensor, "rows block hidden"],
        features: Float[Tensor, "rows tokens feature"],
        mask: Bool[Tensor, "rows block keys"],
        sliding_mask: Bool[Tensor, "rows block keys"],
        positions: Int[Tensor, "rows tokens_and_block"],
        cache: Cache,
    ) -> Float[Tensor, "rows slots hidden"]:
        """What the target's head reads at each mask; keys and values of features and block go to `cache`."""
        masks = dict(zip(LAYER_TYPES, (mask, sliding_mask), strict=True))
        outputs = self(
            noise_embeds=noise_embeds,
            context_hidden_states=features,
            attention_mask={name: additive(seen, noise_embeds.dtype) for name, seen in masks.items()},
            position_ids=positions,
            **{CACHE: cache},
        )
        states: Tensor = outputs.last_hidden_state
        return states[:, 1:]

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Indices into the target's `hidden_states` that the drafter reads."""
        return context_layers(self)

    @property
    def feature_size(self) -> int:
        """Width of those together."""
        return self.config.hidden_size * len(self.feature_layers)

    @property
    def block_size(self) -> int:
        """Tokens drafted in one pass: the slots of a block, its root left out."""
        return self.config.block_size - 1

    @property
    def tree_depth(self) -> int:
        """How deep trees grow."""
        return self.generation_config.tree_depth or self.block_size

    def check_target(self, model: PreTrainedModel) -> None:
        """Refuse a target that the drafter was not made for, as [`DrafterModel.check_target`] does."""
        most = model.config.get_text_config(decoder=True).num_hidden_layers - 2
        if max(self.feature_layers) - 1 > most:
            raise DrafterMismatchError(
                f"This drafter reads layers {self.config.target_layer_ids} of the target, so they must lie in "
                f"0..{most}, but one is above that in {named(model)}. Load the target it was trained for."
            )
        super().check_target(model)

    def compared_sizes(self, model: PreTrainedModel) -> dict[str, tuple[int, int]]:
        """By name each size that the drafter was made for, and that of a target."""
        return {**super().compared_sizes(model), "a head": (self.config.hidden_size, head_width(model))}

    def _check_tree(self, model: PreTrainedModel) -> None:
        super()._check_tree(model)
        if self.max_depth > self.block_size:
            raise OptionError(
                f"A block has {self.block_size} masks, one for each depth, so trees must end at depth "
                f"{self.block_size}, but `draft_tree` or `tree_depth` reaches depth {self.max_depth}."
            )
        top_k = self.generation_config.tree_top_k * self.is_tree_dynamic
        num_ranks, most = max(int(self.draft_tree.ranks.max()) + 1, top_k), self.config.selector_top_k
        if most is not None and num_ranks > most:
            raise OptionError(
                f"The selector of this drafter chooses among the {most} best tokens of a mask (`selector_top_k`), but "
                f"`draft_tree` or `tree_top_k` asks for {num_ranks}. Take a narrower tree."
            )
