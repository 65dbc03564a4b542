"""The target as the decoding loop uses it: it reads prompts and trees, and keeps accepted paths in its cache."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel

from ..core.masks import additive, slot_mask, tree_mask
from ..core.tree import MAX_NODES, DraftTree
from ..errors import GenerationError, TargetError
from ..transformers_versions import CACHE
from . import head, model_parts, stock_cache
from .adapters import RowAdapters
from .capture.eligibility import first_that_holds
from .capture.target import FixedTarget, enter_fixed_shapes
from .drafting import Draft
from .feature_hooks import FeatureHooks
from .inputs import check_chunks, longest_text, step_inputs
from .modes import attribute_set
from .recurrent import RecurrentStates, StatesAside
from .sequence_batch import SequenceBatch
from .stock_cache import ENDLESS, HOLE, PathBatch, StockSlots
from .text_cache import TextCache, why_no_slots
from .text_limits import TextLimits, check_batch, read_anew
from .tree_attention import attention_of_trees, check_mask_is_stock

_NUM_DIMS = 3  # rows, tokens, width
Form = Literal["tree", "paths", "chain", "plain"]  # how a draft is read; "plain": nothing is drafted


@dataclass(frozen=True)
class TargetOutput:
    """The target's outputs for the tokens that it read."""

    logits: Tensor  # [rows, nodes, vocab]; after a prefill of the newest token only: [rows, 1, vocab]
    features: Tensor | None  # [rows, tokens, feature_dim]
    outputs: Any = None  # the model's own, with hidden states and attentions where the call asks for them


class Target:
    """The target during one call of `generate`. The drafter gets it as its `TargetView`.

    Counts of a row after a prompt of 5 columns, 2 of them padding: tokens of the text, and its slots once it stands in
    slots of its own (3), slots in a cache of Transformers (5), the next token's position id (3).
    """

    text: TextCache | None = None  # holds the texts after the prefill, where the target lets it
    fixed: FixedTarget | None = None  # reads and keeps in its place where the texts stand in fixed shapes
    end_notes: tuple[str, ...] = ()  # what is known after the call of work in fixed shapes, in sentences

    def __init__(
        self,
        model: PreTrainedModel,
        feature_layers: Sequence[int],
        form: Form = "tree",
        has_hooks: bool = True,
        has_fixed_shapes: bool = False,
        backend: str | None = None,
    ) -> None:
        self.model: Any = model  # `PreTrainedModel` does not declare the parts of `generate`
        self.form = form  # in which drafts are read
        self.has_fixed_shapes = has_fixed_shapes  # whether the text goes on in them where it can
        self.backend = backend  # with which `torch.compile` compiles forwards of fixed shape, if it does

        self.device = model_parts.device_of(model)  # of what it reads
        self.config = model.config.get_text_config(decoder=True)
        self.vocab_size = model_parts.num_writable(model)
        self.feature_dim: int = head.feature_width(model, feature_layers)
        self.feature_hooks = FeatureHooks(
            model_parts.decoder_of(model), self.config.num_hidden_layers, feature_layers if has_hooks else ()
        )
        self._output_layers = () if has_hooks else tuple(feature_layers)  # read from the outputs
        self.kinds = model_parts.layer_kinds(self.config)
        self.limits = TextLimits.of_model(model)
        self.row_adapters = RowAdapters(model)

        parameters = inspect.signature(model.forward).parameters
        self.takes_position_ids = "position_ids" in parameters
        # `generate` returns none, and some models cannot make a loss of them where the mask is that of a tree
        self.not_asked = {name: False for name in ("output_router_logits",) if name in parameters}
        self.asked: dict[str, bool] = {}  # outputs that every forward must give

        self.cache: Any = None  # that reads the prompt, once the call gave it
        self.recurrent: RecurrentStates | None = None  # of a target that has recurrent layers
        self.num_tokens: list[int] = []  # of each row in the cache, padding left out
        self._is_returned = False  # whether somebody gets the cache after the call
        # why rows must keep in step, in words; None if each may keep its own number of tokens
        self.why_in_step: str | None = None
        self._num_waiting = 0  # nodes that were read, of which no path is kept yet

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings `[..., tokens, embed_dim]` of `[..., tokens]`."""
        with self._for_drafter(len(token_ids)) if self.row_adapters.is_needed else nullcontext():
            return self.model.get_input_embeddings()(token_ids)

    def head(self, features: Tensor, is_scaled: bool = True, rows: nn.Module | None = None) -> Tensor:
        """Logits `[..., vocab]` in float32 of head inputs, scaled and capped as the target does or left raw.

        With `rows` of the head they are those of some tokens alone.
        """
        with self._for_drafter(len(features)) if self.row_adapters.is_needed else nullcontext():
            # some adapters view rows, tokens and width, side by side
            states = features.flatten(1, -2) if features.dim() > _NUM_DIMS else features
            apply = head.apply_head if is_scaled else head.apply_matrix
            logits = apply(self.model, states.contiguous(), rows)
        return logits.reshape(*features.shape[:-1], logits.shape[-1])

    def head_rows(self, token_ids: Tensor) -> nn.Linear:
        """The part of the head that gives the logits of these tokens `[tokens]` alone."""
        with self.row_adapters.suspended():
            return head.head_rows(self.model, token_ids)

    def _for_drafter(self, num_rows: int) -> AbstractContextManager[None]:
        """Adapters that differ by row rest where a drafter brings other rows than those of the call."""
        is_own = num_rows == len(self.num_tokens)
        return nullcontext() if is_own and not self.row_adapters.count_tokens else self.row_adapters.suspended()

    def prefill(self, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> TargetOutput:
        """Read the prompt with the call that plain decoding makes."""
        self._hold(model_kwargs[CACHE])
        states_before = None
        if any(map(stock_cache.is_recurrent, self.cache.layers)):
            self.recurrent = RecurrentStates(self.cache)
            states_before = StatesAside(self.cache)

        check_batch(self.model, input_ids, model_kwargs, config)
        # of the longest text in the end, with those that the cache held before the call
        self.max_tokens = longest_text(input_ids, model_kwargs, config)
        self.limits = self.limits.of_call(self.max_tokens)
        num_cached = stock_cache.num_tokens(self.cache)
        check_chunks(input_ids, num_cached, model_kwargs, config)

        wanted = {**model_kwargs, **({"output_hidden_states": True} if self._output_layers else {})}
        self.asked = {name: True for name in ("output_hidden_states", "output_attentions") if wanted.get(name)}
        prompt_kwargs = {**model_kwargs, **self.asked}
        if self.feature_hooks.feature_layers:
            prompt_kwargs = model_parts.reading_all_tokens(self.model, prompt_kwargs)
        if config.prefill_chunk_size:  # older versions cannot read chunks into layers that keep what they may drop
            stock_cache.stop_recording(self.cache)
        with self.recurrent.finding_mixers() if self.recurrent else nullcontext():
            outputs = self.model._prefill(input_ids, config, prompt_kwargs, is_first_iteration=True)

        stock_cache.record(self.cache)
        filled = getattr(outputs, CACHE, None)
        if filled is None:
            raise TargetError(f"the forward of `{type(self.model).__name__}` was given a cache, but gives none back")

        if filled is not self.cache:  # Phi3 drops it when the prompt passes its switch
            self._hold(filled)
            num_cached = 0
        stock_cache.drop_last(self.cache, 0)
        num_read = stock_cache.num_tokens(self.cache, input_ids.shape[1]) - num_cached
        stock_cache.check_holds_text(self.cache, num_cached + num_read, type(self.model).__name__)
        features = self.features(outputs, num_read)

        try:
            self._locate_prompt(len(input_ids), num_cached + num_read, model_kwargs.get("attention_mask"))
            self.inputs = step_inputs(self.model, input_ids, self.cache, model_kwargs, outputs)
        except GenerationError:
            if not config.prefill_chunk_size:
                stock_cache.drop_last(self.cache, num_read)
                if states_before is not None:
                    states_before.put_back()

            raise

        self._num_logits: int = outputs.logits.shape[-1]  # fewer than tokens where those are padded (Inkling)
        self._text_ids = input_ids  # of the prompt; where frequencies switch, of the text
        self._num_prompt_tokens, self._prompt_kwargs = input_ids.shape[1], model_kwargs
        self._position_ids = self.inputs.position_ids  # of the next token, [rows, 1] or [axes, rows, 1]
        # of each row the largest of these
        self._farthest: list[int] = self._position_ids.reshape(-1, len(input_ids)).amax(0).tolist()
        self._has_overflown = bool(outputs.logits[:, -1:].isnan().any())  # the prompt in some row
        return TargetOutput(outputs.logits[:, -1:], features, outputs)

    def _hold(self, cache: Any) -> None:
        self._let_go()
        self.cache = stock_cache.prepared(cache)

    def _let_go(self) -> None:
        if self.cache is not None:
            stock_cache.stop_recording(self.cache)

    def _locate_prompt(self, num_rows: int, num_slots: int, mask: Any) -> None:
        """Record which token of the prompt each slot of the cache holds, and which slots hold padding."""
        positions = torch.arange(num_slots, device=self.device).repeat(num_rows, 1)
        self._padding: Tensor | None = None  # [rows, 1] padding on the left; chunks are counted behind it
        if isinstance(mask, Tensor) and mask.dim() == positions.dim() and not mask.all():
            if mask.shape != positions.shape:
                raise GenerationError(
                    f"`attention_mask` must say of every token in the cache whether it is padding: shape "
                    f"{tuple(positions.shape)}, but it has {tuple(mask.shape)}. Pass the mask of the whole text."
                )

            positions = positions.masked_fill(mask.to(positions.device) == 0, HOLE)
            self._padding = (mask.cumsum(-1) == 0).sum(-1, keepdim=True).to(positions.device)

        self.slots = StockSlots(self.cache, positions)

        columns = [row.nonzero()[:, 0] for row in self.slots.is_held]
        # that the tokens of each row's prompt had in the cache, and those that held none
        self._columns = pad_sequence(columns, batch_first=True, padding_value=ENDLESS)
        self._holes: list[list[int]] = [(~row).nonzero()[:, 0].tolist() for row in self.slots.is_held]
        self.num_tokens = list(map(len, columns))

    def features(self, outputs: Any, num_tokens: int) -> Tensor | None:
        """The features of a forward, from the hooks, or from its hidden states where hooks may not fire."""
        if not self._output_layers:
            return self.feature_hooks.take(num_tokens)
        return torch.cat([outputs.hidden_states[layer] for layer in self._output_layers], dim=-1)

    def enter(self, batch: SequenceBatch, config: GenerationConfig, num_logits: int) -> str | None:
        """Move the text to slots after the prefill; a reason in words where shapes were to be fixed and cannot be."""
        is_users = getattr(self.cache, "_is_user_defined", False)  # which `generate` sets
        self._is_returned = bool(config.return_dict_in_generate) or is_users
        self.fixed, reason = enter_fixed_shapes(self, batch, num_logits) if self.has_fixed_shapes else (None, None)

        may_look = is_users and batch.reader and len(batch) == 1  # code of the caller, at the cache of one row
        if self.fixed is not None:
            self.fixed.take_texts()
        elif not may_look:
            self.move_to_slots(self.max_tokens)
        return reason

    def move_to_slots(self, max_length: int) -> None:
        """Let the text of each row go on in slots of its own, where the target lets it."""
        self.why_in_step = self.why_not_in_slots(max_length)
        if self.why_in_step is None:
            self._go_on_in(TextCache.moved(self.cache, self.slots.of_columns, max_length))

    def _go_on_in(self, text: TextCache) -> None:
        self.text = text
        if self.recurrent is not None:
            self.recurrent.cache = text

    def why_not_in_slots(self, max_length: int) -> str | None:
        """Why the text stays in the cache that read the prompt, in words; None if it can leave."""
        counts_gaps = self.form != "tree" or any(kind.sliding_window or kind.chunk_size for kind in self.kinds)
        shortest = min(self._text_ids.shape[1], *self._farthest)
        num_rows = len(self.num_tokens)
        limits = self.limits
        reasons = {
            "every path is read as a row": self.form == "paths",
            "nothing is drafted": self.form == "plain",
            "`attention_mask` leaves out tokens in the middle of the text, which the target may count": (
                counts_gaps and self.slots.has_gaps
            ),
            "the target's rotary frequencies switch with the length of the text": (
                any(shortest <= length < max_length for length in limits.switches)
            ),
            "the target takes more than its text": num_rows > 1 and not self.inputs.can_select(num_rows),
            "the target counts slots of the cache": (
                limits.counts_slots(min(self.num_tokens), max_length + MAX_NODES)
            ),
            "the target chooses tokens by their values, those of padding among them": max_length > limits.num_chosen,
            "the target chooses tokens by an index, which padding may turn": (
                max_length > limits.num_indexed and any(self._holes)
            ),
            "the prompt overflowed in the target, so that its padding may be part of the text": self._has_overflown,
            "the target counts padding as text": max_length > limits.num_unscaled and any(self._holes),
        }
        return first_that_holds(reasons) or why_no_slots(self.cache)

    @property
    def num_slots(self) -> int:
        """The slots that are filled in the cache."""
        return len(self.slots) if self.text is None else max(self.num_tokens)

    @property
    def is_ragged(self) -> bool:
        """Whether rows end in different slots, so that even their newest tokens are read with a mask."""
        return self.text is not None and len(self.text.groups) > 1

    @property
    def num_to_context(self) -> list[int]:
        """For each row the number of tokens that can be drafted before a limit of the target."""
        if not self.limits.may_end_drafts:
            return [ENDLESS] * len(self.num_tokens)

        counts = zip(self._farthest, self.num_tokens, strict=True)
        return self.limits.num_draftable(self._text_ids.shape[1], counts)

    @property
    def form_of_step(self) -> Form:
        """How the next draft is read: by chains where nodes of a tree would stand in slots that the target counts.

        Or where they would be rows of a mixer, as adapters are told for each row of the call.
        """
        if self.form == "plain":
            return self.form
        if self.recurrent is not None and self.row_adapters.is_needed:
            return "chain"

        num_slots = len(self.slots)
        return "chain" if self.limits.counts_slots(num_slots, num_slots + MAX_NODES) else self.form

    def together(self) -> AbstractContextManager[None]:
        """Inside, captured work waits for other work, to be done with it."""
        return nullcontext() if self.fixed is None else self.fixed.state.pool.together()

    def noise_ahead(self, batch: SequenceBatch) -> Callable[[int, int], Tensor]:
        """The noise of coming draws by row and depth."""
        return batch.noise_ahead(self._num_logits) if self.fixed is None else self.fixed.noise_ahead(batch)

    def read(
        self,
        token_ids: Tensor,
        tree: DraftTree,
        form: Form = "tree",
        is_open: Sequence[bool] = (),
        draft: Draft | None = None,
    ) -> TargetOutput:
        """Read a tree in one forward; its slots stay in the cache until `keep`.

        Where the device chooses tokens it chooses those of the `draft` of the tree, if one is given.

        The form is `"tree"` with a tree mask, `"chain"` as plain decoding reads, where every row is a chain, `"paths"`
        likewise, with each path of a single row as a row of its own, `"plain"` for roots alone. Rows that have ended
        are not `is_open`.
        """
        self.feature_hooks.discard()  # processors may run the target, too
        num_nodes = token_ids.shape[1]
        if self.fixed is not None:
            found = self.fixed.read(token_ids, tree, is_open, draft)
            if found is not None:
                self._num_waiting = num_nodes
                return TargetOutput(*found)
            self._leave_fixed_shapes(self.fixed)

        if self._text_ids.shape[1] in self.limits.switches:
            self._read_anew(token_ids[:, :1])
        self._read_ids = token_ids
        parents = tree.parents
        self._paths = PathBatch.of(tuple(parents[0].tolist()), parents.device) if form == "paths" else None
        if self._paths is not None:
            return self._read_paths(token_ids, self._paths)

        has_ended_rows = self.text is not None and not all(is_open)  # which are read again, and keep their states
        recurrent = self.recurrent if num_nodes > 1 or has_ended_rows else None
        with recurrent.reading(tree, len(token_ids)) if recurrent else nullcontext():
            if self.text is not None:
                output = self._read_in_slots(self.text, token_ids, tree, form, is_open)
            elif form == "tree":
                output = self._read_tree(token_ids, tree, is_open)
            else:
                mask = self.slots.mask_of_chain(num_nodes) if self.inputs.has_mask else None
                output = self._forward(token_ids, tree.depths, mask, is_open, counts_itself=True)

        self._num_waiting = num_nodes
        return output

    def _leave_fixed_shapes(self, fixed: FixedTarget) -> None:
        """Go on in slots that may grow, since no memory is left for fixed shapes."""
        self._go_on_in(fixed.text())
        self._position_ids = fixed.state.offsets + fixed.state.cache.lengths
        self.end_notes, self.fixed = fixed.end(frees_work=True), None
        self.feature_hooks.discard()

    def _read_in_slots(
        self, text: TextCache, token_ids: Tensor, tree: DraftTree, form: Form, is_open: Sequence[bool]
    ) -> TargetOutput:
        """Read behind the texts in slots: trees with masks, all else without, rows of one length together."""
        groups: list[list[int]] = []
        if form != "tree" and not (self.recurrent is not None and self.is_ragged):
            for rows in text.groups:
                if not is_open or any(is_open[row] for row in rows):
                    groups.append(rows)

        if groups and len(groups[0]) < len(token_ids):
            output = self._read_groups(text, token_ids, tree, groups)
        else:
            text.begin(token_ids.shape[1], has_mask=not groups)
            if groups:
                output = self._forward(token_ids, tree.depths, None, is_open, counts_itself=True)
            else:
                output = self._read_tree(token_ids, tree, is_open)

        text.note_spoilt(output.logits)
        return output

    def _read_groups(
        self, text: TextCache, token_ids: Tensor, tree: DraftTree, groups: list[list[int]]
    ) -> TargetOutput:
        """Read some of the rows, those of a group at a time; the others get zeros."""
        num_rows, num_nodes = token_ids.shape
        depths = tree.depths.expand(num_rows, -1)
        parts = []
        for rows in groups:
            text.begin(num_nodes, rows, has_mask=False)
            index = torch.tensor(rows, device=token_ids.device)
            output = self._forward(token_ids[index], depths[index], None, counts_itself=True, rows=index)
            parts.append((index, output))
        return joined_rows(parts, num_rows, self.asked)

    def _read_tree(self, token_ids: Tensor, tree: DraftTree, is_open: Sequence[bool]) -> TargetOutput:
        masks = {}
        for kind in self.kinds:
            if self.text is None:
                masks[kind.name] = self._mask(tree, kind)
            else:
                masks[kind.name] = self._slot_mask(self.text, tree, kind)

        with attribute_set(self.config, "_attn_implementation", self._attention_of_trees):
            return self._forward(token_ids, tree.depths, model_parts.masks_by_kind(self.config, masks), is_open)

    @cached_property
    def _attention_of_trees(self) -> str | None:
        check_mask_is_stock(self.model)
        return attention_of_trees(self.model)

    def _mask(self, tree: DraftTree, kind: model_parts.LayerKind) -> Tensor:
        """The mask of one kind of layer: over the slots that such a layer holds, then the nodes of the tree."""
        positions = len(self.slots) + tree.depths
        held = self.slots.positions[:, len(self.slots) - stock_cache.num_held(self.cache.layers[kind.layer_index]) :]
        is_held = held != HOLE
        if self._padding is not None:  # chunks are counted from the first real token; windows do not notice
            held = held - self._padding
            positions = positions - self._padding
        mask = tree_mask(tree.ancestor_mask, positions, held, is_held, kind.sliding_window, kind.chunk_size)
        return additive(mask, self.model.dtype)

    def _slot_mask(self, text: TextCache, tree: DraftTree, kind: model_parts.LayerKind) -> Tensor:
        """The mask of one kind of layer over the slots that it shows."""
        view = text.layers[kind.layer_index].view
        num_nodes, dtype = tree.parents.shape[-1], self.model.dtype
        reach = min(kind.sliding_window or ENDLESS, kind.chunk_size or ENDLESS)
        if view.slots is None and max(self.num_tokens) + num_nodes <= reach:  # all rows see all of their text
            mask = torch.zeros(len(tree.parents), 1, num_nodes, view.num_shown, dtype=dtype, device=self.device)
            mask[:, 0, :, view.first :].masked_fill_(~tree.ancestor_mask, torch.finfo(dtype).min)
            return mask

        lengths = torch.tensor(view.lengths(self.num_tokens), device=self.device)[:, None]
        dropped = torch.tensor(view.num_dropped, device=self.device)[:, None]
        limits = (kind.sliding_window, kind.chunk_size, dropped)
        return additive(slot_mask(tree.ancestor_mask, tree.depths, lengths, view.num_shown, *limits), dtype)

    def _forward(
        self,
        token_ids: Tensor,
        depths: Tensor,
        mask: Any,
        is_open: Sequence[bool] = (),
        counts_itself: bool = False,
        rows: Tensor | None = None,
    ) -> TargetOutput:
        """Let the model read nodes at these depths behind its cache, of some `rows` of the call or of all."""
        num_rows, num_nodes = token_ids.shape
        step, position_ids = self.inputs, self._position_ids
        if rows is not None:
            step = step.of_rows(rows)
            position_ids = position_ids.index_select(-2, rows.to(position_ids.device))
        inputs = dict(step.constant)
        if step.by_token or step.by_text or step.has_cache_position:
            positions = self._positions if rows is None else self._positions[rows]
            inputs = step.of_nodes(num_rows, num_nodes, positions)
        cache = self.cache if self.text is None else self.text
        inputs |= {"input_ids": token_ids, CACHE: cache, "use_cache": True, "attention_mask": mask}

        # where decoding tells a target no positions, chains do not either
        if step.has_position_ids or (self.takes_position_ids and not counts_itself):
            inputs["position_ids"] = position_ids + depths
            if not all(is_open):  # a row that ended may stand behind the last position that the target has
                needed = torch.tensor(is_open, device=token_ids.device)[:, None]
                inputs["position_ids"] = inputs["position_ids"].where(needed, (position_ids - 1).clamp(min=0))

        adapters = self.row_adapters
        with adapters.of_nodes(num_rows, num_nodes, rows) if adapters.is_needed else nullcontext():
            outputs = self.model(**inputs, **self.asked, **self.not_asked, return_dict=True)
        return TargetOutput(outputs.logits, self.features(outputs, num_nodes), outputs)

    @property
    def _positions(self) -> Tensor:
        """The column of each slot `[rows, slots]`, in which the prompt's inputs stand."""
        if self.text is None:
            return self.slots.positions
        num_new = max(self.num_tokens) - self._columns.shape[1]
        return functional.pad(self._columns, (0, num_new), value=ENDLESS)

    def _read_paths(self, token_ids: Tensor, paths: PathBatch) -> TargetOutput:
        """Read each path of the tree as a row; a node has the same logits in every path that holds it."""
        self.cache.batch_repeat_interleave(len(paths.paths))
        rows = token_ids[0][paths.nodes]
        depths = torch.arange(paths.longest, device=token_ids.device).expand_as(rows)
        mask = self.slots.mask_of_chain(paths.longest)
        output = self._forward(rows, depths, None if mask is None else mask.expand(len(rows), -1), counts_itself=True)

        states = None
        if self.asked:
            states = [paths.by_node(layer) for layer in output.outputs.hidden_states]
        features = None if output.features is None else paths.by_node(output.features)
        return TargetOutput(paths.by_node(output.logits), features, SimpleNamespace(hidden_states=states))

    def _read_anew(self, root: Tensor) -> None:
        text_ids = torch.cat([self._text_ids, root], dim=-1)
        num_new = text_ids.shape[1] - self._num_prompt_tokens
        cache = read_anew(self.model, text_ids, self.cache, self._prompt_kwargs, num_new)
        if cache is not self.cache:
            self._hold(cache)
            self.slots.cache = cache
        self.feature_hooks.discard()

    def keep(self, num_nodes: int, paths: Sequence[Sequence[int]]) -> None:
        """Keep each row's path of the nodes read last, and drop the others from the cache."""
        self._num_waiting = 0
        num_kept = list(map(len, paths))
        for row, num in enumerate(num_kept):
            self.num_tokens[row] += num
            self._farthest[row] += num
        if self.fixed is not None:
            self.fixed.keep(paths, num_kept)
            return

        if self.recurrent is not None:
            self.recurrent.keep(paths)
        if self.text is not None:
            self.text.keep(paths)
        elif self._paths is not None:
            kept_row = torch.tensor([self._paths.row_of(paths[0])], device=self.device)
            self.cache.batch_select_indices(kept_row)
            self.slots.keep(self._paths.longest, [range(num_kept[0])])
        else:
            self.slots.keep(num_nodes, paths)

        self._position_ids = self._position_ids + torch.tensor(num_kept, device=self._position_ids.device)[:, None]
        if self.limits.switches and self.text is None:
            self._text_ids = torch.cat([self._text_ids, self._read_ids[:, list(paths[0])]], dim=-1)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows of a text in slots alone.

        What concerns the prompt's cache stays that of all rows: the others come back to it at the end of the call.
        """
        assert self.text is not None  # rows leave in slots alone, see `SpeculativeDecoding.drop_ended_rows`
        self.text.select(rows, keeps_others=self._is_returned)
        index = torch.tensor(rows, device=self._position_ids.device)
        self.inputs = self.inputs.of_rows(index)
        self._position_ids = self._position_ids.index_select(-2, index)
        self._columns = self._columns[list(rows)]
        self.num_tokens = [self.num_tokens[row] for row in rows]
        self._farthest = [self._farthest[row] for row in rows]

    def columns(self, window: int | None, num_before: int) -> list[tuple[list[int], int]]:
        """For each row the columns of the slots in front of the nodes read last, -1 at holes, and that of the root.

        They are the slots of layers with this `window`, of which a cache of Transformers holds `num_before`. Columns
        are those of a cache that read the text without a drafter.
        """
        if self.text is None:
            return [(row[len(row) - num_before :], len(row)) for row in self.slots.positions.tolist()]

        found = []
        rows = zip(self._columns.tolist(), self.num_tokens, self.text.num_dropped(window), strict=True)
        for columns, num, first in rows:
            own = [column for column in columns if column < ENDLESS]
            num_columns = len(self.slots) + num - len(own)
            held = [*own, *range(len(self.slots), num_columns)]
            found.append((held[first:], num_columns))

        return found

    def close(self) -> None:
        """Leave the cache as plain decoding does, however the call ended.

        The states of all texts come back to the cache that read the prompt, where anybody gets it. Buffers of fixed
        shapes are then there for other calls.
        """
        if self._num_waiting:  # an error came before a path was chosen; the root is text
            self.keep(self._num_waiting, [(0,)] * len(self.num_tokens))
        try:
            if self._is_returned and self.fixed is not None:
                self.fixed.write_back(self.cache, self._holes)
            elif self._is_returned and self.text is not None:
                self.text.write_back(self.cache, self._holes)
        finally:
            if self.fixed is not None:
                self.end_notes, self.fixed = self.fixed.end(), None

        self.text = None
        self._let_go()


def joined_rows(
    parts: Sequence[tuple[Tensor, TargetOutput]], num_rows: int, asked: Mapping[str, bool]
) -> TargetOutput:
    """The outputs of all rows from those of some, each with the rows that it is of; zeros for the others."""

    def joined(values: Sequence[Tensor]) -> Tensor:
        width = max(value.shape[-1] for value in values)  # rows may see different numbers of slots
        whole = values[0].new_zeros(num_rows, *values[0].shape[1:-1], width)
        for (rows, _), value in zip(parts, values, strict=True):
            whole[rows.to(value.device), ..., : value.shape[-1]] = value
        return whole

    outputs = [output for _, output in parts]
    features = [output.features for output in outputs if output.features is not None]
    more: dict[str, Any] = {"hidden_states": None, "attentions": None}
    for name in more:
        if asked.get(f"output_{name}"):
            layers = zip(*(getattr(output.outputs, name) for output in outputs), strict=True)
            more[name] = tuple(None if layer[0] is None else joined(layer) for layer in layers)

    return TargetOutput(
        joined([output.logits for output in outputs]), joined(features) if features else None, SimpleNamespace(**more)
    )
