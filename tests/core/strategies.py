"""What hypothesis draws: shapes of trees."""

from hypothesis import settings
from hypothesis import strategies as st

few = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def parent_lists(draw: st.DrawFn, max_nodes: int = 14) -> list[int]:
    """Parents of a random tree, root first."""
    num_nodes = draw(st.integers(1, max_nodes))
    return [-1] + [draw(st.integers(0, node - 1)) for node in range(1, num_nodes)]
