"""The target in fixed shapes: it reads trees behind texts and keeps paths by work that may be captured."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.masks import additive, slot_mask
from ...core.tree import MAX_NODES, DraftTree
from ...transformers_versions import CACHE
from .. import model_parts, stock_cache
from ..drafting import Draft
from ..inputs import tensors_in
from ..sequence_batch import SequenceBatch
from ..slot_cache import NODE_BUCKETS
from ..target_look import look_at
from ..text_cache import TextCache, fill, reserve
from ..tree_attention import tree_attention
from .acceptor import DeviceAcceptor
from .compile import compiled_read
from .eligibility import BUSY, NO_MEMORY, first_that_holds, why_host_chooses
from .graph import Proof, batched_experts
from .norms import as_captured
from .state import (
    StaticState,
    TreeBuffers,
    capacity_for,
    occupy,
    release,
    shown_slots,
    state_of,
    vacate,
    weights_key,
)

if TYPE_CHECKING:
    from ..target import Target

NO_ROOM = "No memory was left for a second copy of keys and values, so what is kept for later calls is freed."
# Of a row, and of all rows: a captured forward of 7B in bfloat16 took an H100 9.3 ms with 1 token, 11.1 with 64, 11.8
# with 128 and 13.3 with 256, for with so few tokens reading the weights takes longer than computing.
CHEAP_NODES, CHEAP_TOKENS = 64, 128
_VIEWING = {"gpt_neox_japanese"}  # model types whose attention calls `view` on keys, rows and heads as one dimension


def enter_fixed_shapes(
    target: "Target", batch: SequenceBatch, num_logits: int
) -> tuple["FixedTarget | None", str | None]:
    """Room in fixed shapes for the texts that a target prefilled; None and the reason in words if there is none."""
    look = look_at(target.model)
    reason = _why_not_in_fixed_shapes(target, look.foreign)
    if reason is None and not occupy(target.model):
        reason = BUSY
    if reason is not None:
        return None, reason

    try:
        return FixedTarget(target, _state_with_room(target, look.key), batch, num_logits), None
    except BaseException as error:
        vacate(target.model)
        if not isinstance(error, torch.OutOfMemoryError):
            raise

        release(target.model)
        return None, NO_MEMORY


def _why_not_in_fixed_shapes(target: "Target", foreign: str) -> str | None:
    """Why the texts that were prefilled cannot go on in fixed shapes, in words; None if they can."""
    asked = " and ".join(f"`{name}`" for name in target.asked)
    reasons = {
        f"the target has {foreign}, which a replay would leave out": bool(foreign),
        "forwards of targets with recurrent layers are not compiled": bool(target.recurrent and target.backend),
        "the target takes no `position_ids`": not target.takes_position_ids and bool(target.kinds),  # it attends
        "the target's rotary frequencies switch with the length of the text": bool(target.limits.switches),
        f"the call asks for {asked}": bool(asked),
        "the target takes more for each token than its id and position": bool(
            target.inputs.by_text or target.inputs.by_token
        ),
        "the target takes more than its text": bool(tensors_in(target.inputs.constant)),
        "`attention_mask` leaves out tokens in the middle of the text": target.slots.has_gaps,
        "rows take different adapters": target.row_adapters.is_needed,
        "the target takes keys of several rows in one piece alone": (
            len(target.num_tokens) > 1 and target.config.model_type in _VIEWING
        ),
        "the target chooses tokens by an index, which empty slots may turn": (  # where tokens score alike
            target.max_tokens > target.limits.num_indexed
        ),
    }
    return first_that_holds(reasons) or target.why_not_in_slots(target.max_tokens)


def _state_with_room(target: "Target", look_key: int) -> StaticState:
    """A state in which the texts have room; nothing of them is there yet."""
    position_ids = target.inputs.position_ids  # of the token after each prompt
    lengths = torch.tensor(target.num_tokens, device=position_ids.device)[:, None]
    offsets = position_ids.expand(*position_ids.shape[:-2], *lengths.shape) - lengths
    capacity = capacity_for(max(target.num_tokens), target.max_tokens)
    key = (  # what captured work depends on besides its buffers
        len(lengths),
        offsets.shape,
        look_key,
        weights_key(target.model),
        target.feature_hooks.feature_layers,
        repr(target.inputs.constant),
    )
    state = state_of(target.model, key, capacity, lambda: StaticState(len(target.cache.layers), offsets, capacity))

    state.wait()
    state.offsets.copy_(offsets)
    state.is_open.fill_(True)
    state.cache.lengths.copy_(lengths)
    reserve(state.cache, target.cache)
    if target.recurrent is not None:
        state.recurrent.take(target.recurrent.held())
    return state


class FixedTarget:
    """The part of a [`Target`] that reads and keeps for it while the texts of a call stand in fixed shapes.

    It asks the target for the parts of the model and for what is known of the texts; only the target counts tokens.
    """

    most_nodes = MAX_NODES  # of a draft, for which there is memory
    read_price: float | None = None  # seconds of the newest read, if it was captured then, without what that took

    def __init__(self, target: "Target", state: StaticState, batch: SequenceBatch, num_logits: int) -> None:
        self.state = state
        self.choice_reason = why_host_chooses(batch)  # in words, where the device could choose tokens
        # chooses tokens where the logits lie; None: the verifier does
        self.acceptor = DeviceAcceptor(state, batch, num_logits) if self.choice_reason is None else None

        self._target = target
        self._num_logits = num_logits  # of a token
        self._num_read = 0  # nodes by the newest read, fillers included
        self._is_open = [True] * state.num_rows  # what the state knows of each row
        self._notes: list[str] = []  # what is known of the work, in sentences

    def take_texts(self) -> None:
        """Take the texts from the cache that read the prompts."""
        cache, target = self.state.cache, self._target
        fill(cache.layers, target.cache, target.slots.of_columns)
        if target.recurrent is not None:
            target.recurrent.cache = cache

    def noise_ahead(self, batch: SequenceBatch) -> Callable[[int, int], Tensor]:
        """The noise of coming draws by row and depth, in buffers that stay where they are."""
        if self.acceptor is not None:
            return self.acceptor.noise_ahead
        state, size = self.state, self._num_logits
        drawn = batch.noise_ahead(size)
        return lambda row, depth: state.noise_of(depth, size)[depth - 1, row].copy_(drawn(row, depth))

    @property
    def _is_dense(self) -> bool:
        return self._target.recurrent is None and not self._target.model._can_set_experts_implementation()

    @property
    def num_cheap_nodes(self) -> int:
        """Nodes of each row that a captured read takes for little more than the root alone; 0 where more cost more.

        Layers that are not dense read more weights, or states, for each node.
        """
        most = min(CHEAP_NODES, CHEAP_TOKENS // self.state.num_rows)
        return most if self._is_dense and self._target.device.type == "cuda" else 0

    def limit_nodes(self, num_nodes: int) -> bool:
        """Whether there is memory for the recurrent states behind so many nodes; if not, `most_nodes` falls."""
        if num_nodes == 1:
            return True
        try:
            self.state.reserve(num_nodes)
        except torch.OutOfMemoryError:
            self.most_nodes = max(size for size in NODE_BUCKETS if size < num_nodes)
            return False
        return True

    def read(
        self, token_ids: Tensor, tree: DraftTree, is_open: Sequence[bool], draft: Draft | None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Logits and features of a tree, which the next read of its size overwrites; None if no memory was left.

        Where the device chooses tokens it chooses those of the `draft` of the tree, if one is given.
        """
        self.read_price = None
        state, num_nodes = self.state, token_ids.shape[1]
        num_shown = shown_slots(max(self._target.num_tokens), num_nodes)
        try:
            state.reserve(num_nodes)
            if num_shown > state.cache.capacity:
                state.grow(num_shown)

            with state.pool.together():
                return self._read(token_ids, tree, is_open, draft, num_shown)
        except torch.OutOfMemoryError:  # shapes that grow may need less
            return None

    def _read(
        self, token_ids: Tensor, tree: DraftTree, is_open: Sequence[bool], draft: Draft | None, num_shown: int
    ) -> tuple[Tensor, Tensor | None]:
        """Give a tree to the buffers of its size, and read them and choose tokens by work that may be captured."""
        state, num_nodes = self.state, token_ids.shape[1]
        buffers = state.tree(num_nodes)
        size = buffers.token_ids.shape[1]
        num_stale, self._num_read = self._num_read, size
        if size < num_stale:  # the larger tree left what this one does not overwrite
            state.work(("forget", size, num_stale)).run(lambda: state.forget(size, num_stale))
        if list(is_open) != self._is_open:
            self._is_open = list(is_open)
            state.is_open.copy_(torch.tensor(self._is_open)[:, None])
        if draft is None or draft.copies is None:
            buffers.give(token_ids, tree.parents)
        else:
            state.work(buffers, draft.copies).run(lambda: buffers.give(token_ids, tree.parents))
        if self.acceptor is not None:
            self.acceptor.num_kept = []  # of this tree, yet

        work = state.work(("read", size, num_shown, self._target.backend))
        is_known = work.is_captured
        proof = Proof("what reads a draft", lambda: (), lambda: buffers.results)
        work.run(lambda: self._read_buffers(buffers, num_shown), proof)
        if work.is_captured and not is_known:
            self.read_price = work.replay_seconds()

        if self.acceptor is not None and draft is not None:
            self.acceptor.choose(draft)
        features = buffers.features
        return buffers.logits[:, :num_nodes], None if features is None else features[:, :num_nodes]

    def _read_buffers(self, buffers: TreeBuffers, num_shown: int) -> None:
        """Read the tree in the buffers; the work that is captured."""
        target, state = self._target, self.state
        hooks, cache = target.feature_hooks, state.cache
        hooks.discard()  # of a run that found no memory
        tree = DraftTree(buffers.parents, buffers.parents)
        num_rows, num_nodes = buffers.parents.shape
        cache.show(num_nodes, num_shown)
        buffers.depths.copy_(tree.depths)
        buffers.text_parents.copy_(buffers.parents)  # until the acceptor knows better

        masks = {}
        for kind in target.kinds:
            allowed = slot_mask(
                tree.ancestor_mask, tree.depths, cache.lengths, num_shown, kind.sliding_window, kind.chunk_size
            )
            masks[kind.name] = additive(allowed, target.model.dtype)

        inputs = target.inputs.of_nodes(num_rows, num_nodes, target.slots.positions)
        if target.takes_position_ids:
            inputs["position_ids"] = (state.offsets + cache.lengths + tree.depths).where(state.is_open, 0)
        inputs["attention_mask"] = model_parts.masks_by_kind(target.config, masks)
        inputs |= {**target.not_asked, "input_ids": buffers.token_ids, CACHE: cache, "use_cache": True}

        recurrent: Any = nullcontext()
        if target.recurrent is not None:
            recurrent = target.recurrent.reading_in_order(buffers.parents, state.recurrent)
        with tree_attention(target.model), batched_experts(target.model), recurrent:
            if target.backend is None:
                # Where a norm rounds otherwise, other experts may be chosen.
                model = as_captured(target.model) if self._is_dense else target.model
                outputs = model(**inputs, return_dict=True)
                buffers.take(outputs.logits, target.features(outputs, num_nodes))
            else:
                with hooks.paused():
                    buffers.take(*compiled_read(target.model, target.backend, hooks.feature_layers, inputs))

    def keep(self, paths: Sequence[Sequence[int]], num_kept: Sequence[int]) -> None:
        """Keep each row's path of the nodes read last, unless the device has kept it; the target has counted them."""
        if self.acceptor is not None and self.acceptor.num_kept == num_kept:
            return

        state, longest = self.state, max(num_kept)
        path = torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths], device=state.device)
        kept = torch.tensor(num_kept, device=state.device)[:, None]
        if self.acceptor is None:
            state.keep(path, kept)
        else:  # a text ended within its path
            state.cache.lengths.copy_(torch.tensor(self._target.num_tokens)[:, None])
            state.recurrent.keep(path, kept)
            self.acceptor.reset()

    def text(self) -> TextCache:
        """The texts where they stand, as they are written back or go on without fixed shapes."""
        target, state = self._target, self.state
        if target.recurrent is not None:
            target.recurrent.put(state.recurrent.texts)
        return TextCache.of_slots(state.cache, target.num_tokens, target.max_tokens)

    def write_back(self, cache: Any, holes: Sequence[Sequence[int]]) -> None:
        """Write the states of all texts back; without memory for two copies, what is kept for later calls is freed."""
        try:
            self.text().write_back(cache, holes)
        except torch.OutOfMemoryError:
            self._notes.append(NO_ROOM)
            for layer in cache.layers:
                stock_cache.empty_layer(layer)
            release(self._target.model)
            self.state.free_work()
            text = self.text()
            self.state.cache.free()  # so that each layer makes room for the next one once it is written
            text.write_back(cache, holes)

    def end(self, frees_work: bool = False) -> tuple[str, ...]:
        """Let other calls have the buffers. What is then known of the work is returned, in sentences.

        With `frees_work`, as no memory is left, all is freed but what the texts stand in.
        """
        state, notes = self.state, self._notes
        if state.pool.trust.doubt is not None:
            notes.insert(0, f"Work on this target is not captured any more: {state.pool.trust.doubt}.")
        elif state.failure is not None:
            notes.insert(0, f"Some of the work could not be captured and ran without: {state.failure}.")
        if self.most_nodes < MAX_NODES:
            notes.append(
                f"Drafts had at most {self.most_nodes} nodes: no memory was left for recurrent states of more."
            )

        state.done()
        vacate(self._target.model)
        if frees_work:
            release(self._target.model)
            state.free_work()
            notes.append(f"From token {max(self._target.num_tokens)} on the step was not captured: {NO_MEMORY}.")
        return tuple(notes)
