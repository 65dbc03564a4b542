"""The configuration of an MTP drafter: the sizes of its target, and the window of its layer."""

from huggingface_hub.dataclasses import strict

from ...errors import OptionError
from ..tree_drafting.configuration import PairConfig

READ = (-1,)  # the input of the head


@strict
class MtpConfig(PairConfig):
    """Configuration of [`MtpDrafter`]; what its layer is like stands in the target's own.

    It has the fields of [`~drafters.tree_drafting.configuration.PairConfig`]. `sliding_window` is that of the layer,
    `feature_layers` must be `[-1]`.

    Example:

    ```python
    >>> MtpConfig(hidden_size=64, num_attention_heads=4).feature_layers
    (-1,)

    ```
    """

    model_type = "mtp_spec"

    def check(self) -> None:
        """Refuse options out of range."""
        super().check()
        if tuple(self.feature_layers) != READ:
            raise OptionError(
                "An MTP layer reads the input of the head, so `feature_layers` must be [-1], but they are "
                f"{list(self.feature_layers)}. Leave them out."
            )
