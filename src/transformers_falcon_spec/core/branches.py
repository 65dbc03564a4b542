"""Joins a chain of tokens to trees: tokens that a tree holds stay where they are, the others get new nodes."""

import torch
from jaxtyping import Int
from torch import Tensor

NOBODY = -2  # parent of no node, not even of a filler


def held_nodes(
    token_ids: Int[Tensor, "rows nodes"], parents: Int[Tensor, "rows nodes"], chain: Int[Tensor, "rows tokens"]
) -> Int[Tensor, "rows tokens"]:
    """The node that holds each token of a chain below the root; -1 from the first token on that none holds."""
    above = torch.zeros_like(chain[:, :1])
    held = [chain[:, :0]]

    for column in range(chain.shape[1]):
        wanted = chain[:, column : column + 1]
        is_it = (parents == above) & (token_ids == wanted)
        above = torch.where(is_it.any(1, keepdim=True), is_it.int().argmax(1, keepdim=True), NOBODY)
        held.append(above)

    return torch.cat(held, dim=1).clamp(min=-1)


def with_chain(
    token_ids: Int[Tensor, "rows nodes"],
    parents: Int[Tensor, "rows nodes"],
    chain: Int[Tensor, "rows tokens"],
    depth: int,
) -> tuple[Int[Tensor, "rows all"], Int[Tensor, "rows all"], Int[Tensor, "rows 1"]]:
    """Trees of `depth` at most with a node more for each token of a chain that they do not hold, the first ones first.

    A row's `chain` ends in -1 where it is shorter than others. There are as many new nodes as tokens of the chain, the
    last of them fillers, so that shapes do not depend on what is held. Returns tokens and parents of all nodes, and
    how many tokens of each row's chain its tree held.

    Example:

    ```python
    >>> token_ids, parents = torch.tensor([[5, 7, 8]]), torch.tensor([[-1, 0, 0]])
    >>> with_chain(token_ids, parents, torch.tensor([[7, 9, 9]]), depth=1)
    (tensor([[5, 7, 8, 9, 9, 5]]), tensor([[-1,  0,  0,  1,  3, -1]]), tensor([[1]]))

    ```
    """
    num_nodes = token_ids.shape[1]
    num_tokens = chain.shape[1]
    held = held_nodes(token_ids, parents, chain[:, :depth])
    num_held = (held >= 0).sum(1, keepdim=True)

    steps = torch.arange(num_tokens, device=chain.device)
    columns = num_held + steps  # of the chain, by new node
    is_new = columns < (chain >= 0).sum(1, keepdim=True)
    added = chain.gather(1, columns.clamp(max=num_tokens - 1)).where(is_new, token_ids[:, :1])

    root_and_held = torch.cat([torch.zeros_like(num_held), held], dim=1)
    last_held = root_and_held.amax(1, keepdim=True)  # a child comes after its parent
    above = torch.where(steps == 0, last_held, num_nodes + steps - 1).where(is_new, -1)
    return torch.cat([token_ids, added], dim=1), torch.cat([parents, above], dim=1), num_held
