"""Boolean attention masks, and the additive form in which models take them."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def block_ends(
    positions: Int[Tensor, "... queries"], block_size: int, phase: Int[Tensor, "..."]
) -> Int[Tensor, "... queries"]:
    """The last position of the block that each position is in, where the first block starts at `phase`."""
    return positions + (phase[..., None] - 1 - positions) % block_size


def block_causal_mask(
    ends: Int[Tensor, "... queries"], key_positions: Int[Tensor, "... keys"]
) -> Bool[Tensor, "... queries keys"]:
    """Falcon's relaxed causal mask: a query sees everything up to the end of its own block, so both ways inside it."""
    return key_positions[..., None, :] <= ends[..., :, None]


def within_reach(
    allowed: Bool[Tensor, "rows queries keys"],
    query_positions: Int[Tensor, "rows queries"],
    key_positions: Int[Tensor, "rows keys"],
    sliding_window: int | None = None,
    chunk_size: int | None = None,
) -> Bool[Tensor, "rows queries keys"]:
    """What is left of `allowed` in a layer that sees only so far.

    A query sees `sliding_window` positions, its own included, and those of its own chunk of `chunk_size` positions,
    counted from position 0.
    """
    query = query_positions[:, :, None]
    key = key_positions[:, None, :]
    if sliding_window is not None:
        allowed = allowed & (key > query - sliding_window)

    if chunk_size is not None:
        allowed = allowed & (key // chunk_size == query // chunk_size)

    return allowed


def tree_mask(
    ancestor_mask: Bool[Tensor, "rows nodes nodes"],
    node_positions: Int[Tensor, "rows nodes"],
    cached_positions: Int[Tensor, "rows cached"],
    is_cached: Bool[Tensor, "rows cached"],
    sliding_window: int | None = None,
    chunk_size: int | None = None,
) -> Bool[Tensor, "rows nodes keys"]:
    """The tree mask: each node sees the text in the cache, its ancestors and itself, within its window and chunk.

    `ancestor_mask` is [`DraftTree.ancestor_mask`], `cached_positions` are those of the tokens in the slots, and
    `is_cached` is False at holes. Windows and chunks are those of [`within_reach`], counted from position 0, the row's
    first real token.
    """
    rows, nodes, _ = ancestor_mask.shape
    allowed = torch.cat([is_cached[:, None].expand(rows, nodes, -1), ancestor_mask], dim=-1)
    positions = torch.cat([cached_positions, node_positions], dim=-1)
    return within_reach(allowed, node_positions, positions, sliding_window, chunk_size)


def additive(mask: Bool[Tensor, "rows queries keys"], dtype: torch.dtype) -> Float[Tensor, "rows 1 queries keys"]:
    """The form in which attention adds a mask to its scores: 0 where true, the type's lowest number elsewhere."""
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill_(~mask, torch.finfo(dtype).min).unsqueeze(1)


def slot_mask(
    ancestor_mask: Bool[Tensor, "rows nodes nodes"],
    depths: Int[Tensor, "rows nodes"],
    lengths: Int[Tensor, "rows 1"],
    num_slots: int,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    first_positions: Int[Tensor, "rows 1"] | int = 0,
) -> Bool[Tensor, "rows nodes {num_slots}"]:
    """[`tree_mask`] over slots of fixed number: a row's text stands in its first `lengths` slots, its nodes behind it.

    `first_positions` are those of the tokens in slot 0. Shapes do not depend on how long the text is, and nothing is
    asked of the host.
    """
    nodes = depths.shape[1]
    slots = torch.arange(num_slots, device=lengths.device)
    behind = slots - lengths  # [rows, slots] the node that stands in a slot
    node = behind.clamp(0, nodes - 1)
    is_node = (behind >= 0) & (behind < nodes)
    ancestors = ancestor_mask.expand(len(lengths), -1, -1).gather(2, node[:, None].expand(-1, nodes, -1))
    allowed = (behind < 0)[:, None] | (ancestors & is_node[:, None])
    if sliding_window is None and chunk_size is None:
        return allowed  # one kernel less for each of these in a captured step

    node_positions = lengths + depths
    positions = torch.where(is_node, node_positions.gather(1, node), slots.expand_as(behind))
    if chunk_size is not None:  # windows do not notice
        node_positions, positions = node_positions + first_positions, positions + first_positions

    return within_reach(allowed, node_positions, positions, sliding_window, chunk_size)
