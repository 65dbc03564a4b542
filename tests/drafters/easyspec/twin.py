"""The naive twin of the fused attention as a backend of tests: the layers of a group one after another."""

from typing import Any

from lab.layer_groups import in_order

IN_ORDER = "in order"  # the name of this twin, beside those of backends


def with_backend(drafter: Any, backend: str) -> Any:
    """The drafter with a backend of its own, or with the twin."""
    if backend == IN_ORDER:
        return in_order(drafter)
    drafter.config.backend = backend
    return drafter
