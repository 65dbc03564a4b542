"""The diffusion drafter: a masked diffusion language model of any kind, which fills in what follows the text.

The model stays as it is: the configuration holds what differs between families. Source: arXiv 2510.02358.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import Self

from ...errors import OptionError
from ...generation.head import apply_head
from ...generation.model_parts import decoder_of
from ..autoregressive import make_draft_model
from ..fingerprint import FIELD
from ..whole_model import WholeModelDrafter, shared_vocabulary
from .calls import ModelCall
from .configuration_diffuspec import OWN_FIELDS, DiffusionConfig
from .generator import DiffusionCandidateGenerator
from .proxy import NgramProxy, load_saved_proxy
from .wrapping import check_attention, check_forward, check_mask, fitted_proxy, mask_id, preset_options

DEFAULT_BLOCK = 8  # of a fresh drafter
_NOT_DRAFTING = {"draft_config", "auto_class", "vocab_size", "draft_vocab_size", "target_name_or_path", FIELD}


class DiffusionDrafter(WholeModelDrafter):
    """A drafter that is a masked diffusion model: one pass predicts all next positions, and a search picks from them.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM
    >>> target = AutoModelForCausalLM.from_pretrained("models/reference-target")
    >>> drafter = DiffusionDrafter.from_target(target, num_hidden_layers=1, block_size=4)
    >>> drafter.config.mask_token_id, drafter.num_nodes
    (4096, 5)
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> drafted = target.generate(ids, assistant_model=drafter, max_new_tokens=8, do_sample=False)
    >>> drafted.equal(target.generate(ids, max_new_tokens=8, do_sample=False))
    True

    ```
    """

    config: DiffusionConfig
    config_class = DiffusionConfig
    generator_class = DiffusionCandidateGenerator
    base_model_prefix = "drafter"
    wrapping_options = ("preset", "mask_is_text", "proxy_texts", *WholeModelDrafter.wrapping_options)
    _supports_sdpa = True

    def __init__(self, config: DiffusionConfig, model: PreTrainedModel | None = None) -> None:
        super().__init__(config, model)
        self.proxy: NgramProxy | None = None  # what a path must please besides the model; None: the model alone
        self.post_init()

    @classmethod
    def from_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        """An untrained drafter for `target`, on its device: a smaller model of its kind with one token more, the mask.

        The model starts as the target's own layers, spread evenly, where it differs in depth alone; the mask starts as
        the mean of all tokens. `options` are fields of [`DiffusionConfig`], or else of the target's own configuration,
        such as `num_hidden_layers`.

        Raises:
            [`OptionError`]: an option that is neither.
        """
        given = {name: options.pop(name) for name in OWN_FIELDS & options.keys()}
        model = make_draft_model(target, **options)
        mask_token_id = model.config.vocab_size
        _add_mask(model)
        given = {"block_size": DEFAULT_BLOCK, "mask_token_id": mask_token_id, **given}
        config = DiffusionConfig.for_models(model, target, mask_token_id, given)
        return cls(config, model).eval()

    @classmethod
    def wrap(
        cls,
        model: PreTrainedModel,
        target: PreTrainedModel,
        *,
        preset: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        mask_is_text: bool = False,
        proxy_texts: Iterable[Sequence[int] | Tensor] | None = None,
        **options: Any,
    ) -> Self:
        """A drafter for `target` that drafts with `model`, which stays where it is and becomes a part of the drafter.

        Args:
            model ([`~transformers.PreTrainedModel`]): A masked diffusion model with the target's tokens.
            target ([`~transformers.PreTrainedModel`]): The target.
            preset (`str`, *optional*): `"paper"` drafts with the paper's options, where `options` do not say
                otherwise.
            tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*): That of `model`, to compare tokens and
                to find the mask. Without both only vocabularies of one size are the same.
            target_tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*): That of the target.
            mask_is_text (`bool`, *optional*, defaults to `False`): The mask may be a token of the target; it is never
                drafted.
            proxy_texts (`Iterable`, *optional*): Token ids of texts that a 3-gram proxy is fitted to; `preset="paper"`
                needs them.
            options: Fields of [`DiffusionConfig`].

        Raises:
            [`OptionError`]: an option that is unknown, out of range, or not how the model works.
            [`DrafterMismatchError`]: the model has other tokens than the target, or its mask is one of them.
        """
        found = mask_id(model.config, options, tokenizer)
        options = {**preset_options(preset, options), "mask_token_id": found}
        sizes = (model.config.vocab_size, target.config.get_text_config(decoder=True).vocab_size)
        if sizes[0] == sizes[1] + 1 and found == sizes[1]:  # the target's tokens and a mask behind them
            sizes = (sizes[1], sizes[1])
        num_shared = shared_vocabulary(sizes, (tokenizer, target_tokenizer))
        if not mask_is_text:
            check_mask(found, num_shared, tokenizer, target_tokenizer)
        config = DiffusionConfig.for_models(model, target, num_shared, options)
        check_forward(model)
        drafter = cls(config, model).eval()
        check_attention(model, config, drafter.device)
        drafter.proxy = fitted_proxy(preset, proxy_texts, config.vocab_size)
        return drafter

    def load_extra_files(self, name_or_path: Any, **hub: Any) -> None:
        """Load the proxy, if one was saved."""
        self.proxy = load_saved_proxy(name_or_path, **hub)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:  # type: ignore[override]
        """Save weights, config, options and the proxy; the arguments are those of `PreTrainedModel.save_pretrained`.

        Raises:
            [`OptionError`]: the model's code came with its weights, so that its class could not be found again.
        """
        if type(self.model).__module__.startswith("transformers_modules."):
            raise OptionError(
                f"A drafter is saved without code, but `{type(self.model).__name__}` came with code of its own. Wrap "
                "it anew instead: `DiffusionDrafter.from_pretrained(NAME, target=target, trust_remote_code=True)`."
            )
        super().save_pretrained(save_directory, **kwargs)
        if self.proxy is not None:
            self.proxy.save(save_directory)

    def forward(
        self,
        token_ids: Int[Tensor, "rows tokens"],
        positions: Int[Tensor, "rows tokens"],
        allowed: Bool[Tensor, "rows tokens tokens"],
        kept: Bool[Tensor, "rows tokens"],
        **_: Any,
    ) -> Tensor:
        """Logits `[kept, draft_vocab_size]` in float32 of the `kept` tokens; for training, without a cache.

        `positions` are those of texts with masks, whose tokens see what is `allowed`.
        """
        call = ModelCall(token_ids, positions, allowed, None, token_ids.shape[1])
        decoder: Any = decoder_of(self.model)
        states = decoder(**call.arguments(decoder))[0]
        return apply_head(self.model, states[kept])[:, : self.config.draft_vocab_size]

    @property
    def block_size(self) -> int:
        """Tokens drafted in one pass."""
        return self.config.most_draft_tokens

    @property
    def max_depth(self) -> int:
        """The depth of the deepest draft."""
        return self.config.most_draft_tokens

    @property
    def num_nodes(self) -> int:
        """Most nodes of a draft, root included."""
        is_tree = self.config.search == "tree"
        return self.generation_config.num_tree_nodes if is_tree else 1 + self.config.most_draft_tokens

    @property
    def draft_settings(self) -> dict[str, Any]:
        """Settings besides weights that decide its drafts."""
        settings = {name: getattr(self.config, name) for name in sorted(OWN_FIELDS - _NOT_DRAFTING)}
        nodes = {"num_tree_nodes": self.generation_config.num_tree_nodes} if self.config.search == "tree" else {}
        return {**settings, **nodes, "proxy": None if self.proxy is None else self.proxy.fingerprint}

    def compared_sizes(self, model: PreTrainedModel) -> dict[str, tuple[int, int]]:
        """The vocabularies that drafter and proxy were made for, each with the target's."""
        given = model.config.get_text_config(decoder=True).vocab_size
        proxy = {} if self.proxy is None else {"a proxy's vocabulary": (self.proxy.vocab_size, given)}
        return {**super().compared_sizes(model), **proxy}

    def _check_tree(self, model: PreTrainedModel) -> None:
        super()._check_tree(model)
        self.config.check()  # its options may have changed
        if self.generation_config.draft_tree is not None:
            raise OptionError(
                "A diffusion drafter makes its trees from its lattice, but `draft_tree` names a static one. Set "
                '`drafter.generation_config.draft_tree = None`; `search="tree"` drafts trees.'
            )


@torch.no_grad()
def _add_mask(model: PreTrainedModel) -> None:
    """Give a model one token more, which starts as the mean of all others; nothing is drawn."""
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 1, mean_resizing=False)
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight: Tensor = part.weight  # type: ignore[assignment]
        weight[size] = weight[:size].mean(dim=0)
        if getattr(part, "bias", None) is not None:
            part.bias[size] = part.bias[:size].mean()  # type: ignore[index, operator]
