"""Attention of a group of layers, each on a process of its own; everything else is computed by all of them."""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from ...errors import OptionError
from ...generation.distributed import Processes, named_options
from ...provenance import weights_fingerprint
from .backends import SequentialBackend
from .families import Inputs, LayeredModel


class DistributedBackend(SequentialBackend):
    """The layers of a group on several ranks, each of which has the whole model; one exchange for each group.

    Of a group each rank takes the same number of layers, in their order, the last ranks maybe fewer or none. Only it
    has their drafted keys and values; what was read exactly is on every rank.

    Raises:
        [`OptionError`]: more ranks than layers.
    """

    def __init__(self, layered: LayeredModel, groups: Sequence[Sequence[int]], ranks: Processes) -> None:
        super().__init__(layered, groups)
        self.ranks, num_layers = ranks, len(layered.layers)
        if ranks.num > num_layers:
            raise OptionError(
                f"There must be no more ranks than layers, but {ranks.num} ranks are to draft with a model of "
                f"{num_layers} layers. Start "
                'fewer processes, or set `drafter.config.backend = "fused"` on all of them.'
            )

    def checked(self, drafter: PreTrainedModel) -> Processes:
        """The ranks, if all of them have this drafter.

        Raises:
            [`DistributedError`]: their weights or options differ, or one of them did not come.
        """
        options = {**named_options(drafter.config), **named_options(drafter.generation_config)}
        self.ranks.check_same({"drafter weights": weights_fingerprint(drafter), **options})
        return self.ranks

    def attend(self, number: int, states: Tensor, inputs: Inputs) -> Sequence[Tensor]:
        """The attention of a group's layers, each computed by one process."""
        group = self.groups[number]
        num_own = layers_of_rank(len(group), self.ranks.num)
        part = states.new_zeros(num_own, *states.shape)
        for offset, index in enumerate(group[self.ranks.process_rank * num_own :][:num_own]):
            part[offset] = self.layered.attend(index, states, inputs)
        return self.ranks.all_gather(part)[: len(group)].unbind()


def layers_of_rank(group_size: int, num_ranks: int) -> int:
    """How many layers of a group a rank computes at most."""
    return -(-group_size // num_ranks)
