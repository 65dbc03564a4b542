"""How a diffusion model fills in masks behind texts, round after round.

What is kept of keys and values depends on who sees whom: all of the text where nothing in it sees masks, whole blocks
of a grid, nothing where all see all. New text and masks of all rows are read in one pass: a row's text stands in the
first slots of a cache and its masks behind it, where the next text is written over them; the last slot in sight takes
what nobody reads.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel

from ...core.masks import additive
from ...generation.capture.graph import batched_experts
from ...generation.slot_cache import EXACT, SlotCache
from ...generation.tree_attention import tree_attention
from ...transformers_versions import cache_name
from ..config_fields import context_of
from ..tree_drafting.text import GROWTH

if TYPE_CHECKING:
    from .drafter import DiffusionDrafter


_HEADS = ("logits_to_keep", "num_logits_to_keep")  # what models call the number of last rows that the head reads


@dataclass(frozen=True)
class ModelCall:
    """One pass over a text."""

    token_ids: Tensor  # [rows, tokens] to be read
    positions: Tensor  # [rows, tokens] in the text
    allowed: Tensor  # [rows, tokens, slots] what each token sees, cached slots first
    cache: Any | None  # keys and values of what was read before; those of all these tokens are added
    num_rows: int  # rows of logits that are asked for, the last ones

    def arguments(self, model: PreTrainedModel) -> dict[str, Any]:
        """Arguments of the forward of this model, with the mask in its type."""
        return {
            "input_ids": self.token_ids,
            "attention_mask": additive(self.allowed, model.dtype),
            "position_ids": self.positions,
            cache_name(model.forward): self.cache,
            "use_cache": self.cache is not None,
        }

    def logits(self, model: PreTrainedModel) -> Tensor:
        """Logits `[rows, num_rows, vocab]` in float32 over the model's ids."""
        known = inspect.signature(model.forward).parameters
        heads = {name: self.num_rows for name in _HEADS if name in known}
        outputs = model(**self.arguments(model), **heads)
        logits: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs.logits  # as the model's config says
        return logits[:, -self.num_rows :].float()


def visible(
    attention: str,
    num_committed: int | Int[Tensor, "rows 1 1"],
    block_size: int | None,
    queries: Int[Tensor, "*rows queries"],
    keys: Int[Tensor, "*rows keys"],
) -> Bool[Tensor, "*rows queries keys"]:
    """Which keys each query sees, both given as positions in the text; masks stand from `num_committed` on.

    `attention` and `block_size` are those of [`DiffusionConfig`].

    ```python
    >>> positions = torch.arange(4)
    >>> visible("prefix_causal", 2, None, positions, positions).int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]

    ```
    """
    queries, keys = queries[..., :, None], keys[..., None, :]
    if attention == "full":
        return torch.ones_like(keys + queries, dtype=torch.bool)
    if attention == "prefix_causal":
        return (keys <= queries) | (queries >= num_committed)

    assert block_size is not None  # the configuration sees to it
    return keys // block_size <= queries // block_size


def surest_first(
    read: Callable[[Tensor], Tensor], block: Tensor, nums: Tensor, num_steps: int, num_passes: int
) -> Tensor:
    """Scores `[rows, positions, vocab]` of the first `nums` `[rows, 1]` positions of `block` `[rows, positions]`.

    With several passes every position keeps the scores of the last pass in which it was masked; between passes the
    surest of those that are still masked are committed, as many in each (arXiv 2510.02358, section 3.1, which leaves
    both open): as many as the `num_steps` take where a row's positions are shared out among them. `read` makes scores
    of a block. Nothing is asked of the host.
    """
    is_masked = torch.arange(block.shape[1], device=block.device) < nums
    num_each = -(-nums // num_steps)
    found = read(block)
    for _ in range(num_passes - 1):
        is_left = is_masked.sum(-1, keepdim=True) > num_each
        sure = found.log_softmax(-1).amax(-1).masked_fill(~is_masked, -torch.inf)
        ranks = sure.argsort(dim=-1, descending=True).argsort(dim=-1)
        is_chosen = (ranks < num_each) & is_masked & is_left
        block = found.argmax(-1).where(is_chosen, block)
        is_masked = is_masked & ~is_chosen
        found = read(block).where((is_masked & is_left)[..., None], found)

    return found


class DenoisedTexts:
    """What a diffusion model keeps of the texts of all rows, and how it reads them on."""

    def __init__(self, drafter: "DiffusionDrafter", num_rows: int, num_slots: int) -> None:
        config = drafter.config
        self.model: Any = drafter.model
        self.device = drafter.device
        self.attention = config.attention
        self.block_size = config.block_size
        self.shift = config.logits_shift
        self.mask_token_id = config.mask_token_id
        self.most_positions = config.num_draft_tokens
        self.num_read = [0] * num_rows  # tokens of each row whose keys and values are kept
        self.cache: SlotCache | None = None
        if self.attention != "full":
            num_layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
            self.cache = SlotCache(num_layers, num_rows, EXACT.slots(num_slots), self.device)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self.num_read = [self.num_read[row] for row in rows]
        if self.cache is not None:
            self.cache.select(list(rows))

    def scores(
        self, texts: Sequence[Tensor], nums: Sequence[int], num_steps: int, scored: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Scores `[rows, positions, vocab]` of the positions behind each row's text, of which there are `nums`.

        `scored` makes scores of logits.
        """
        num_passes = max(-(-num // -(-num // num_steps)) for num in nums if num)
        wanted = torch.tensor(nums, device=self.device)[:, None]
        block = torch.full((len(nums), max(nums)), self.mask_token_id or 0, dtype=torch.long, device=self.device)
        return surest_first(
            lambda ids: scored(self._read_unread(texts, nums, ids)), block, wanted, num_steps, num_passes
        )

    def _read_unread(self, texts: Sequence[Tensor], nums: Sequence[int], block: Tensor) -> Tensor:
        """Read what is not kept of texts, the newest token always, and a block behind them: its logits."""
        counts = []  # of each row the tokens that are kept, the new ones, and the positions
        for text, num_read, num in zip(texts, self.num_read, nums, strict=True):
            start = min(num_read, len(text) - 1)
            counts.append((start, len(text) - start, num))

        given = texts[0].new_zeros(len(texts), max(num_new for _, num_new, _ in counts))
        for row, text in enumerate(texts):
            start, num_new, _ = counts[row]
            given[row, -num_new:] = text[start:]

        ends = list(map(len, texts))
        logits = self._read(self._shown(max(ends)), torch.tensor(counts).to(self.device), given.to(self.device), block)
        if self.cache is not None:
            grid = (self.block_size or 1) if self.attention == "block_causal" else 1
            self.num_read = [end - end % grid for end in ends]

        return logits

    def _read(self, shown: int, counts: Tensor, given: Tensor, block: Tensor) -> Tensor:
        """Logits of ids `[rows, positions]` behind tokens `given` `[rows, tokens]`, which are read, too.

        `counts` `[rows, 3]` are the tokens of a row before those, how many of them count, the last ones, and how many
        positions.
        """
        start, num_new, nums = counts.split(1, dim=-1)
        length = start + num_new
        num_masks = (nums - self.shift).clamp(min=0)

        masks = block[:, : max(block.shape[1] - self.shift, 0)]
        columns = torch.arange(-given.shape[1], masks.shape[1], device=self.device)
        is_read = (columns >= -num_new) & (columns < num_masks)
        positions = length + columns
        ids = torch.cat([given, masks], dim=-1)
        ids = ids.where(ids < self.model.config.vocab_size, 0)  # ones that the model lacks

        held = positions
        is_held = is_read
        if self.cache is not None:
            held = torch.arange(shown, device=self.device).expand(len(ids), -1)
            is_held = held < length + num_masks
            behind = start + torch.arange(self.most_positions + 1, device=self.device)
            self.cache.forget(behind.clamp(max=shown - 1))
            self.cache.see(shown)
            self.cache.view.write_to(positions.where(is_read, shown - 1))

        allowed = visible(self.attention, length[..., None], self.block_size, positions, held) & is_held[:, None]
        call = ModelCall(ids, positions.where(is_read, 0), allowed, self.cache, max(block.shape[1], 1))
        with tree_attention(self.model), batched_experts(self.model):
            return call.logits(self.model)

    def _shown(self, num_tokens: int) -> int:
        """The slots that a pass must see of a text of so many tokens; the cache grows to hold them."""
        shown = EXACT.slots(num_tokens + self.most_positions + 1)
        if self.cache is not None and shown > self.cache.capacity:
            self.cache.grow(max(shown, int(GROWTH * self.cache.capacity)))

        return shown


def most_behind(drafter: "DiffusionDrafter", num_committed: int) -> int:
    """Most tokens of a draft behind a text of this length: to the end of its block on the grid or the context."""
    config = drafter.config
    most = config.num_draft_tokens
    shift = config.logits_shift
    context = context_of(drafter.model.config)
    if context is not None:
        most = min(most, context - num_committed + shift)

    if config.attention == "block_causal":
        block_size = config.block_size or 1  # the configuration sees to it that there is one
        most = min(most, block_size - num_committed % block_size + shift)

    return max(most, 0)
