"""How a diffusion model fills in masks behind texts, round after round.

What is kept of keys and values depends on who sees whom: all of the text where nothing in it sees masks, whole blocks
of a grid, nothing where all see all. New text and masks of all rows are read in one pass: a row's text stands in the
first slots of a cache and its masks behind it, where the next text is written over them; the last slot in sight takes
what nobody reads.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel

from ...core.masks import additive
from ...generation.capture.graph import MemoryPool, RepeatedWork, batched_experts
from ...generation.shapes import Shapes
from ...generation.slot_cache import SlotCache
from ...generation.tree_attention import tree_attention
from ...transformers_versions import cache_name
from ..config_fields import context_of
from ..tree_drafting.text import GROWTH, MOST_DRAFTS
from .search import Lattice

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


_SETTINGS = (  # that decide the work, besides weights
    *("logits_shift", "num_draft_tokens", "mask_token_id", "mass", "max_candidates"),
    *("vocab_size", "draft_vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"),
)


@dataclass(frozen=True)
class DenoisingPasses:
    """What a draft is made by, besides the model."""

    num: int
    scored: Callable[[Tensor], Tensor]  # scores [rows, positions, vocab] of logits
    pruned: Callable[[Tensor], Lattice]  # candidates of scores
    end_ids: tuple[int, ...]  # tokens that end the text
    draws: Any  # what work holds of draws to come, which are in the scores


class DenoisedTexts:
    """What a diffusion model keeps of the texts of all rows, and how it reads them on.

    With exact shapes everything is as large as the texts ask for, and work simply runs. With buckets tensors stay
    where they are, so that work on them can be repeated, also in later calls. Nothing here holds drafter or target:
    work gets them when it runs.
    """

    def __init__(
        self, drafter: "DiffusionDrafter", num_rows: int, num_slots: int, shapes: Shapes, most_kept: int = 1
    ) -> None:
        config = drafter.config
        device = drafter.device
        self.shapes = shapes
        self.most_kept = most_kept  # tokens of a row in a step, as a rule
        self.made_for = made_for(drafter, num_rows, most_kept)
        self.attention = config.attention
        self.block_size = config.block_size
        self.shift = config.logits_shift
        self.most_positions = config.most_draft_tokens
        self.num_candidates = min(config.max_candidates, config.vocab_size)
        self.num_read = [0] * num_rows  # tokens of each row whose keys and values are kept
        self.cache: SlotCache | None = None
        if self.attention != "full":
            num_layers = drafter.model.config.get_text_config(decoder=True).num_hidden_layers
            self.cache = SlotCache(num_layers, num_rows, shapes.slots(num_slots), device)
        with torch.inference_mode(False):  # what repeated work reads
            self.counts = torch.zeros(num_rows, 3, dtype=torch.long, device=device)
            self.given = torch.zeros(num_rows, most_kept, dtype=torch.long, device=device)
        self._pool = MemoryPool()
        self._work: dict[Any, tuple[RepeatedWork, Tensor]] = {}  # and what it reports

    @property
    def device(self) -> torch.device:
        """Where texts are read."""
        return self.given.device

    @property
    def repeated(self) -> list[RepeatedWork]:
        """All work that is held."""
        return [work for work, _ in self._work.values()]

    def begin(self, drafter: "DiffusionDrafter", texts: Sequence[Tensor]) -> None:
        """Forget earlier texts, and read these up to their newest tokens."""
        assert self.cache is not None  # buffers are for texts that are kept
        self.cache.clear()
        self.num_read = [0] * len(texts)
        self._read_text(drafter, texts)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self.num_read = [self.num_read[row] for row in rows]
        if self.cache is not None:
            self.cache.select(list(rows))

    def lattices(
        self, drafter: "DiffusionDrafter", texts: Sequence[Tensor], nums: Sequence[int], passes: DenoisingPasses
    ) -> list[Lattice]:
        """The candidates of each row's positions behind its text, of which there are `nums`; the host waits once."""
        lengths = [len(text) for text in texts]
        if self.shapes.is_exact:
            num_passes = max(-(-num // -(-num // passes.num)) for num in nums if num)
            wanted = torch.tensor(nums, device=self.device)[:, None]
            read = partial(self._read_unread, drafter, texts, lengths, nums)
            report = self._denoised(drafter, wanted, max(nums), num_passes, passes, read)
        else:
            if max(len(text) - num_read for text, num_read in zip(texts, self.num_read, strict=True)) > self.most_kept:
                self._read_text(drafter, texts)
            counts, given = self._unread(texts, lengths, nums)
            self.counts.copy_(counts)
            self.given[:, -given.shape[1] :].copy_(given)
            shown = self._shown(max(lengths))
            work, report = self._held((shown, passes.num, passes.draws))
            work.run(lambda: self._denoise(drafter, shown, passes, report))
            self.num_read = lengths

        num = self.num_candidates
        lattices = []
        for row, num_positions in zip(report.cpu(), nums, strict=True):
            token_ids, log_probs, kept, ends = row[:num_positions].split((num, num, 1, 1), dim=-1)
            lattices.append(Lattice(passes.end_ids, token_ids.long(), log_probs, kept[:, 0].long(), ends[:, 0]))
        return lattices

    def _denoise(self, drafter: "DiffusionDrafter", shown: int, passes: DenoisingPasses, report: Tensor) -> None:
        """Fill in all positions behind the text that was handed in; the work that is repeated."""
        read = partial(self._read, drafter, shown, self.counts, self.given)
        report.copy_(self._denoised(drafter, self.counts[:, 2:], self.most_positions, passes.num, passes, read))

    def _denoised(
        self,
        drafter: "DiffusionDrafter",
        nums: Tensor,
        most: int,
        num_passes: int,
        passes: DenoisingPasses,
        read: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """The candidates of `nums` `[rows, 1]` positions, `most` at most, side by side as numbers."""
        mask = drafter.config.mask_token_id or 0
        block = torch.full((len(nums), most), mask, dtype=torch.long, device=nums.device)
        scores = surest_first(lambda ids: passes.scored(read(ids)), block, nums, passes.num, num_passes)
        found = passes.pruned(scores)
        parts = (found.token_ids, found.log_probs, found.num[..., None], found.end_log_probs[..., None])
        return torch.cat([part.float() for part in parts], dim=-1)

    def _read_text(self, drafter: "DiffusionDrafter", texts: Sequence[Tensor]) -> None:
        """Read texts up to their newest tokens, and no masks."""
        ends = [len(text) - 1 for text in texts]
        self._read_unread(drafter, texts, ends, [0] * len(texts), self.given[:, :0])

    def _read_unread(
        self,
        drafter: "DiffusionDrafter",
        texts: Sequence[Tensor],
        ends: Sequence[int],
        nums: Sequence[int],
        block: Tensor,
    ) -> Tensor:
        """Read what is not kept of texts up to `ends`, and a block behind them: its logits."""
        logits = self._read(drafter, self._shown(max(ends)), *self._unread(texts, ends, nums), block)
        grid = (self.block_size or 1) if self.attention == "block_causal" else 1
        self.num_read = [0 if self.cache is None else end - end % grid for end in ends]
        return logits

    def _unread(self, texts: Sequence[Tensor], ends: Sequence[int], nums: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What is not kept of texts up to `ends`, the newest token always: counts and tokens, as a pass takes them."""
        starts = [min(num_read, end - 1) for num_read, end in zip(self.num_read, ends, strict=True)]
        num_new = [end - start for start, end in zip(starts, ends, strict=True)]
        given = texts[0].new_zeros(len(texts), max(num_new))
        for row, (text, start, end) in enumerate(zip(texts, starts, ends, strict=True)):
            given[row, start - end :] = text[start:end]
        return torch.tensor([starts, num_new, nums]).T.to(self.device), given.to(self.device)

    def _read(self, drafter: "DiffusionDrafter", shown: int, counts: Tensor, given: Tensor, block: Tensor) -> Tensor:
        """Logits of ids `[rows, positions]` behind tokens `given` `[rows, tokens]`, which are read, too.

        `counts` `[rows, 3]` are the tokens of a row before those, how many of them count, the last ones, and how many
        positions.
        """
        model = drafter.model
        device = counts.device
        start, num_new, nums = counts.split(1, dim=-1)
        length = start + num_new
        num_masks = (nums - self.shift).clamp(min=0)

        masks = block[:, : max(block.shape[1] - self.shift, 0)]
        columns = torch.arange(-given.shape[1], masks.shape[1], device=device)
        is_read = (columns >= -num_new) & (columns < num_masks)
        positions = length + columns
        ids = torch.cat([given, masks], dim=-1)
        ids = ids.where(ids < model.config.vocab_size, 0)  # ones that the model lacks

        held = positions
        is_held = is_read
        if self.cache is not None:
            held = torch.arange(shown, device=device).expand(len(ids), -1)
            is_held = held < length + num_masks
            behind = start + torch.arange(self.most_positions + 1, device=device)
            self.cache.forget(behind.clamp(max=shown - 1))
            self.cache.see(shown)
            self.cache.view.write_to(positions.where(is_read, shown - 1))

        allowed = visible(self.attention, length[..., None], self.block_size, positions, held) & is_held[:, None]
        call = ModelCall(ids, positions.where(is_read, 0), allowed, self.cache, max(block.shape[1], 1))
        with tree_attention(model), batched_experts(model):
            return call.logits(model)

    def _shown(self, num_tokens: int) -> int:
        """The slots that work must see of a text of so many tokens; the cache grows to hold them."""
        shown = self.shapes.slots(num_tokens + self.most_positions + 1)
        if self.cache is not None and shown > self.cache.capacity:
            self._work = {}
            self.cache.grow(max(shown, int(GROWTH * self.cache.capacity)) if self.shapes.is_exact else shown)
        return shown

    def _held(self, key: Any) -> tuple[RepeatedWork, Tensor]:
        """The work of this key, and where it reports; what was not used for longest is dropped."""
        found = self._work.pop(key, None)
        if found is None:
            shape = (len(self.given), self.most_positions, 2 * self.num_candidates + 2)
            with torch.inference_mode(False):
                report = torch.zeros(shape, dtype=torch.float, device=self.device)
            found = RepeatedWork(self.device, pool=self._pool), report
        self._work[key] = found
        while len(self._work) > MOST_DRAFTS:
            del self._work[next(iter(self._work))]
        return found


def made_for(drafter: "DiffusionDrafter", num_rows: int, most_kept: int) -> Any:
    """What buffers depend on besides the length of texts and the weights."""
    settings = [repr(getattr(drafter.config, name)) for name in _SETTINGS]
    return num_rows, most_kept, drafter.device, drafter.dtype, settings


def most_behind(drafter: "DiffusionDrafter", num_committed: int) -> int:
    """Most tokens of a draft behind a text of this length: to the end of its block on the grid or the context."""
    config = drafter.config
    most = config.most_draft_tokens
    shift = config.logits_shift
    context = context_of(drafter.model.config)
    if context is not None:
        most = min(most, context - num_committed + shift)
    if config.attention == "block_causal":
        block_size = config.block_size or 1  # the configuration sees to it that there is one
        most = min(most, block_size - num_committed % block_size + shift)
    return max(most, 0)
