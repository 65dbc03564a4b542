"""The target that reads trees in shapes of a few fixed sizes, so that a forward can be captured and repeated."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ...core.masks import additive, slot_mask
from ...core.tree import DraftTree
from ...transformers_versions import CACHE
from .. import cache as cache_file
from ..inputs import tensors_in
from ..model_parts import masks_by_kind
from ..modes import attribute_set
from ..sequence_batch import SequenceBatch
from ..stock_slots import StockSlots
from ..target import Form, Target, TargetOutput
from ..target_look import look_at
from ..tree_attention import tree_attention
from . import graph
from .acceptance import DeviceAcceptance
from .compile import compiled_read
from .eligibility import BUSY, NO_MEMORY, state_key, why_host_chooses
from .state import LEAST_SLOTS, MOST_AHEAD, StaticState, TreeBuffers, occupy, release, shown_slots, state_of, vacate

NO_ROOM = "No memory was left for a second copy of keys and values, so what is kept for later calls is freed."


class StaticTarget(Target):
    """A [`Target`] whose trees are read behind the text of each row in a cache of fixed size.

    The prompt is read as ever, into the dynamic cache of the call; its states move to the slots of a static one with
    `enter`, and back when the block of `released` ends, if anybody gets that cache.
    """

    state: StaticState | None = None
    _is_returned: bool  # whether the caller has the dynamic cache after the call
    _num_prompt: list[int]
    _num_logits: int  # of a token
    _num_read = 0  # nodes of the tree read last, fillers included

    def enter(self, batch: SequenceBatch, config: GenerationConfig, num_logits: int) -> str | None:
        """Let the text go on in fixed shapes; the reason in words if it cannot."""
        look = look_at(self.model)
        reason = self._why_not(self.max_tokens, look.foreign)
        if reason is None and not occupy(self.model):
            reason = BUSY
        if reason is not None:
            super().enter(batch, config, num_logits)
            return reason
        self._num_logits = num_logits
        try:
            state = self._moved_in(self.max_tokens, look.key)
            self.choice_reason = why_host_chooses(batch)
            if self.choice_reason is None:
                self.acceptance = DeviceAcceptance(state, batch, num_logits)
        except BaseException as error:
            vacate(self.model)
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            release(self.model)
            super().enter(batch, config, num_logits)
            return NO_MEMORY
        cache_file.empty(self.cache)  # until `leave`, so that the text has one copy of its states
        is_users = getattr(self.cache, "_is_user_defined", False)  # which `generate` sets
        self.state, self._is_returned = state, bool(config.return_dict_in_generate) or is_users
        return None

    def _why_not(self, max_length: int, foreign: str) -> str | None:
        """Why the text that was prefilled cannot go on in fixed shapes, in words; None if it can."""
        layers: list[Any] = self.cache.layers
        odd = {type(layer).__name__ for layer in layers} - {"DynamicLayer", "DynamicSlidingWindowLayer"}
        asked = " and ".join(f"`{name}`" for name in self._asked)
        inputs = self.inputs
        reasons = {
            f"the target has {foreign}, which a replay would leave out": bool(foreign),
            "layers of the target share keys and values": bool(getattr(self.config, "num_kv_shared_layers", 0)),
            f"layers of the target keep their states in a `{', '.join(odd)}`": bool(odd),
            "a layer of the target keeps no states of its own": not all(
                cache_file.num_held(self.cache, index) for index in range(len(layers))
            ),
            "the target takes no `position_ids`": not self._takes_position_ids,
            "the target's rotary frequencies switch with the length of the text": bool(self.switches),
            f"the call asks for {asked}": bool(asked),
            "the target takes more for each token than its id and position": bool(inputs.by_text or inputs.by_token),
            "the target takes more than its text": bool(tensors_in(inputs.constant)),
            "`attention_mask` leaves out tokens in the middle of the text": self.slots.has_gaps,
            "rows take different adapters": self.row_adapters.is_needed,
        }
        found = next((reason for reason, holds in reasons.items() if holds), None)
        return found or self._why_not_in_slots(max_length)

    def _moved_in(self, max_length: int, look_key: int) -> StaticState:
        """A state that holds the prompt's keys and values in the slots of its cache."""
        slots = self._slots_of_columns
        self._num_prompt = list(self._num_tokens)
        longest = max(self._num_tokens)
        capacity = shown_slots(min(max_length, longest + MOST_AHEAD) + LEAST_SLOTS // 2)
        lengths = torch.tensor([[num] for num in self._num_tokens], device=slots.device)
        offsets = self._position_ids.expand(*self._position_ids.shape[:-2], *lengths.shape) - lengths
        num_layers = len(self.cache.layers)
        changes = state_key(self.model, look_key, self.feature_hooks.feature_layers, self.inputs.constant)
        key = (len(lengths), offsets.shape, *changes)
        state = state_of(self.model, key, capacity, lambda: StaticState(num_layers, offsets, capacity))
        state.wait()
        state.offsets.copy_(offsets)
        state.is_open.fill_(True)
        self._is_open = [True] * len(lengths)
        state.cache.fill(self.cache.layers, slots)
        return state

    def noise_ahead(self, batch: SequenceBatch) -> Callable[[int, int], Tensor]:
        """The noise of coming draws by row and depth, in buffers that stay where they are."""
        if self.acceptance is not None:
            return self.acceptance.noise_ahead
        if self.state is None:
            return super().noise_ahead(batch)
        state, size, drawn = self.state, self._num_logits, batch.noise_ahead(self._num_logits)
        return lambda row, depth: state.noise_of(depth, size)[row].copy_(drawn(row, depth))

    def roots_of(self, batch: SequenceBatch) -> Tensor:
        """The newest token of each row, `[rows, 1]`."""
        return batch.roots if self.acceptance is None else self.acceptance.roots

    def read(
        self, token_ids: Tensor, tree: DraftTree, form: Form = "tree", is_open: Sequence[bool] = ()
    ) -> TargetOutput:
        """Read a tree behind each row's text; the next read of its size overwrites what it returns."""
        self.read_price = None
        if self.state is None:
            return super().read(token_ids, tree, form, is_open)
        self.feature_hooks.discard()
        num_nodes = token_ids.shape[1]
        state, buffers = self.state, self.state.tree(num_nodes)
        size = buffers.token_ids.shape[1]
        num_shown = shown_slots(max(self._num_tokens) + size)
        if num_shown > state.cache.capacity and not self._has_grown(state, num_shown):
            return super().read(token_ids, tree, form, is_open)
        if size < self._num_read:  # the larger tree left what this one does not overwrite
            stale = state.cache.lengths + torch.arange(size, self._num_read, device=state.device)
            state.cache.forget(stale.clamp(max=state.cache.capacity - 1))
        self._num_read = size
        if list(is_open) != self._is_open:
            self._is_open = list(is_open)
            state.is_open.copy_(torch.tensor(self._is_open)[:, None])
        buffers.give(token_ids, tree.parents)
        work = state.work(("read", size, num_shown, self.backend))
        is_known = work.is_captured
        work.run(lambda: self._read_static(state, buffers, num_shown))
        if work.is_captured and not is_known:
            self.read_price = work.replay_seconds()
        features = buffers.features
        return TargetOutput(buffers.logits[:, :num_nodes], None if features is None else features[:, :num_nodes])

    def _has_grown(self, state: StaticState, num_slots: int) -> bool:
        """Make room for a longer text; without memory for it, the text goes on in the dynamic cache instead."""
        try:
            state.grow(num_slots)
        except torch.OutOfMemoryError:
            num_new = [now - before for now, before in zip(self._num_tokens, self._num_prompt, strict=True)]
            self._is_returned = True
            self.leave(is_last=True)
            lengths = torch.tensor(num_new, device=self._position_ids.device)[:, None]
            self._position_ids = self._position_ids + lengths
            self.move_to_slots(self.max_tokens)
            self.end_notes = (
                *self.end_notes,
                f"From token {max(self._num_tokens)} on the step was not captured: {NO_MEMORY}.",
            )
            return False
        return True

    def _read_static(self, state: StaticState, buffers: TreeBuffers, num_shown: int) -> None:
        """Read the tree in the buffers; the work that is captured."""
        tree = DraftTree(buffers.parents, buffers.parents)
        num_rows, num_nodes = buffers.parents.shape
        cache = state.cache
        cache.show(num_nodes, num_shown)
        buffers.depths.copy_(tree.depths)
        masks = {}
        for kind in self._kinds:
            limits = (kind.sliding_window, kind.chunk_size)
            allowed = slot_mask(tree.ancestor_mask, tree.depths, cache.lengths, num_shown, *limits)
            masks[kind.name] = additive(allowed, self.model.dtype)
        inputs = self.inputs.of_nodes(num_rows, num_nodes, self.slots.positions)
        inputs["position_ids"] = (state.offsets + cache.lengths + tree.depths).where(state.is_open, 0)
        inputs["attention_mask"] = masks_by_kind(self.config, masks)
        inputs |= {**self._not_asked, "input_ids": buffers.token_ids, CACHE: cache, "use_cache": True}
        with tree_attention(self.model), batched_experts(self.model):
            buffers.take(*self._logits_and_features(inputs))

    def _logits_and_features(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        if self.backend is None:
            outputs = self.model(**inputs, return_dict=True)
            return outputs.logits, self.features(outputs, inputs["input_ids"].shape[1])
        with self.feature_hooks.paused():
            return compiled_read(self.model, self.backend, self.feature_hooks.feature_layers, inputs)

    def keep(self, num_nodes: int, paths: Sequence[Sequence[int]]) -> None:
        """Keep each row's path of the nodes read last; where the device has kept it, note how long it was."""
        if self.state is None:
            super().keep(num_nodes, paths)
            return
        num_kept = list(map(len, paths))
        self._count(num_kept)
        device = self.state.device
        if self.acceptance is None:
            longest = max(num_kept)
            path = torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths], device=device)
            self.state.cache.keep(path, torch.tensor(num_kept, device=device)[:, None])
        elif self.acceptance.num_kept != num_kept:  # a text ended within its path
            self.state.cache.lengths.copy_(torch.tensor(self._num_tokens)[:, None])
            self.acceptance.reset()

    def leave(self, is_last: bool = False) -> None:
        """Let other calls have the buffers, once the states of all texts are written back where they are returned.

        If this is the last that the buffers are needed for, they are freed.
        """
        if self.state is None:
            super().leave()
            return
        if self.state.failure is not None:
            self.end_notes = (f"Some of the work could not be captured and ran without: {self.state.failure}.",)
        try:
            if self._is_returned:
                self._write_back(self.state, is_last)
        finally:
            self.state.done()
            vacate(self.model)
            self.state, self.acceptance = None, None

    def _write_back(self, state: StaticState, is_last: bool) -> None:
        """Write the states of all texts back to the dynamic cache, each row's padding in front of it."""
        slots = self._slots_of_columns
        num_columns = slots.shape[1]
        num_new = [now - before for now, before in zip(self._num_tokens, self._num_prompt, strict=True)]
        device = slots.device
        steps = torch.arange(max(num_new), device=device)
        first, news = (torch.tensor(values, device=device)[:, None] for values in (self._num_prompt, num_new))
        added = steps < news
        sources = torch.cat([slots, torch.where(added, first + steps, cache_file.HOLE)], dim=-1)
        try:
            if not is_last:
                cache_file.take_over(self.cache, state.cache.layers, sources)
        except torch.OutOfMemoryError:
            is_last = True
            self.end_notes = (*self.end_notes, NO_ROOM)
        if is_last:  # a layer that is freed makes room for the next one
            cache_file.empty(self.cache)
            release(self.model)
            state.free_work()
            cache_file.take_over(self.cache, state.cache.layers, sources, frees=True)
        new = torch.where(added, num_columns + steps, cache_file.HOLE)
        self.slots = StockSlots(self.cache, torch.cat([self.slots.positions, new], dim=-1))


def batched_experts(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Inside, experts are computed without asking the host how many tokens each has, where that is captured."""
    if not graph.is_captured(model.device) or not model._can_set_experts_implementation():
        return nullcontext()
    config = model.config.get_text_config(decoder=True)
    is_fast = config._experts_implementation == "grouped_mm" and model.dtype == torch.bfloat16  # the one type it has
    return nullcontext() if is_fast else attribute_set(config, "_experts_implementation", "batched_mm")
