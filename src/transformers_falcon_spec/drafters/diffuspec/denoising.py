"""How a diffusion model fills in masks behind a text, round after round, in growing and in fixed shapes.

What is kept of keys and values depends on who sees whom: all of the text where nothing in it sees masks, whole blocks
of a grid, nothing where all see all. In fixed shapes new text and masks of all rows are read in one pass: a row's
text stands in the first slots of a cache and its masks behind it, where the next text is written over them; the last
slot in sight takes what nobody reads.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from ...core.masks import additive
from ...generation.cache import drop_last
from ...generation.shapes import BUCKETS
from ...generation.static.graph import MemoryPool, RepeatedWork
from ...generation.static.slot_cache import SlotCache
from ...generation.static.target import batched_experts
from ...generation.tree_attention import tree_attention
from ...transformers_versions import cache_name
from ..config_fields import context_of
from ..tree_drafting.text import LEAST_WAITING, MOST_DRAFTS
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
    num_committed: int,
    block_size: int | None,
    queries: Int[Tensor, " queries"],
    keys: Int[Tensor, " keys"],
) -> Bool[Tensor, "queries keys"]:
    """Which keys each query sees, both given as positions in the text; masks stand from `num_committed` on.

    `attention` and `block_size` are those of [`DiffusionConfig`].

    ```python
    >>> positions = torch.arange(4)
    >>> visible("prefix_causal", 2, None, positions, positions).int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]

    ```
    """
    if attention == "full":
        return torch.ones(len(queries), len(keys), dtype=torch.bool, device=queries.device)
    if attention == "prefix_causal":
        return (keys <= queries[:, None]) | (queries >= num_committed)[:, None]
    assert block_size is not None  # the configuration sees to it
    return keys // block_size <= queries[:, None] // block_size


class DenoisedRow:
    """The diffusion model's side of one row."""

    def __init__(self, drafter: "DiffusionDrafter") -> None:
        self.drafter, self.config = drafter, drafter.config
        self.grid = (drafter.config.block_size or 1) if drafter.config.attention == "block_causal" else 1
        self.num_cached = 0  # tokens of the text whose keys and values are kept
        self._cache = None if self.config.attention == "full" else DynamicCache()

    def max_draft_tokens(self, num_committed: int) -> int:
        """Most tokens that fit behind a text of this length: to the end of its block on the grid or the context."""
        most, shift = self.config.most_draft_tokens, self.config.logits_shift
        context = context_of(self.drafter.model.config)
        if context is not None:
            most = min(most, context - num_committed + shift)
        if self.config.attention == "block_causal":
            most = min(most, self.grid - num_committed % self.grid + shift)
        return max(most, 0)

    def scores(self, text: Tensor, num_tokens: int, num_steps: int, scored: Callable[[Tensor], Tensor]) -> Tensor:
        """Scores `[num_tokens, vocab]` of `num_tokens` masks behind all committed tokens, `text` `[tokens]`.

        With several passes every position keeps the scores of the last pass in which it was masked; between passes the
        surest of those that are still masked are committed, as many in each (arXiv 2510.02358, section 3.1, which
        leaves both open). `scored` makes scores over the target's ids of logits.
        """
        block = torch.full((1, num_tokens), self.config.mask_token_id or 0, device=text.device)
        nums = torch.full((1, 1), num_tokens, device=text.device)
        num_passes = -(-num_tokens // -(-num_tokens // num_steps))
        return surest_first(lambda ids: scored(self._read(text, ids[0]))[None], block, nums, num_steps, num_passes)[0]

    @property
    def layers(self) -> list[Any]:
        """Keys and values that are kept, by layer."""
        return [] if self._cache is None else list(self._cache.layers)

    def read_text(self, text: Tensor) -> None:
        """Keep keys and values of all of `text` `[tokens]`, whose tokens see what stands before them and no masks."""
        self._crop(len(text))
        start, slots = self.num_cached, torch.arange(len(text), device=text.device)
        if start < len(text):
            allowed = slots <= slots[start:, None]
            ModelCall(text[None, start:], slots[None, start:], allowed[None], self._cache, 1).logits(
                self.drafter.model
            )
        self.num_cached = len(text)

    def _read(self, text: Tensor, block: Tensor) -> Tensor:
        """Logits `[block, vocab]` of a block behind the text; keys and values that hold in later rounds are kept."""
        config, num_committed = self.config, len(text)
        start = min(self.num_cached, num_committed - config.logits_shift)
        self._crop(start)
        fed = torch.cat([text[start:], block[: len(block) - config.logits_shift]])
        slots = torch.arange(start + len(fed), device=text.device)
        allowed = visible(config.attention, num_committed, config.block_size, slots[start:], slots)
        call = ModelCall(fed[None], slots[None, start:], allowed[None], self._cache, len(block))
        logits = call.logits(self.drafter.model)[0]
        if self._cache is not None:
            self.num_cached = len(slots)
            self._crop(num_committed - num_committed % self.grid)
        return logits

    def _crop(self, num_tokens: int) -> None:
        if self._cache is not None and self.num_cached > num_tokens:
            drop_last(self._cache, self.num_cached - num_tokens)
            self.num_cached = num_tokens


def surest_first(
    read: Callable[[Tensor], Tensor], block: Tensor, nums: Tensor, num_steps: int, num_passes: int
) -> Tensor:
    """Scores `[rows, positions, vocab]` of the first `nums` `[rows, 1]` positions of `block` `[rows, positions]`.

    `read` makes scores of a block, in which more tokens are committed with each of the `num_passes`. Those are as many
    as the `num_steps` take where a row's positions are shared out among them. Nothing is asked of the host.
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


_NUM_COUNTS = 3  # columns of what the host hands in, before a row's tokens: tokens read, tokens new, positions
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


class FixedDenoising:
    """Buffers of a fixed number of rows; they outlive a call, so that another generator may go on in them.

    Nothing here holds drafter or target: work gets them when it runs.
    """

    def __init__(self, readers: Sequence[DenoisedRow], most_kept: int, num_slots: int) -> None:
        config, device = readers[0].config, readers[0].drafter.device
        self.made_for = _made_for(readers, most_kept)
        self.most_positions, self.shift = config.most_draft_tokens, config.logits_shift
        self.num_candidates = min(config.max_candidates, config.vocab_size)
        self.widths = (most_kept, max(most_kept, LEAST_WAITING))  # tokens of the text that a pass can read
        self.cache = SlotCache(len(readers[0].layers), len(readers), num_slots, device)
        with torch.inference_mode(False):
            num_columns = _NUM_COUNTS + self.widths[-1]
            self.given = torch.zeros(len(readers), num_columns, dtype=torch.long, device=device)
        self.num_read: list[int] = []  # tokens of each row
        self._pool = MemoryPool()
        self._work: dict[Any, tuple[RepeatedWork, Tensor]] = {}  # and what it reports

    def fits(self, readers: Sequence[DenoisedRow], most_kept: int) -> bool:
        """Whether texts that were read as ever can go on here."""
        return bool(self.made_for == _made_for(readers, most_kept))

    def load(self, readers: Sequence[DenoisedRow]) -> None:
        """Begin with the texts that were read as ever."""
        self.num_read = [reader.num_cached for reader in readers]
        most, device = max(self.num_read), self.given.device
        self._shown(most)
        slots = torch.arange(most, device=device) - torch.tensor(
            [[most - num] for num in self.num_read], device=device
        )
        layers = zip(*(reader.layers for reader in readers), strict=True)
        self.cache.fill((_stacked(each, most) for each in layers), slots.clamp(min=-1))

    @property
    def repeated(self) -> list[RepeatedWork]:
        """All work that is held."""
        return [work for work, _ in self._work.values()]

    def lattices(
        self, drafter: "DiffusionDrafter", texts: Sequence[Tensor], nums: Sequence[int], passes: DenoisingPasses
    ) -> list[Lattice]:
        """The candidates of each row's positions behind its text, of which there are `nums`; the host waits once."""
        self._catch_up(drafter, texts)
        lengths = list(map(len, texts))
        self._give(texts, lengths, nums)
        shown = self._shown(max(lengths))
        work, report = self._held(("draft", shown, passes.num, passes.draws))
        work.run(lambda: self._denoise(drafter, shown, passes, report))
        num = self.num_candidates
        lattices = []
        for row, num_positions in zip(report.cpu(), nums, strict=True):
            token_ids, log_probs, kept, ends = row[:num_positions].split((num, num, 1, 1), dim=-1)
            lattices.append(Lattice(passes.end_ids, token_ids.long(), log_probs, kept[:, 0].long(), ends[:, 0]))
        return lattices

    def _denoise(self, drafter: "DiffusionDrafter", shown: int, passes: DenoisingPasses, report: Tensor) -> None:
        """Fill in the positions behind the text, and report their candidates; the work that is repeated."""
        nums = self.given[:, 2:_NUM_COUNTS]
        mask, shape = drafter.config.mask_token_id or 0, (len(nums), self.most_positions)
        block = torch.full(shape, mask, dtype=torch.long, device=nums.device)
        read = self._reading(drafter, self.widths[0], shown)
        scores = surest_first(lambda ids: passes.scored(read(ids)), block, nums, passes.num, passes.num)
        found = passes.pruned(scores)
        parts = (found.token_ids, found.log_probs, found.num[..., None], found.end_log_probs[..., None])
        report.copy_(torch.cat([part.float() for part in parts], dim=-1))

    def _reading(self, drafter: "DiffusionDrafter", width: int, shown: int) -> Callable[[Tensor], Tensor]:
        """What reads the newest `width` tokens given, and ids `[rows, positions]` behind them: logits of these."""
        device, shift, cache = self.given.device, self.shift, self.cache
        start, num_new, nums = self.given[:, :_NUM_COUNTS].split(1, dim=-1)
        lengths, columns = start + num_new, torch.arange(-width, 0, device=device)
        cache.forget((start + torch.arange(self.most_positions + 1, device=device)).clamp(max=shown - 1))

        def read(block: Tensor) -> Tensor:
            num_masks = max(block.shape[1] - shift, 0)
            offsets = torch.arange(num_masks, device=device)
            positions = torch.cat([lengths + columns, lengths + offsets], dim=-1)
            is_read = torch.cat([columns >= -num_new, offsets < nums - shift], dim=-1)
            ends = torch.cat([lengths + columns, (lengths + nums - shift - 1).expand(-1, num_masks)], dim=-1)
            ids = torch.cat([self.given[:, -width:], block[:, :num_masks]], dim=-1)
            ids = ids.where(ids < drafter.model.config.vocab_size, 0)  # ones that the model lacks
            cache.see(shown)
            cache.view.slots = positions.where(is_read, shown - 1)
            allowed = torch.arange(shown, device=device) <= ends[..., None]
            call = ModelCall(ids, positions.where(is_read, 0), allowed, cache, max(block.shape[1], 1))
            with tree_attention(drafter.model), batched_experts(drafter.model):
                return call.logits(drafter.model)

        return read

    def _catch_up(self, drafter: "DiffusionDrafter", texts: Sequence[Tensor]) -> None:
        """Read text until few enough tokens are new, the newest one of each row always among them."""
        few, most = self.widths
        while max(len(text) - read for text, read in zip(texts, self.num_read, strict=True)) > few:
            ends = [min(len(text) - 1, read + most) for text, read in zip(texts, self.num_read, strict=True)]
            self._give(texts, ends, [0] * len(texts))
            shown = self._shown(max(ends))
            work, _ = self._held(("read", shown))
            work.run(partial(self._read_text, drafter, shown))

    def _read_text(self, drafter: "DiffusionDrafter", shown: int) -> None:
        """Read new tokens and no masks; the work that is repeated."""
        self._reading(drafter, self.widths[-1], shown)(self.given[:, :0])

    def _give(self, texts: Sequence[Tensor], ends: Sequence[int], nums: Sequence[int]) -> None:
        """Hand in the tokens up to `ends` of each row that are not read, right-aligned; they count as read then."""
        given = torch.zeros(self.given.shape, dtype=torch.long)
        for row, (text, read, end, num) in enumerate(zip(texts, self.num_read, ends, nums, strict=True)):
            start = min(read, end - 1)
            given[row, :_NUM_COUNTS] = torch.tensor([start, end - start, num])
            given[row, start - end :] = text[start:end]
        self.given.copy_(given, non_blocking=True)
        self.num_read = list(ends)

    def _shown(self, num_tokens: int) -> int:
        """The slots that work must see of a text of so many tokens; the cache grows to hold them."""
        shown = BUCKETS.slots(num_tokens + self.most_positions + 1)
        if shown > self.cache.capacity:
            self._work = {}
            self.cache.grow(shown)
        return shown

    def _held(self, key: Any) -> tuple[RepeatedWork, Tensor]:
        """The work of this key, and where it reports; what was not used for longest is dropped."""
        found = self._work.pop(key, None)
        if found is None:
            shape = (len(self.given), self.most_positions, 2 * self.num_candidates + 2)
            with torch.inference_mode(False):
                report = torch.zeros(shape, dtype=torch.float, device=self.given.device)
            found = RepeatedWork(self.given.device, pool=self._pool), report
        self._work[key] = found
        while len(self._work) > MOST_DRAFTS:
            del self._work[next(iter(self._work))]
        return found


def _made_for(readers: Sequence[DenoisedRow], most_kept: int) -> Any:
    """What buffers depend on besides the length of texts and the weights."""
    layers = [(layer.keys[0, :, 0], layer.values[0, :, 0]) for layer in readers[0].layers]
    shapes = [(states.shape, states.dtype, states.device) for pair in layers for states in pair]
    return len(readers), most_kept, shapes, [repr(getattr(readers[0].config, name)) for name in _SETTINGS]


def _stacked(layers: Iterable[Any], num_slots: int) -> Any:
    """One layer of the caches of several rows as that of a batch, with empty slots in front of shorter ones."""
    pairs = [(layer.keys, layer.values) for layer in layers]
    keys, values = (
        torch.cat([functional.pad(each, (0, 0, num_slots - each.shape[-2], 0)) for each in states])
        for states in zip(*pairs, strict=True)
    )
    return SimpleNamespace(keys=keys, values=values)
