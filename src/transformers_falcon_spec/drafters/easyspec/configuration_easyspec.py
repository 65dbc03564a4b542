"""The configuration of an EasySpec drafter: its model, and which layers compute attention at once."""

from collections.abc import Sequence
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from ...core.tree import DraftTree
from ...errors import OptionError
from ..tree_drafting.temperatures import check_temperatures
from ..whole_model_config import WholeModelConfig
from .families import check_family

BACKENDS = ("fused", "distributed")
SHALLOW, SHALLOW_SIZE, DEFAULT_SIZE = 16, 2, 4  # arXiv 2502.02493, table 1


@strict
class LayerParallelConfig(WholeModelConfig):
    """Configuration of [`LayerParallelDrafter`].

    It has the fields of [`~drafters.whole_model_config.WholeModelConfig`], too: `draft_config`, `vocab_size`,
    `draft_vocab_size` and `target_name_or_path`.

    Args:
        layer_groups (`list[list[int]]`, *optional*):
            Layers that attend at once, all layers in their order; the first and the last one each alone. None makes
            groups of 2 in models of up to 16 layers, else of 4.
        backend (`str`, *optional*, defaults to `"fused"`):
            `"fused"` computes the attention of a group at once; `"distributed"` spreads its layers over the processes
            that `torchrun` started, all of which must make the same calls. The results are the same to rounding.
        timeout_seconds (`float`, *optional*, defaults to 120): How long processes wait for each other, where there are
            several.
        draft_tree (`dict`, *optional*): `{"parents": [...], "ranks": [...]}`; the static tree; None is a chain.
        confidence_temperatures (`dict`, *optional*): As in `PairConfig` of Falcon and Eagle, by depth.

    Raises:
        [`OptionError`]: an option out of range, or a family that cannot be wrapped.

    Example:

    ```python
    >>> from transformers import LlamaConfig
    >>> config = LayerParallelConfig(draft_config=LlamaConfig(num_hidden_layers=6, vocab_size=100), vocab_size=128)
    >>> config.layer_groups, config.draft_vocab_size
    ([[0], [1, 2], [3, 4], [5]], 100)

    ```
    """

    model_type = "layer_parallel_spec"
    mask_kind: ClassVar[str] = "masks of trees"
    drafter_name: ClassVar[str] = "LayerParallelDrafter"

    layer_groups: list[list[int]] | None = None
    backend: str = "fused"
    timeout_seconds: float | int = 120
    draft_tree: dict[str, Any] | None = None
    confidence_temperatures: dict[str, Any] | None = None

    def fill_in(self, draft_config: PreTrainedConfig) -> None:
        """Set the groups, of a model whose layers can be run apart."""
        check_family(draft_config)
        if self.layer_groups is None:
            self.layer_groups = build_groups(draft_config.num_hidden_layers)

    def check(self) -> None:
        """Refuse options out of range or at odds with one another."""
        super().check()
        assert isinstance(self.draft_config, PreTrainedConfig)  # filled in, as the next one is
        assert self.layer_groups is not None
        check_groups(self.layer_groups, self.draft_config.num_hidden_layers)
        if self.backend not in BACKENDS:
            raise OptionError(f"`backend` must be one of {BACKENDS}, but it is {self.backend!r}.")
        if self.timeout_seconds <= 0:
            raise OptionError(f"`timeout_seconds` must be above 0, but it is {self.timeout_seconds}.")
        if self.draft_tree is not None:
            DraftTree.from_json(self.draft_tree)
        check_temperatures(self.confidence_temperatures, block_size=1)


def build_groups(num_layers: int, group_size: int | None = None) -> list[list[int]]:
    """Groups of `group_size` layers; the first and the last layer stand alone.

    Where the layers between those two make whole groups, these follow each other from layer 1 on, as in the paper's
    model of 16 layers; else groups end before multiples of `group_size`, as in its models of 28 and 32. Left out it is
    2 for models of up to 16 layers, else 4, as in the paper; 1 drafts as the model itself does.

    Example:

    ```python
    >>> build_groups(10, 4)
    [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9]]
    >>> build_groups(12, 4)
    [[0], [1, 2, 3], [4, 5, 6, 7], [8, 9, 10], [11]]

    ```
    """
    default = SHALLOW_SIZE if num_layers <= SHALLOW else DEFAULT_SIZE
    group_size = default if group_size is None else group_size
    for name, value in (("num_layers", num_layers), ("group_size", group_size)):
        if value < 1:
            raise OptionError(f"`{name}` must be at least 1, but it is {value}.")
    is_even = (num_layers - 2) % group_size == 0
    groups, start = [[0]], 1
    while start < num_layers - 1:
        end = start + group_size if is_even else (start // group_size + 1) * group_size
        end = min(end, num_layers - 1)
        groups.append(list(range(start, end)))
        start = end
    return groups if num_layers == 1 else [*groups, [num_layers - 1]]


def check_groups(groups: Sequence[Sequence[int]], num_layers: int) -> None:
    """Refuse groups that do not divide the layers in their order, or that hold the first or last: [`OptionError`]."""
    remedy = "Leave `layer_groups` out to get the default ones."
    flat = [layer for group in groups for layer in group]
    missing, twice = sorted(set(range(num_layers)) - set(flat)), sorted({n for n in flat if flat.count(n) > 1})
    unknown = sorted(set(flat) - set(range(num_layers)))
    for reason, layers in (("leave out", missing), ("name twice", twice), ("name, though there is none,", unknown)):
        if layers:
            raise OptionError(
                f"`layer_groups` must hold each of the {num_layers} layers once, but they {reason} {layers}. {remedy}"
            )
    if flat != sorted(flat) or not all(groups):
        raise OptionError(
            "`layer_groups` must hold the layers in ascending order, without empty groups, but they are "
            f"{list(groups)}. {remedy}"
        )
    ends = [group for group in groups if len(group) > 1 and (0 in group or num_layers - 1 in group)]
    if ends:
        raise OptionError(
            f"The first and the last layer, 0 and {num_layers - 1}, must each be a group of its own, for drafts "
            f"suffer most from errors there, but `layer_groups` holds {ends[0]}. {remedy}"
        )
