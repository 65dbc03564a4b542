"""The configuration of a Falcon drafter: sizes taken from its target, the block, the recurrence and the draft tree."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedModel

from ...core.tree import DraftTree
from ...errors import OptionError
from ...generation.model_parts import embedding_width, feature_width, head_width, inner_width
from ..config_fields import check_fields, trained_target_fields
from ..tree_drafting.temperatures import GrowingConfig

RECURRENCES = ("sequence", "token")
DEFAULT_CONTEXT = 2048  # positions, for targets whose configuration names no limit


@strict
class FalconSpecConfig(GrowingConfig):
    """Configuration of [`FalconSpecDrafter`]; fields of its attention blocks are those of `LlamaConfig`.

    Args:
        block_size (`int`, *optional*, defaults to 2):
            Tokens drafted in one pass of the drafter; k in the paper. 1 drafts one token a pass, as Eagle does.
        recurrence (`str`, *optional*, defaults to `"sequence"`):
            `"sequence"` lets the LSTM's state flow from token to token, as the paper says; `"token"` starts it afresh
            at every token, as the published code does.
        block_position_embedding (`bool`, *optional*, defaults to `True`):
            Rows are told which place of their block they hold; the published drafters know nothing of it.
        shortcut (`bool`, *optional*, defaults to `False`):
            A linear map of the row is added to the LSTM's output, so that features need not pass through its gates; the
            published drafters have none.
        newest_row (`bool`, *optional*, defaults to `False`):
            Each row of a block is told a map of the block's newest row, one map for each place, before attention asks for more,
            so that it need not find out first where that row stands.
        transition_rank (`int`, *optional*):
            Rank of a table of what each token says of the next, added to the logits of a place after each token that may stand
            before it. Without it the drafts of a block are blind to each other; published drafters have none.
        num_recurrent_layers (`int`, *optional*, defaults to 2): Layers of the LSTM.
        recurrent_dropout (`float`, *optional*, defaults to 0.1): Dropout between them, in training.
        feature_layers (`list[int]`, *optional*, defaults to `[-1]`):
            Which hidden states of the target are read, as Transformers counts them; -1 is the input of the head.
        feature_size (`int`, *optional*): Width of those together.
        embedding_size (`int`, *optional*): Width of the target's token embeddings.
        draft_tree (`dict`, *optional*): `{"parents": [...], "ranks": [...]}`; None drafts a chain of one block.
        confidence_temperatures (`dict`, *optional*): How far trees that grow trust its chances, by depth; see [`GrowingConfig`].
        target_name_or_path (`str`, *optional*): The target the drafter was trained for.
        target_contract (`dict`, *optional*): What that target was; see [`~drafters.compatibility.fingerprint.TargetFingerprint`]. None checks sizes alone.

    Example:

    ```python
    >>> FalconSpecConfig(hidden_size=64, num_attention_heads=4, block_size=3).feature_size
    64

    ```
    """

    model_type = "falcon_spec"

    num_hidden_layers: int = 1
    block_size: int = 2
    recurrence: str = "sequence"
    block_position_embedding: bool = True
    shortcut: bool = False
    newest_row: bool = False
    transition_rank: int | None = None
    num_recurrent_layers: int = 2
    recurrent_dropout: float = 0.1
    feature_layers: list[int] | tuple[int, ...] = (-1,)
    feature_size: int | None = None
    embedding_size: int | None = None
    draft_tree: dict[str, Any] | None = None
    target_name_or_path: str | None = None
    target_contract: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in the widths that follow from others."""
        if self.feature_size is None:
            self.feature_size = self.hidden_size * len(self.feature_layers)
        if self.embedding_size is None:
            self.embedding_size = self.hidden_size
        super().__post_init__(**kwargs)
        self._check_options()

    def _check_options(self) -> None:
        for name in ("block_size", "num_hidden_layers", "num_recurrent_layers", "transition_rank"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise OptionError(f"`{name}` must be at least 1, but it is {getattr(self, name)}.")
        if self.recurrence not in RECURRENCES:
            raise OptionError(f"`recurrence` must be one of {RECURRENCES}, but it is {self.recurrence!r}.")
        if not self.feature_layers:
            raise OptionError(
                "`feature_layers` must name at least one hidden state, but it is empty. -1 is the last one."
            )
        if not 0 <= self.recurrent_dropout <= 1:
            raise OptionError(f"`recurrent_dropout` must lie in 0..1, but it is {self.recurrent_dropout}.")
        if self.newest_row and not self.block_position_embedding:
            raise OptionError(
                "`newest_row` needs `block_position_embedding`: rows must know their place in the block."
            )
        if self.draft_tree is not None:
            DraftTree.from_json(self.draft_tree)
        self.check_confidence(self.block_size)

    @classmethod
    def from_target(cls, target: PreTrainedModel, **options: Any) -> "FalconSpecConfig":
        """A configuration whose sizes fit `target`; `options` overrides any field.

        Raises:
            [`OptionError`]: an option that is no field.
        """
        check_fields(cls, options)
        text = target.config.get_text_config(decoder=True)
        hidden, heads = head_width(target), text.num_attention_heads  # what it drafts is read by the target's head
        heads = heads if hidden % heads == 0 else max(hidden // 64, 1)
        layers = tuple(options.get("feature_layers", (-1,)))
        sizes = {
            "hidden_size": hidden,
            "intermediate_size": inner_width(target),
            "num_attention_heads": heads,
            "initializer_range": hidden**-0.5,
            "max_position_embeddings": getattr(text, "max_position_embeddings", None) or DEFAULT_CONTEXT,
            "embedding_size": embedding_width(target),
            "feature_size": feature_width(target, layers),
            **trained_target_fields(target),
        }
        return cls(**{**sizes, **options})
