"""The configuration of an EasySpec drafter: the draft model, which of its layers attend at once, and the shared vocabulary."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ...core.tree import DraftTree
from ...errors import OptionError
from ..config_fields import check_fields, target_fields
from ..tree_drafting.temperatures import check_temperatures
from .families import check_family
from .groups import build_groups, check_groups

BACKENDS = ("sequential", "fused", "distributed")
READABLE_ATTENTION = ("sdpa", "eager")  # kinds that take masks of trees


@strict
class LayerParallelConfig(PreTrainedConfig):
    """Configuration of [`LayerParallelDrafter`].

    Args:
        draft_config (`PreTrainedConfig` or `dict`): Configuration of the language model that drafts.
        layer_groups (`list[list[int]]`, *optional*):
            Layers that attend at once, all layers in their order; the first and the last one each alone. None is what
            `build_groups` makes of groups of 2 in models of up to 16 layers, else of 4.
        backend (`str`, *optional*, defaults to `"fused"`):
            `"sequential"` computes the attention of a group layer by layer; `"fused"` all at once, with the same results to
            rounding, and keeps the attention weights of the groups a second time; `"distributed"` spreads them over the processes
            that `torchrun` started, all of which must make the same calls.
        timeout_seconds (`float`, *optional*, defaults to 120): How long processes wait for each other, where there are several.
        calibrate (`bool`, *optional*, defaults to `True`):
            An ablation if `False`: only prompts are read exactly, text that is new in a step like what is drafted.
        whole_layers (`bool`, *optional*, defaults to `False`):
            An ablation if `True`: MLPs read the older input, too, so that the layers of a group run at once as a whole.
        vocab_size (`int`, *optional*, defaults to 32000): Size of the target's vocabulary.
        draft_vocab_size (`int`, *optional*):
            Tokens that both models have: only ids below are drafted. None is the smaller of both vocabularies.
        draft_tree (`dict`, *optional*): `{"parents": [...], "ranks": [...]}`; the static tree; None is a chain.
        confidence_temperatures (`dict`, *optional*): How far trees that grow trust its probabilities, by depth; see `PairConfig` of Falcon and Eagle.
        target_name_or_path (`str`, *optional*): The target that it was wrapped for.

    Raises:
        [`OptionError`]: an option out of range, groups that are no division of the layers, or a family that cannot be wrapped.

    Example:

    ```python
    >>> from transformers import LlamaConfig
    >>> config = LayerParallelConfig(draft_config=LlamaConfig(num_hidden_layers=6, vocab_size=100), vocab_size=128)
    >>> config.layer_groups, config.draft_vocab_size
    ([[0], [1, 2], [3, 4], [5]], 100)

    ```
    """

    model_type = "layer_parallel_spec"
    has_no_defaults_at_init: ClassVar[bool] = True
    sub_configs: ClassVar[dict[str, Any]] = {"draft_config": AutoConfig}

    draft_config: dict[str, Any] | PreTrainedConfig | None = None
    layer_groups: list[list[int]] | None = None
    backend: str = "fused"
    timeout_seconds: float | int = 120
    calibrate: bool = True
    whole_layers: bool = False
    vocab_size: int = 32000
    draft_vocab_size: int | None = None
    draft_tree: dict[str, Any] | None = None
    confidence_temperatures: dict[str, Any] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    target_name_or_path: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in what follows from other fields."""
        if isinstance(self.draft_config, dict):
            given = dict(self.draft_config)
            self.draft_config = AutoConfig.for_model(given.pop("model_type", ""), **given)
        if self.draft_config is None:
            raise OptionError(
                "`draft_config` must be the configuration of a language model, but there is none. "
                "`LayerParallelDrafter.from_pretrained(NAME, target=target)` takes that of the model NAME."
            )
        check_family(self.draft_config)
        if self.layer_groups is None:
            self.layer_groups = build_groups(self.draft_config.num_hidden_layers)
        if self.draft_vocab_size is None:
            self.draft_vocab_size = min(self.vocab_size, self.draft_config.vocab_size)
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """Refuse options out of range or at odds with one another.

        Raises:
            [`OptionError`]: an option is one of those.
        """
        assert isinstance(self.draft_config, PreTrainedConfig)  # filled in, as the next two are
        assert self.layer_groups is not None
        assert self.draft_vocab_size is not None
        check_groups(self.layer_groups, self.draft_config.num_hidden_layers)
        if self.backend not in BACKENDS:
            raise OptionError(f"`backend` must be one of {BACKENDS}, but it is {self.backend!r}.")
        if self.timeout_seconds <= 0:
            raise OptionError(f"`timeout_seconds` must be above 0, but it is {self.timeout_seconds}.")
        if self.backend == "distributed" and not self.calibrate:
            raise OptionError(
                '`calibrate=False` is not for `backend="distributed"`, where only one rank has what it read roughly. Take another one.'
            )
        most = min(self.vocab_size, self.draft_config.vocab_size)
        if not 1 <= self.draft_vocab_size <= most:
            raise OptionError(
                f"`draft_vocab_size` must lie in 1..{most}, for the target has {self.vocab_size} tokens and the draft model "
                f"{self.draft_config.vocab_size}, but it is {self.draft_vocab_size}."
            )
        if self.draft_tree is not None:
            DraftTree.from_json(self.draft_tree)
        check_temperatures(self.confidence_temperatures, block_size=1)

    @classmethod
    def of_models(
        cls,
        model: PreTrainedModel,
        target: PreTrainedModel,
        num_shared: int,
        group_size: int | None,
        options: dict[str, Any],
    ) -> "LayerParallelConfig":
        """A configuration with which `model` drafts for `target`.

        Args:
            model ([`~transformers.PreTrainedModel`]): The draft model.
            target ([`~transformers.PreTrainedModel`]): The target.
            num_shared (`int`): Ids, from 0 on, that are the same tokens to both.
            group_size (`int`, *optional*): Most layers of a group; not beside `layer_groups`.
            options (`dict`): Other fields.

        Raises:
            [`OptionError`]: an option that is no field, that is out of range, or at odds with another; attention that takes no trees.
        """
        check_fields(cls, options)
        attention = model.config._attn_implementation
        if attention not in READABLE_ATTENTION:
            raise OptionError(
                f"The attention of a draft model must take masks of trees, as {READABLE_ATTENTION} do, but it is {attention!r}. Load it "
                'with `attn_implementation="sdpa"`.'
            )
        given = {
            "draft_vocab_size": num_shared,
            **{name: value for name, value in options.items() if value is not None},
        }
        if given["draft_vocab_size"] > num_shared:
            raise OptionError(
                f"`draft_vocab_size` must be at most {num_shared}, what both models have, but it is {given['draft_vocab_size']}."
            )
        if group_size is not None and "layer_groups" in given:
            raise OptionError(
                f"`group_size` makes groups and `layer_groups` names them, so one must be left out, but they are {group_size} and "
                f"{given['layer_groups']}."
            )
        if group_size is not None:
            given["layer_groups"] = build_groups(model.config.num_hidden_layers, group_size)
        # with another `attn_implementation`, or without one, the model would lose its own
        common = {"draft_config": model.config, "dtype": model.dtype, "attn_implementation": attention}
        return cls(**{**common, **target_fields(target), **given})
