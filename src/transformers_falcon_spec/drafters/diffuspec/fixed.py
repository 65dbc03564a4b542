"""Denoising in fixed shapes: new text and masks of all rows in one pass, and of it the candidates for the search.

A row's text stands in the first slots of a cache and its masks behind it, where the next text is written over them.
The last slot in sight takes what nobody reads.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from ...generation.static.graph import MemoryPool, RepeatedWork
from ...generation.static.slot_cache import SlotCache
from ...generation.static.state import shown_slots
from ...generation.static.target import batched_experts
from ...generation.tree_attention import tree_attention
from ..tree_drafting.fixed import LEAST_WAITING, MOST_DRAFTS
from .calls import ModelCall
from .denoising import DenoisedRow, surest_first
from .lattice import Lattice

if TYPE_CHECKING:
    from .modeling_diffuspec import DiffusionDrafter

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
        shown = shown_slots(num_tokens + self.most_positions + 1)
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
