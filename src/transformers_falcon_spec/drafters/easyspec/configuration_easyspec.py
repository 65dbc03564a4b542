"""The configuration of an EasySpec drafter: its model, and which layers compute attention at once."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from ...core.tree import DraftTree
from ...errors import OptionError
from ..tree_drafting.temperatures import check_temperatures
from ..whole_model_config import WholeModelConfig
from .families import check_family
from .groups import build_groups, check_groups

BACKENDS = ("sequential", "fused", "distributed")


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
            `"sequential"` computes the attention of a group layer by layer; `"fused"` all at once, with the same
            results to rounding; `"distributed"` spreads them over the processes that `torchrun` started, all of which
            must make the same calls.
        timeout_seconds (`float`, *optional*, defaults to 120): How long processes wait for each other, where there are
            several.
        calibrate (`bool`, *optional*, defaults to `True`):
            An ablation if `False`: only prompts are read exactly, text that is new in a step like what is drafted.
        whole_layers (`bool`, *optional*, defaults to `False`):
            An ablation if `True`: MLPs read the older input, too, so that the layers of a group run at once as a
            whole.
        draft_tree (`dict`, *optional*): `{"parents": [...], "ranks": [...]}`; the static tree; None is a chain.
        confidence_temperatures (`dict`, *optional*): How far trees that grow trust its probabilities, by depth; see
            `PairConfig` of Falcon and Eagle.

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
    calibrate: bool = True
    whole_layers: bool = False
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
        if self.backend == "distributed" and not self.calibrate:
            raise OptionError(
                '`calibrate=False` is not for `backend="distributed"`, where only one process has what it read '
                "roughly. Take another one."
            )
        if self.draft_tree is not None:
            DraftTree.from_json(self.draft_tree)
        check_temperatures(self.confidence_temperatures, block_size=1)
