"""Sizes of a Llama-like model, and where each row and column of a small one stands in a larger one that computes the same."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from transformers_falcon_spec.errors import OptionError

ZERO = -1  # the source of an index that holds zeros


@dataclass(frozen=True)
class Shape:
    """Sizes that decide what a forward costs, under the names of `LlamaConfig`.

    Example:

    ```python
    >>> Shape(256, 704, 12, 8, 4, 32, 4096).group_size
    2

    ```
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def of(cls, config: Any) -> "Shape":
        """The sizes in a configuration."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    def of_drafter(self, config: Any) -> "Shape":
        """The sizes in a drafter's configuration; those that its kind lacks are this target's."""
        given = config.to_dict()
        return replace(self, **{field.name: given[field.name] for field in fields(self) if field.name in given})

    @property
    def group_size(self) -> int:
        """Query heads that share a key head."""
        return self.num_attention_heads // self.num_key_value_heads

    def along(self, small: "Shape", large: "Shape") -> "Shape":
        """This drafter's shape, widened as its target is from `small` to `large`. Its depth and heads per key head stay."""
        heads = self.num_attention_heads * large.num_attention_heads // small.num_attention_heads
        return replace(
            self,
            hidden_size=self.hidden_size * large.hidden_size // small.hidden_size,
            intermediate_size=-(-self.intermediate_size * large.intermediate_size // small.intermediate_size),
            num_attention_heads=heads,
            num_key_value_heads=max(heads // self.group_size, 1),
            head_dim=self.head_dim * large.head_dim // small.head_dim,
            vocab_size=large.vocab_size,
        )


# For a small model of hidden size 256 and heads of 32, as `models/reference-target` is.
SHAPES = {
    "0.3b": Shape(1024, 2816, 20, 8, 4, 128, 32768),
    "1b": Shape(1024, 5632, 40, 16, 8, 128, 32768),
    "7b": Shape(4096, 14336, 32, 32, 8, 128, 32768),  # that of Mistral 7B v0.3
}


@dataclass(frozen=True)
class Layout:
    """For every axis of a large model's weights: at each index, which of the small model's stands there, or [`ZERO`].

    Args:
        small ([`Shape`]): Of the model that is given.
        large ([`Shape`]): Of the model that computes the same.
        pad_id (`int`): Token whose rows stand at ids that the small vocabulary lacks.

    Raises:
        [`OptionError`]: rounding, not only zeros, would separate the two, or something does not fit.
    """

    small: Shape
    large: Shape
    pad_id: int = 0

    def __post_init__(self) -> None:
        """Refuse what would not be exact."""
        for name in ("hidden_size", "head_dim"):
            small, large = getattr(self.small, name), getattr(self.large, name)
            if large % small or not _is_power_of_4(large // small):
                raise OptionError(
                    f"`{name}` must be {small} times a power of 4, so that its square root scales without rounding, but "
                    f"it is {large}. Take one of {[small * 4**power for power in range(3)]}."
                )

        if self.has_new_ids and self.large.hidden_size == self.small.hidden_size:
            raise OptionError(
                "A larger `vocab_size` needs a larger `hidden_size`: one of the new channels keeps the new ids from being "
                "chosen. Keep the vocabulary, or widen the model."
            )

    @property
    def has_new_ids(self) -> bool:
        """Whether the large vocabulary has ids that the small one lacks."""
        return self.large.vocab_size > self.small.vocab_size

    @property
    def gain_factor(self) -> float:
        """What gains of RMSNorm are multiplied by: zeros lower the mean square by this factor's square."""
        return (self.small.hidden_size / self.large.hidden_size) ** 0.5

    @property
    def head_gain_factor(self) -> float:
        """The same for norms over one head."""
        return (self.small.head_dim / self.large.head_dim) ** 0.5

    @property
    def query_factor(self) -> float:
        """What queries are multiplied by: attention divides by the square root of the head's width."""
        return (self.large.head_dim / self.small.head_dim) ** 0.5

    def num_ids(self, num_small: int) -> int:
        """How many ids stand for `num_small` of the small ones: all for all, and a draft vocabulary grows in proportion."""
        return -(-num_small * self.large.vocab_size // self.small.vocab_size)

    def source(self, axis: str, num_small: int) -> Tensor:
        """The small index, or [`ZERO`], at each large index of an axis.

        Args:
            axis (`str`):
                `hidden`, `query`, `key`, `head`, `inner`; `ids` of a table that is looked up and `logits` of one that is not; `same` for
                an axis that stays.
            num_small (`int`):
                Length of the axis in the small model. Several vectors of hidden size may stand side by side: the gates of an
                LSTM, features, maps. Logits may be those of a draft vocabulary.
        """
        if axis == "same":
            return torch.arange(num_small)
        if axis == "hidden":
            hidden = self.small.hidden_size
            assert num_small % hidden == 0, "kinds refuse other widths"
            return _side_by_side(self._sources[axis], num_small // hidden, hidden)
        if axis in ("ids", "logits"):
            ids = _padded(num_small, self.num_ids(num_small))
            return ids.where(ids != ZERO, min(self.pad_id, num_small - 1))  # any row will do in a draft vocabulary

        return self._sources[axis]

    @cached_property
    def _sources(self) -> dict[str, Tensor]:
        small, large = self.small, self.large
        query_heads, key_heads = self._heads()
        return {
            "hidden": _padded(small.hidden_size, large.hidden_size),
            "query": self._spread(query_heads),
            "key": self._spread(key_heads),
            "head": self._spread([0]),
            "inner": _padded(small.intermediate_size, large.intermediate_size),
        }

    def _heads(self) -> tuple[list[int], list[int]]:
        """The small query head at each large one, and the small key head; a key head that serves several groups is copied."""
        small, large = self.small, self.large
        queries, keys = [ZERO] * large.num_attention_heads, [ZERO] * large.num_key_value_heads

        index = 0
        for key in range(small.num_key_value_heads):
            for start in range(0, small.group_size, large.group_size):
                served = range(start, min(start + large.group_size, small.group_size))
                for slot, head in enumerate(served):
                    queries[index * large.group_size + slot] = key * small.group_size + head
                keys[index] = key
                index += 1

        return queries, keys

    def _spread(self, heads: Sequence[int]) -> Tensor:
        """Channels of these heads: channel i of a head of 32 stands at 4i of a head of 128, where a rotary pair turns as fast.

        Pair i of a head of d turns with theta^(-2i/d), which is pair ri of a head of rd; and halves stay halves.
        """
        spread = torch.full((len(heads), self.large.head_dim), ZERO)
        stride = self.large.head_dim // self.small.head_dim
        for index, head in enumerate(heads):
            if head != ZERO:
                spread[index, ::stride] = head * self.small.head_dim + torch.arange(self.small.head_dim)

        return spread.flatten()


def _is_power_of_4(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0 and number.bit_length() % 2 == 1


def _padded(num_small: int, num_large: int) -> Tensor:
    source = torch.full((num_large,), ZERO)
    source[:num_small] = torch.arange(num_small)
    return source


def _side_by_side(source: Tensor, times: int, num_small: int) -> Tensor:
    """The same axis several times, one after the other."""
    return torch.cat([source.where(source == ZERO, source + number * num_small) for number in range(times)])
