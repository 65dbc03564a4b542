"""Attention of a group of layers, each on a process of its own; everything else is computed by all of them."""

from collections.abc import Sequence

from torch import Tensor

from ...errors import OptionError
from ...generation.distributed import Processes
from .backends import Backend
from .families import Inputs, LayeredModel


class DistributedBackend(Backend):
    """The layers of a group on several processes, each of which has the whole model; one exchange for each group.

    Of a group each process takes the same number of layers, in their order, the last ones maybe fewer or none. Only it
    has their drafted keys and values; what was read exactly is on every process.
    """

    def __init__(self, layered: LayeredModel, groups: Sequence[Sequence[int]], processes: Processes) -> None:
        super().__init__(layered, groups)
        self.processes, num_layers = processes, len(layered.layers)
        if processes.num > num_layers:
            raise OptionError(
                f"There must be no more processes than layers, but {processes.num} processes are to draft with a "
                f"model of {num_layers} layers. Start fewer processes, or set "
                '`drafter.config.backend = "fused"` on all of them.'
            )

    def attend(self, number: int, states: Tensor, inputs: Inputs) -> Sequence[Tensor]:
        """The attention of a group's layers, each computed by one process."""
        group = self.groups[number]
        num_own = layers_per_process(len(group), self.processes.num)
        part = states.new_zeros(num_own, *states.shape)
        for offset, index in enumerate(group[self.processes.process_rank * num_own :][:num_own]):
            part[offset] = self.layered.attend(index, states, inputs)
        return self.processes.all_gather(part)[: len(group)].unbind()


def layers_per_process(group_size: int, num_processes: int) -> int:
    """How many layers of a group a process computes at most."""
    return -(-group_size // num_processes)
