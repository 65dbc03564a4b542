"""The configuration of a diffusion drafter: how its model is called, how far it drafts, and how it searches."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from ...errors import OptionError
from ...generation.model_parts import layer_kinds
from ..config_fields import own_fields
from ..fingerprint import OLD_NAMES
from ..whole_model_config import WholeModelConfig

PAPER_LENGTH = 20  # k_min of the paper, where its controller settles

_CHOICES: dict[str, tuple[Any, ...]] = {
    "attention": ("full", "prefix_causal", "block_causal"),
    "auto_class": ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel"),
    "logits_shift": (0, 1),
    "search": ("cps", "tree"),
    "draft_length": ("adaptive", "fixed"),
}
_COUNTS = ("block_size", "num_draft_tokens", "min_draft_tokens", "num_steps", "max_candidates", "beam_width")
_SHARES = ("mass", "model_weight", "smoothing")


@strict
class DiffusionConfig(WholeModelConfig):
    """Configuration of [`DiffusionDrafter`]; it searches as the paper does (arXiv 2510.02358) at a fixed length.

    It has the fields of [`~drafters.whole_model_config.WholeModelConfig`], too: `draft_config`, `vocab_size`,
    `draft_vocab_size` and `target_name_or_path`.

    Args:
        auto_class (`str`, *optional*, defaults to `"AutoModelForCausalLM"`): Class of Transformers that loads it.
        mask_token_id (`int`): The diffusion model's id of a token to be filled in. It is never drafted.
        logits_shift (`int`, *optional*, defaults to 1):
            1: the row of a token speaks of the next one, as in models made of autoregressive ones; 0: a mask's row
            speaks of the mask. With 1 the newest token's own row drafts the first token, so that a draft of k
            takes k - 1 masks.
        attention (`str`, *optional*, defaults to `"prefix_causal"`):
            Who sees whom. `"full"`: all see all. `"prefix_causal"`: text sees what stands before it, masks see text
            and all masks. `"block_causal"`: blocks of `block_size` on a fixed grid see themselves and earlier blocks.
        block_size (`int`, *optional*): Tokens that the model was trained to fill in at once; None: no such limit.
        num_steps (`int`, *optional*, defaults to 1):
            Passes of a draft; each commits the surest tokens that are still masked. S in the paper.
        draft_length (`str`, *optional*, defaults to `"fixed"`):
            `"fixed"`; `"adaptive"`, the paper's controller.
        num_draft_tokens (`int`, *optional*): Most tokens of a draft; None is `block_size`, or 20. k_max in the paper.
        min_draft_tokens (`int`, *optional*, defaults to 1): Fewest of an adaptive length. k_min, 20 in the paper.
        growth (`int`, *optional*, defaults to 10): Tokens that a fully kept draft adds. delta in the paper.
        smoothing (`float`, *optional*, defaults to 0.5): Weight of the newest round. rho in the paper.
        search (`str`, *optional*, defaults to `"cps"`):
            `"cps"`: the path that diffusion model and a causal proxy like best, without a proxy the best token of
            every position; `"tree"`: a tree.
        mass (`float`, *optional*, defaults to 0.8): Probability that the candidates of a position must have. tau in
            the paper.
        max_candidates (`int`, *optional*, defaults to 15): Most candidates of a position. M_max in the paper.
        beam_width (`int`, *optional*, defaults to 3): Paths that the search keeps. B in the paper.
        model_weight (`float`, *optional*, defaults to 0.5): Weight of the diffusion model's score; the proxy has the
            rest. lambda in the paper.
        target_fingerprint (`dict`, *optional*): That of the target it was trained for; None for models that others
            trained.

    Raises:
        [`OptionError`]: an option out of range, or at odds with another.

    Example:

    ```python
    >>> from transformers import LlamaConfig
    >>> draft_config = LlamaConfig(vocab_size=101)
    >>> config = DiffusionConfig(draft_config=draft_config, vocab_size=100, mask_token_id=100, block_size=8)
    >>> config.num_draft_tokens, config.draft_vocab_size
    (8, 100)

    ```
    """

    model_type = "diffusion_spec"
    attribute_map = OLD_NAMES
    wrapped_kind: ClassVar[str] = "diffusion model"
    short_kind: ClassVar[str] = "diffusion model"
    drafter_name: ClassVar[str] = "DiffusionDrafter"

    auto_class: str = "AutoModelForCausalLM"
    mask_token_id: int | None = None
    logits_shift: int = 1
    attention: str = "prefix_causal"
    block_size: int | None = None
    num_steps: int = 1
    draft_length: str = "fixed"
    num_draft_tokens: int | None = None
    min_draft_tokens: int = 1
    growth: int = 10
    smoothing: float | int = 0.5
    search: str = "cps"
    mass: float | int = 0.8
    max_candidates: int = 15
    beam_width: int = 3
    model_weight: float | int = 0.5
    target_fingerprint: dict[str, Any] | None = None

    def fill_in(self, draft_config: PreTrainedConfig) -> None:  # noqa: ARG002  the length does not depend on it
        """Set the longest draft: the block that the model was trained on, else the paper's length."""
        if self.num_draft_tokens is None:
            self.num_draft_tokens = self.block_size or max(PAPER_LENGTH, self.min_draft_tokens)

    def validate_token_ids(self) -> None:
        """Skip the stock check, which looks for the mask among the target's tokens, where it must not be."""

    @property
    def most_draft_tokens(self) -> int:
        """Most tokens of a draft."""
        assert self.num_draft_tokens is not None  # filled in
        return self.num_draft_tokens

    def check(self) -> None:
        """Refuse options out of range or at odds with one another."""
        super().check()
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise OptionError(f"`{name}` must be one of {allowed}, but it is {getattr(self, name)!r}.")
        for name in _COUNTS:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise OptionError(f"`{name}` must be at least 1, but it is {getattr(self, name)}.")
        for name in _SHARES:
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"`{name}` must lie in 0..1, but it is {getattr(self, name)}.")
        if self.growth < 0 or not self.mass or not self.smoothing:
            raise OptionError(
                f"`growth` must be at least 0, `mass` and `smoothing` above 0, but they are {self.growth}, "
                f"{self.mass} and {self.smoothing}."
            )
        self._check_lengths()
        self._check_model()

    def _check_lengths(self) -> None:
        if self.block_size is not None and self.most_draft_tokens > self.block_size:
            raise OptionError(
                f"`num_draft_tokens` must be at most {self.block_size}, the block that the model was trained to fill "
                f"in, but it is {self.num_draft_tokens}. Take a model of larger blocks."
            )
        if self.min_draft_tokens > self.most_draft_tokens:
            raise OptionError(
                f"`min_draft_tokens` must be at most `num_draft_tokens`, {self.num_draft_tokens}, but it is "
                f"{self.min_draft_tokens}."
            )
        if self.attention == "block_causal" and self.block_size is None:
            raise OptionError('`attention="block_causal"` needs the `block_size` of its grid, but there is none.')

    def _check_model(self) -> None:
        assert isinstance(self.draft_config, PreTrainedConfig)  # filled in
        size = self.draft_config.vocab_size
        if self.mask_token_id is None or not 0 <= self.mask_token_id < size:
            raise OptionError(
                f"`mask_token_id` must lie in 0..{size - 1}, the diffusion model's ids, but it is "
                f"{self.mask_token_id}."
            )
        if any(kind.sliding_window or kind.chunk_size for kind in layer_kinds(self.draft_config)):
            raise OptionError(
                "The layers of a diffusion model must see the whole text, but some see a window or a chunk. Take a "
                "model without."
            )


OWN_FIELDS = own_fields(DiffusionConfig)
