"""How large the tensors of a step are: as large as it takes, or one of a few sizes, so that captured work repeats."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import GenerationError

NODE_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512)
DEPTH_BUCKETS = (0, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Shapes:
    """The sizes of all that is read at once."""

    is_exact: bool
    least_slots: int

    def slots(self, num: int) -> int:
        """The slots that attention sees if it must see `num`: a multiple of `least_slots`, or that doubled."""
        if self.is_exact:
            return -(-num // self.least_slots) * self.least_slots

        slots = self.least_slots
        while slots < num:
            slots *= 2
        return slots

    def nodes(self, num: int) -> int:
        """The nodes to which a tree of `num` is filled up."""
        return num if self.is_exact else _bucket(num, NODE_BUCKETS)

    def depth(self, num: int) -> int:
        """The depth to which a tree of depth `num` is walked."""
        return num if self.is_exact else _bucket(num, DEPTH_BUCKETS)

    def columns(self, num: int, buckets: Sequence[int]) -> int:
        """The columns in which `num` pairs that wait are read; `buckets` ascend, and their last one holds all."""
        return num if self.is_exact else _bucket(num, buckets)


EXACT = Shapes(is_exact=True, least_slots=64)
BUCKETS = Shapes(is_exact=False, least_slots=256)


def _bucket(size: int, buckets: Sequence[int]) -> int:
    """The least of the buckets that holds so many."""
    for bucket in buckets:
        if bucket >= size:
            return bucket
    raise GenerationError(
        f"A captured draft must have at most {buckets[-1]} nodes, and its tree that depth, but there are "
        f"{size}. Let the drafter keep to `budget.num_nodes`, or set `drafter.generation_config.capture = False`."
    )
