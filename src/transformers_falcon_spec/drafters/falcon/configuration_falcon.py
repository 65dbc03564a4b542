"""The configuration of a Falcon drafter: sizes taken from its target, the block, the recurrence and the draft tree."""

from huggingface_hub.dataclasses import strict

from ...errors import OptionError
from ..tree_drafting.configuration import PairConfig

RECURRENCES = ("sequence", "token")
LEAST_ONE = (
    "block_size",
    "num_hidden_layers",
    "num_recurrent_layers",
    "transition_rank",
    "transition_size",
    "transition_tokens",
)


@strict
class FalconSpecConfig(PairConfig):
    """Configuration of [`FalconSpecDrafter`]; fields of its attention blocks are those of `LlamaConfig`.

    It has the fields of [`~drafters.tree_drafting.configuration.PairConfig`], too: `feature_layers`, `feature_size`,
    `embedding_size`, `draft_tree`, `confidence_temperatures`, and the target that it was trained for.

    Args:
        block_size (`int`, *optional*, defaults to 2):
            Tokens drafted in one pass of the drafter; k in the paper. 1 drafts one token a pass, as Eagle does.
        recurrence (`str`, *optional*, defaults to `"sequence"`):
            `"sequence"` lets the LSTM's state flow from token to token, as the paper says; `"token"` starts it afresh
            at every token, as the published code does.
        block_position_embedding (`bool`, *optional*, defaults to `True`):
            A learned vector shows each row its position in its block. Published drafters have neither this nor the
            next three.
        shortcut (`bool`, *optional*, defaults to `False`): A linear map of the row is added to the LSTM's output.
        newest_row (`bool`, *optional*, defaults to `False`): A linear map of the block's newest row, one for each
            position of the block, is added to each row's queries and output.
        transition_rank (`int`, *optional*): Rank of a table of scores by which each token changes the logits of the
            next. Without it the tokens of a block are predicted independently.
        transition_size (`int`, *optional*): Width of a network that adds to those scores what the last tokens of the
            block say together.
        transition_tokens (`int`, *optional*, defaults to 1): Tokens that this network reads.
        num_recurrent_layers (`int`, *optional*, defaults to 2): Layers of the LSTM.
        recurrent_dropout (`float`, *optional*, defaults to 0.1): Dropout between them, in training.

    Example:

    ```python
    >>> FalconSpecConfig(hidden_size=64, num_attention_heads=4, block_size=3).feature_size
    64

    ```
    """

    model_type = "falcon_spec"

    block_size: int = 2
    recurrence: str = "sequence"
    block_position_embedding: bool = True
    shortcut: bool = False
    newest_row: bool = False
    transition_rank: int | None = None
    transition_size: int | None = None
    transition_tokens: int = 1
    num_recurrent_layers: int = 2
    recurrent_dropout: float = 0.1

    def check(self) -> None:
        """Refuse options out of range or at odds with one another."""
        for name in LEAST_ONE:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise OptionError(f"`{name}` must be at least 1, but it is {getattr(self, name)}.")
        if self.recurrence not in RECURRENCES:
            raise OptionError(f"`recurrence` must be one of {RECURRENCES}, but it is {self.recurrence!r}.")
        if not 0 <= self.recurrent_dropout <= 1:
            raise OptionError(f"`recurrent_dropout` must lie in 0..1, but it is {self.recurrent_dropout}.")
        if self.newest_row and not self.block_position_embedding:
            raise OptionError(
                "`newest_row` needs `block_position_embedding`: rows must know their position in the block."
            )
        if self.transition_size is not None and self.transition_rank is None:
            raise OptionError(
                f"`transition_size` needs a transition, but it is {self.transition_size} and `transition_rank` is "
                "None. Give a rank, or leave `transition_size` out."
            )
        if self.transition_tokens > 1 and self.transition_size is None:
            raise OptionError(
                f"`transition_tokens` needs a network, but it is {self.transition_tokens} and `transition_size` is "
                "None. Give a size, or leave `transition_tokens` out."
            )
        super().check()
