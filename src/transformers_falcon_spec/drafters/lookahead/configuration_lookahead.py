"""The configuration of a Lookahead drafter: the Jacobi window, the n-grams, and how many are kept and guessed."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import OptionError
from ..config_fields import check_fields, target_fields

SMALLEST = {"window_size": 1, "ngram_len": 2, "num_guesses": 1, "pool_size": 1}


@strict
class LookaheadConfig(PreTrainedConfig):
    """Configuration of [`LookaheadDrafter`]; the defaults are what the paper takes for a target of 7B parameters.

    A step reads `(ngram_len - 1) * window_size - 1` lookahead nodes and up to `num_guesses * (ngram_len - 1)` guessed
    tokens.

    Args:
        window_size (`int`, *optional*, defaults to 15): Columns of the Jacobi window; W in the paper.
        ngram_len (`int`, *optional*, defaults to 5): Tokens of an n-gram, the one it is found by included; N in the
            paper. Drafts are one token shorter.
        num_guesses (`int`, *optional*, defaults to 15): n-grams guessed in a step, the newest ones; G in the paper.
        pool_size (`int`, *optional*, defaults to 16384): n-grams kept for each row; the one unseen for longest goes
            first.
        vocab_size (`int`, *optional*): Size of the target's vocabulary.
        target_name_or_path (`str`, *optional*): The target that the sizes were taken from; any other of them will do.

    Example:

    ```python
    >>> LookaheadConfig(window_size=5, ngram_len=3, vocab_size=100).num_nodes
    40

    ```
    """

    model_type = "lookahead_spec"

    window_size: int = 15
    ngram_len: int = 5
    num_guesses: int = 15
    pool_size: int = 16384
    vocab_size: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    target_name_or_path: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Refuse options out of range."""
        super().__post_init__(**kwargs)
        for name, least in SMALLEST.items():
            if getattr(self, name) < least:
                raise OptionError(f"`{name}` must be at least {least}, but it is {getattr(self, name)}.")

    @property
    def num_nodes(self) -> int:
        """Most nodes of a draft, root and lookahead nodes included."""
        return (self.num_guesses + self.window_size) * (self.ngram_len - 1)

    @classmethod
    def from_target(cls, target: PreTrainedModel, **options: Any) -> "LookaheadConfig":
        """A configuration for `target`; `options` are fields, others an [`OptionError`]."""
        check_fields(cls, options)
        return cls(**{**target_fields(target), **options})
