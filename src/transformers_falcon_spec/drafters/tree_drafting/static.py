"""The base of drafters that read pairs of feature and token: the text they read, and trees of a known shape.

Pairs wait until the drafter is asked. Then it reads them and drafts, pass by pass: nodes take the best tokens, or
tokens drawn for rejection sampling. In fixed shapes the same is done in buffers ([`FixedPairs`]).
"""

import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache

from ...core.masks import within_reach
from ...core.sampling import draw_distinct
from ...core.tree import DraftTree
from ...generation.cache import ENDLESS, HOLE
from ...generation.drafting import Committed, Draft, DraftBudget, Kept, TargetView, TreeCandidateGenerator
from ...generation.row_slots import RowSlots
from ...generation.static.compile import compiled_call
from .fixed import FixedDraft, FixedPairs, ReadPrompt
from .plan import DraftPass, draft_passes

# Pairs of drafted text that wait for a drafter that is not asked; then its history starts anew with these.
MOST_WAITING = 512
SWITCHING = ("dynamic", "longrope")  # kinds of rotary positions


class PendingPairs:
    """Pairs of one row that the drafter has not read yet."""

    def __init__(self) -> None:
        self.token_ids: list[Tensor] = []
        self.features: list[Tensor] = []
        self.root = torch.empty(0, dtype=torch.long)  # [1] newest committed token
        self.num_taken = 0
        self.num_waiting = 0  # pairs, those of the first commit left out

    def add(self, token_ids: Tensor, features: Tensor, root: Tensor) -> None:
        """Pairs of a commit; maybe none."""
        self.num_waiting += len(token_ids) if self.token_ids or self.num_taken else 0
        self.token_ids.append(token_ids)
        self.features.append(features)
        self.root = root

    def take(self, most: int) -> tuple[Tensor, Tensor]:
        """The newest pairs that wait, `most` at most, in order; none waits any longer, and `num_taken` counts all."""
        token_ids, features = torch.cat(self.token_ids), torch.cat(self.features)
        self.token_ids, self.features, self.num_taken, self.num_waiting = [], [], len(token_ids), 0
        return token_ids[-most:], features[-most:]

    def keep_newest(self, num: int) -> None:
        """Forget all but the newest `num` that wait."""
        self.token_ids = [torch.cat(self.token_ids)[-num:]]
        self.features = [torch.cat(self.features)[-num:]]
        self.num_waiting = 0


@dataclass
class FilledTree:
    """The tokens of a tree's nodes, and what they were chosen by where that is wanted."""

    token_ids: Tensor  # [rows, nodes]
    dist_index: Tensor  # [1, nodes] which of `dists`, side by side, the children of a node were drawn from; -1 = none
    dists: list[Tensor] = field(default_factory=list)  # [rows, parents, vocab] of each part of a pass
    node_probs: Tensor | None = None  # [rows, nodes]


class StaticTreeGenerator(TreeCandidateGenerator):
    """A generator whose drafter keeps keys and values of committed pairs, each row its own, and drafts a static tree.

    It drafts `block_size` tokens a pass.
    """

    least_pairs: int = 1  # of a row before anything is drafted
    tree: DraftTree
    block_size: int = 1
    predicts_independently: bool = True  # tokens of a block, without regard to those that stand before them in it
    draft_token_ids: Tensor | None = None  # the target's id of each token that can be drafted; None: all, as they are

    def __init__(self, drafter: Any, target: TargetView, max_length: int, rng: torch.Generator) -> None:
        super().__init__(target, max_length, rng)
        self.drafter = drafter
        self.feature_layers = drafter.feature_layers
        self.window: int | None = drafter.sliding_window
        self.pending: list[PendingPairs] = []  # of each row
        self.num_read: list[int] = []  # of each row the committed pairs read so far
        self.slots = RowSlots(DynamicCache(), torch.zeros(1, 0, dtype=torch.long))
        self.fixed: FixedPairs | None = None  # takes the place of all these but `num_read`
        self._num_waiting: list[int] = []  # of each row, there

    def commit(self, committed: Committed) -> None:
        """Keep the new pairs for the next proposal."""
        if self.fixed is not None:
            self._commit_fixed(committed)
            return
        assert committed.features is not None  # a drafter of this kind reads at least one layer
        if not self.pending:
            self.pending = [PendingPairs() for _ in committed.lengths]
            self.num_read = [0] * len(self.pending)
            self.slots = RowSlots(DynamicCache(), committed.sequence_ids[:, :0])
        for row, (length, num_new) in enumerate(zip(committed.lengths, committed.num_new, strict=True)):
            ids = committed.sequence_ids[row, :length]
            self.pending[row].add(ids[length - num_new :], committed.features[row, :num_new], ids[-1:])
        if max(pending.num_waiting for pending in self.pending) > MOST_WAITING:
            self.restart()

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self.pending = [self.pending[row] for row in rows]
        if self.num_read:  # else nothing is kept of what was read
            self.num_read = [self.num_read[row] for row in rows]
            self.slots.select(rows)

    def restart(self) -> None:
        """Forget what was read: the newest pairs that wait become the whole history."""
        for pending in self.pending:
            pending.keep_newest(MOST_WAITING)
        self.num_read = [0] * len(self.pending)
        self.slots = RowSlots(DynamicCache(), self.slots.positions[:, :0])

    def propose(self, budget: DraftBudget) -> Draft | None:
        """A tree within the budget; None while no row has new pairs, and as many as a draft takes."""
        return self.propose_tree(budget)

    def propose_tree(self, budget: DraftBudget) -> Draft | None:
        """What the drafter drafts of the text: it reads what is new, and goes on from there."""
        if self.fixed is not None:
            return self.propose_fixed(budget)
        if not any(self.num_unread):
            return None
        features = self.read_unread()
        rows = zip(self.num_read, self.pending, strict=True)
        is_ready = [num_read >= self.least_pairs and pending.num_taken > 0 for num_read, pending in rows]
        if not any(is_ready):
            return None
        depths = [depth * ready for depth, ready in zip(budget.depths, is_ready, strict=True)]
        return self.draft(depths, budget, features)

    def draft(self, depths: Sequence[int], budget: DraftBudget, features: Tensor) -> Draft:
        """A tree within the budget and each row's depth, from features `[rows, 1, k, hidden]` of the first pass."""
        return self.draft_static(self.tree, depths, budget, features)

    @property
    def buffers(self) -> FixedPairs:
        """What is kept in fixed shapes, where drafts are made in them."""
        assert self.fixed is not None  # `enter_fixed` comes first
        return self.fixed

    @property
    def roots(self) -> Tensor:
        """The newest committed token of each row, `[rows, 1]`, on the drafter's device."""
        if self.fixed is not None:
            return self.fixed.roots
        return torch.stack([pending.root for pending in self.pending]).to(self.drafter.device)

    @property
    def num_unread(self) -> list[int]:
        """Of each row the pairs not read yet."""
        return [sum(map(len, pending.token_ids)) for pending in self.pending]

    @property
    def has_unread(self) -> bool:
        """Whether there are pairs that the drafter has not read."""
        return any(self.num_unread)

    @property
    def reach(self) -> int:
        """The newest pairs of a row on which drafts depend: a window for each layer, and a block that is read anew."""
        if self.window is None:
            return ENDLESS
        return self.drafter.config.num_hidden_layers * self.window + self.least_pairs

    def take_pending(self, padding_side: str = "right", most: int = ENDLESS) -> tuple[Tensor, Tensor, list[int]]:
        """Ids `[rows, pairs]` and features `[rows, pairs, feature]` of unread pairs, and each row's number.

        Those that wait before the newest `most` are left out, and count as read.
        """
        rows = zip(*(pending.take(most) for pending in self.pending), strict=True)
        ids, features = (pad_sequence(list(part), batch_first=True, padding_side=padding_side) for part in rows)
        num_new = [pending.num_taken for pending in self.pending]
        self.num_read = [num + new for num, new in zip(self.num_read, num_new, strict=True)]
        return ids, features, [min(num, most) for num in num_new]

    def assign_slots(self, num_tokens: list[int]) -> Tensor:
        """Assign slots to each row's newest tokens; their positions `[rows, tokens]`, right-aligned, holes before."""
        num_read = self.lengths
        positions = num_read + torch.arange(-max(num_tokens), 0, device=num_read.device)
        if min(num_tokens) < max(num_tokens):
            first = num_read - torch.tensor(num_tokens, device=num_read.device)[:, None]
            positions = positions.masked_fill(positions < first, HOLE)
        self._drop_unseen(num_tokens)
        self.slots.tidy()
        self.slots.positions = self.slots.positions.to(num_read.device)
        self.slots.append(positions, num_tokens)
        return positions

    def _drop_unseen(self, num_tokens: Sequence[int]) -> None:
        """Before each row reads so many tokens, drop what none of them sees: at times, and as much as a window."""
        if self.window is None or not len(self.slots):
            return
        num_seen = self.window - 1 + self.least_pairs - 1  # a later block may read some of them anew
        if len(self.slots) > num_seen + self.window or max(num_tokens) >= self.reach:
            self.slots.keep_newest([0 if num >= self.reach else num_seen for num in num_tokens])

    def causal_mask(self, positions: Tensor, ends: Tensor | None = None) -> Tensor:
        """Mask `[rows, tokens, slots]`: tokens at `positions` see the text up to themselves, or up to `ends`."""
        held = self.slots.positions
        last = positions if ends is None else ends
        seen = (held[:, None] <= last[..., None]) & (held != HOLE)[:, None]
        return within_reach(seen, positions, held, self.window)

    def draft_mask(self, seen: Tensor, positions: Tensor) -> Tensor:
        """Mask `[rows, tokens, slots]` of drafted tokens: all text within the window, and `seen` of the draft's slots.

        The tokens stand at `positions` `[rows, tokens]` of the text.
        """
        if self.fixed is not None:
            return self.fixed.draft_mask(seen, positions)
        return torch.cat([self.causal_mask(positions), seen.to(positions.device)], dim=-1)

    @property
    def cache(self) -> Cache:
        """Where keys and values of drafted tokens go."""
        return self.slots.cache if self.fixed is None else self.fixed.cache

    @property
    def lengths(self) -> Tensor:
        """The number of pairs read of each row, `[rows, 1]`, on the drafter's device."""
        if self.fixed is not None:
            return self.fixed.cache.lengths
        return torch.tensor(self.num_read, device=self.drafter.device)[:, None]

    def forget_drafted(self) -> None:
        """Drop the keys and values of drafted tokens; fixed ones are overwritten."""
        if self.fixed is None:
            self.slots.forget_drafted()

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings of the target, or of the drafter where it has its own, in the drafter's type and device."""
        own = getattr(self.drafter, "embed_tokens", None)
        read = self.target.embed if own is None else own
        return self.to_drafter(read(token_ids))

    def to_drafter(self, states: Tensor) -> Tensor:
        """`states` in the drafter's type and device."""
        return states.to(self.drafter.device, self.drafter.dtype)

    def run(self, name: str, *inputs: Any) -> Any:
        """What the drafter's method of this name gives; it is compiled in fixed shapes if the call asks for it."""
        if self.fixed is None or self.backend is None:
            return getattr(self.drafter, name)(*inputs)
        return compiled_call(self.drafter, self.backend, name, *inputs)

    def why_not_fixed(self, budget: DraftBudget) -> str | None:
        """Why drafts within such budgets cannot be made in fixed shapes, in words; None if they can."""
        rotary = getattr(self.drafter, "rotary_emb", None)
        if rotary is not None and rotary.rope_type in SWITCHING:
            return "the drafter's rotary frequencies depend on the length of the text"
        return why_probs_matter(budget)

    def enter_fixed(self, num_slots: int, most_kept: int, buffers: Any = None) -> FixedPairs:
        """Read what waits, move all that is known of the text to buffers, and go on in them."""
        assert any(self.num_unread)  # else nothing can be drafted from
        pair, first = self.pending[0].features[0], self.read_unread()
        sizes = (self.num_draft_slots, most_kept, self.window, self.settings)
        prompt = ReadPrompt(self.slots, self.num_read, self.roots, first, pair, self.carried(), *sizes)
        is_fit = isinstance(buffers, FixedPairs) and buffers.made_for == prompt.shapes
        fixed: FixedPairs = buffers if is_fit else FixedPairs(prompt, num_slots)
        fixed.load(prompt)
        self.fixed, self._num_waiting, self.pending = fixed, [0] * len(self.num_read), []
        self.slots = RowSlots(DynamicCache(), self.slots.positions[:, :0])
        self.draft_token_ids = fixed.carried.get("draft_token_ids")
        return fixed

    @property
    def settings(self) -> Any:
        """What decides work in fixed shapes besides weights, the text and what drafts are asked for."""
        return None

    def read_unread(self) -> Tensor:
        """Read what waits, as ever: features `[rows, 1, k, hidden]` of the first pass over each row's newest pairs."""
        raise NotImplementedError

    def read_pairs(self, token_ids: Tensor, features: Tensor, num: Tensor) -> Tensor:
        """[`StaticTreeGenerator.read_unread`] of the first `num` `[rows, 1]` of `[rows, pairs]`, in fixed shapes.

        It changes `carried`, where that is kept, and writes keys and values; `lengths` come after it.
        """
        raise NotImplementedError

    def propose_fixed(self, budget: DraftBudget) -> Draft | None:
        """Read what waits, and draft; None while no row has pairs enough."""
        assert budget.prices is None  # the host would be asked what pays
        self._catch_up()
        if max(self.num_read) < self.least_pairs:
            return None
        return self.draft_fixed(budget, self.buffers.shown(max(self.num_read)))

    def commit_kept(self, kept: Kept) -> None:
        """Let the new pairs wait, which lie where those of all such steps lie; if they are too many, they are read."""
        if max(kept.num_new) > self.buffers.most_waiting:
            self._commit_in_pieces(kept)
        else:
            self._let_wait(kept.num_new)
            self.buffers.add_kept(kept)

    def _let_wait(self, num_new: Sequence[int]) -> None:
        """Count pairs that will wait, after reading what waits if they are too many together."""
        if max(map(sum, zip(self._num_waiting, num_new, strict=True))) > self.buffers.most_waiting:
            self._catch_up()
        self._num_waiting = [old + new for old, new in zip(self._num_waiting, num_new, strict=True)]

    def _commit_in_pieces(self, kept: Kept) -> None:
        assert kept.features is not None  # as above
        most = self.buffers.most_waiting
        for start in range(0, max(kept.num_new), most):
            self._let_wait([min(max(num - start, 0), most) for num in kept.num_new])
            piece = slice(start, start + most)
            self.buffers.add(kept.token_ids[:, piece], kept.features[:, piece], (kept.num - start).clamp(0, most))

    def _commit_fixed(self, committed: Committed) -> None:
        """The same of pairs that the host knows."""
        assert committed.features is not None  # as above
        device, features = self.drafter.device, committed.features
        ids, num_new = committed.sequence_ids, torch.tensor(committed.num_new, device=device)[:, None]
        first = torch.tensor(committed.lengths, device=device)[:, None] - num_new
        columns = (first + torch.arange(features.shape[1], device=device)).clamp(max=ids.shape[1] - 1)
        self._commit_in_pieces(Kept(ids.to(device).gather(1, columns), features, num_new, committed.num_new))

    def _catch_up(self) -> None:
        """Read the pairs that wait."""
        if not any(self._num_waiting):
            return
        self.num_read = [old + new for old, new in zip(self.num_read, self._num_waiting, strict=True)]
        self.buffers.read(max(self._num_waiting), self.buffers.shown(max(self.num_read)), self._read_waiting)
        self._num_waiting = [0] * len(self.num_read)

    def _read_waiting(self, width: int) -> None:
        """Read the pairs of the first columns; the work that is repeated."""
        fixed, num = self.buffers, self.buffers.num_waiting
        first = self.read_pairs(fixed.token_ids[:, :width], fixed.features[:, :width], num)
        fixed.first.copy_(torch.where(num[..., None, None] > 0, first, fixed.first))
        fixed.take(num)

    @abstractmethod
    def draft_blocks(self, token_ids: Tensor, features: Tensor, parents: Tensor, seen: Tensor, number: int) -> Tensor:
        """Features `[rows, blocks, k, hidden]` of pass `number`, 1 or more, all its blocks in one forward.

        Of the tokens `[rows, blocks, k]` each block continues the block of the pass before that `parents`
        `[rows, blocks]` names, from whose `features` it is drafted, and sees the drafted tokens `seen`
        `[rows, blocks * k, draft slots]`. Keys and values stay in the cache until the draft is complete.
        """

    def prepare(self, features: Tensor) -> Tensor:
        """Of features `[rows, blocks, k, hidden]` what [`change_after`] needs of them, computed once."""
        raise NotImplementedError

    def change_after(self, token_ids: Tensor, prepared: Tensor) -> Tensor:
        """What nodes change in the logits after them: `[rows, nodes, tokens]`.

        Of each node `token_ids` `[rows, nodes, offset + 1]` has the tokens of its block up to itself, after the one
        that the block follows; `prepared` `[rows, nodes, ...]` is that of its block at the next offset.
        """
        raise NotImplementedError

    def logits_after(self, token_ids: Tensor, logits: Tensor, prepared: Tensor, blocks: Tensor) -> Tensor:
        """Logits `[rows, nodes, tokens]` after nodes, from `logits` and `prepared` of all `blocks` at one offset."""
        lists = of_blocks(logits, blocks)  # numbers are added as they are, the sum has the wider type
        return lists + self.change_after(token_ids, of_blocks(prepared, blocks).expand(*blocks.shape, -1))

    def draft_logits(self, features: Tensor) -> Tensor:
        """Logits of features, over the tokens that the drafter can draft."""
        return self.target.head(features)

    @property
    def num_draftable_tokens(self) -> int:
        """Tokens that the drafter can draft."""
        return self.target.vocab_size if self.draft_token_ids is None else len(self.draft_token_ids)

    def target_ids(self, token_ids: Tensor) -> Tensor:
        """The target's ids of the drafter's."""
        return token_ids if self.draft_token_ids is None else self.draft_token_ids.to(token_ids.device)[token_ids]

    def over_target_ids(self, probs: Tensor) -> Tensor:
        """Probabilities over the target's tokens; what cannot be drafted has none."""
        if self.draft_token_ids is None:
            return probs
        spread = probs.new_zeros(*probs.shape[:-1], self.target.vocab_size)
        return spread.index_copy(-1, self.draft_token_ids.to(probs.device), probs)

    def draft_static(self, tree: DraftTree, depths: Sequence[int], budget: DraftBudget, features: Tensor) -> Draft:
        """`tree` cut to the budget and each row's depth, from features `[rows, 1, k, hidden]` of the first pass."""
        tree = self.within(tree, max(depths), budget)
        passes = draft_passes(tree, self.block_size, self.drafter.device)
        filled = self.fill(passes, len(tree), budget, features)
        by_row = parents_by_row(tree, depths).to(filled.token_ids.device)
        drawn: dict[str, Any] = {}
        if filled.dists:
            drawn = {"draft_probs": torch.cat(filled.dists, dim=1), "dist_index": filled.dist_index}
        return Draft(filled.token_ids, by_row, num_passes=len(passes), node_probs=filled.node_probs, **drawn)

    def within(self, tree: DraftTree, max_depth: int, budget: DraftBudget) -> DraftTree:
        """The part of `tree` above `max_depth` that the budget allows, whatever it says of rows."""
        max_depth = min(max_depth, int(tree.depths.max()))
        if budget.num_passes is not None:
            max_depth = min(max_depth, budget.num_passes * self.block_size)
        return fitted(tree, max_depth, budget.num_nodes, budget.is_chain)

    def fill(self, passes: Sequence[DraftPass], num_nodes: int, budget: DraftBudget, features: Tensor) -> FilledTree:
        """The tokens of a tree's nodes, pass by pass, from features `[rows, 1, k, hidden]` of the first one."""
        token_ids = self.roots.repeat(1, num_nodes)
        filled = FilledTree(token_ids, torch.full_like(token_ids[:1], -1))
        if budget.wants_node_probs:
            filled.node_probs = torch.ones(token_ids.shape, dtype=torch.float)
        for number, draft_pass in enumerate(passes):
            if number:
                parents = draft_pass.parent_blocks.expand(len(token_ids), -1)
                seen = draft_pass.tail_mask.expand(len(token_ids), -1, -1)
                features = self.draft_blocks(token_ids[:, draft_pass.fed_nodes], features, parents, seen, number)
            logits = self.draft_logits(features)
            parts = (draft_pass,) if self.predicts_independently else draft_pass.by_block_offset
            prepared = features if self.predicts_independently else self.prepare(features)
            for offset, part in enumerate(parts):
                self._fill_part(filled, part, budget, (part, offset, logits, prepared, token_ids))
        self.forget_drafted()
        return filled

    @property
    def num_draft_slots(self) -> int:
        """The most tokens that are fed to draft a tree."""
        passes = draft_passes(self.tree, self.block_size, self.drafter.device)
        return sum(draft_pass.fed_nodes.numel() for draft_pass in passes[1:])

    def carried(self) -> dict[str, Tensor]:
        """The list of tokens that can be drafted, which is made for a call."""
        return {} if self.draft_token_ids is None else {"draft_token_ids": self.draft_token_ids}

    def first_features(self, tree: DraftTree) -> Tensor:  # noqa: ARG002  a subclass needs it
        """Features `[rows, 1, k, hidden]` of the first pass over `tree`, from the buffers."""
        return self.buffers.first

    def max_depths(self) -> Tensor:
        """The depth `[rows, 1]` that each row's tree may have, from the buffers."""
        return self.buffers.limits * (self.lengths >= self.least_pairs)

    def draft_fixed(self, budget: DraftBudget, shown: int) -> Draft:
        """The static tree, cut to all of the budget but the depths of rows: nodes below these belong to nobody."""
        tree, device = self.within(self.tree, len(self.tree), budget), self.drafter.device
        passes, depth = draft_passes(tree, self.block_size, device), int(tree.depths.max())
        fixed_noise, draws = drawn_ahead(budget, len(self.num_read), depth)
        draft = self.buffers.draft(("static", tree, draws), len(tree))
        known = draft.constants
        if not known:
            known |= {"passes": passes, "parents": tree.parents.to(device), "depths": tree.depths.to(device)}

        def work() -> None:
            filled = self.fill(known["passes"], len(tree), fixed_noise, self.first_features(tree))
            draft.token_ids.copy_(filled.token_ids)
            draft.parents.copy_(known["parents"].where(known["depths"] <= self.max_depths(), -1))

        return self.filled(draft, depth, budget, shown, work)

    def filled(
        self, draft: FixedDraft, depth: int, budget: DraftBudget, shown: int, work: Callable[[], None]
    ) -> Draft:
        """What `work` writes to the buffers `draft`: trees of `depth` at most, or less where the budget gives less."""
        depths = tuple(min(limit, depth) for limit in budget.depths)
        self.buffers.limit(depths)
        self.buffers.fill(draft, shown, work)
        num_passes = -(-depth // self.block_size)
        return Draft(draft.token_ids, draft.parents, num_passes=num_passes, max_depth=max(depths))

    def _fill_part(self, filled: FilledTree, part: DraftPass, budget: DraftBudget, inputs: Any) -> None:
        """The tokens of one part of a pass, and what else is wanted of them."""
        is_drawn = budget.temperature is not None
        if is_drawn or filled.node_probs is not None:
            probs = self._probs(self._lists(*inputs), budget)
        found = self._drawn(part, probs, budget) if is_drawn else self._best(*inputs)
        filled.token_ids[:, part.nodes] = found.to(filled.token_ids.device)
        if is_drawn and budget.noise is None:
            indices = torch.arange(len(part.parents), device=filled.dist_index.device)
            filled.dist_index[0, part.parents] = indices + sum(dist.shape[1] for dist in filled.dists)
            filled.dists.append(probs)
        if filled.node_probs is not None:
            likely = probs_of_nodes(probs, found, part.siblings[0], part.depths, budget)
            filled.node_probs[:, part.nodes.cpu()] = likely

    def _lists(self, part: DraftPass, offset: int, logits: Tensor, prepared: Tensor, token_ids: Tensor) -> Tensor:
        """Logits `[rows, parents, tokens]` of the parents' children, which stand at `offset` in their blocks."""
        blocks, offsets = part.lists
        if self.predicts_independently:
            return logits[:, blocks, offsets]
        by_row = blocks.expand(len(token_ids), -1)
        return self.logits_after(token_ids[:, part.paths], logits[:, :, offset], prepared[:, :, offset], by_row)

    def _best(self, part: DraftPass, offset: int, logits: Tensor, prepared: Tensor, token_ids: Tensor) -> Tensor:
        """The drafted tokens `[rows, drafted]`: the best of each list."""
        blocks, offsets, ranks = part.sources
        if self.predicts_independently:  # nodes of one offset share its list
            return self.target_ids(logits.topk(part.num_ranks, dim=-1).indices[:, blocks, offsets, ranks])
        lists = self._lists(part, offset, logits, prepared, token_ids)
        return self.target_ids(lists.topk(part.num_ranks, dim=-1).indices[:, part.siblings[0], ranks])

    def _drawn(self, part: DraftPass, probs: Tensor, budget: DraftBudget) -> Tensor:
        """The drafted tokens `[rows, drafted]`, drawn from `probs` `[rows, parents, vocab]`."""
        parents, indices = part.siblings
        return draw_children(probs, part.depths, part.num_siblings, budget, self.rng)[:, parents, indices]

    def _probs(self, lists: Tensor, budget: DraftBudget) -> Tensor:
        """Distributions over the target's tokens, of the parents' logits."""
        return self.over_target_ids(torch.softmax(lists / (budget.temperature or 1.0), dim=-1))


def gives_probs(budget: DraftBudget) -> bool:
    """Whether tokens are drawn, so that what they were drawn from is needed."""
    return budget.temperature is not None and budget.noise is None


def why_probs_matter(budget: DraftBudget) -> str | None:
    """Why a draft needs probabilities, which none in fixed shapes has, in words; None if it does not."""
    if gives_probs(budget):
        return "drafts are drawn, and their probabilities compared with the target's"
    return "an observer asks for the probabilities of drafted tokens" if budget.wants_node_probs else None


def of_blocks(lists: Tensor, blocks: Tensor) -> Tensor:
    """Of `[rows, blocks, numbers]` those of each node's block `[rows, nodes]`; with one block they are all alike."""
    return lists if lists.shape[1] == 1 else lists.gather(1, blocks[..., None].expand(-1, -1, lists.shape[-1]))


def tree_from_json(value: dict[str, Any]) -> DraftTree:
    """A stored tree; equal trees are one object, so that passes are planned once and not for every call."""
    return _tree(json.dumps(value))


@lru_cache(maxsize=64)
def _tree(text: str) -> DraftTree:
    return DraftTree.from_json(json.loads(text))


@lru_cache(maxsize=256)
def fitted(tree: DraftTree, max_depth: int, num_nodes: int, is_chain: bool) -> DraftTree:
    """The part of `tree` within the limits; the tree itself where all of it is."""
    if max_depth >= int(tree.depths.max()) and num_nodes >= len(tree) and not is_chain:
        return tree
    return tree.pruned(max_depth, num_nodes, is_chain)


def drawn_ahead(budget: DraftBudget, num_rows: int, depth: int) -> tuple[DraftBudget, Any]:
    """The budget with the noise of all draws down to `depth` in place, and what work on it holds of the draws."""
    if budget.noise is None:
        return budget, None
    noises = {(row, at): budget.noise(row, at) for row in range(num_rows) for at in range(1, depth + 1)}
    places = (budget.temperature, *(noise.data_ptr() for noise in noises.values()))
    return replace(budget, noise=lambda row, at: noises[row, at]), places


def parents_by_row(tree: DraftTree, depths: Sequence[int]) -> Tensor:
    """Parents `[1 or rows, nodes]`: nodes deeper than a row's limit belong to nobody."""
    if min(depths) >= int(tree.depths.max()):
        return tree.parents
    return tree.parents.where(tree.depths <= torch.tensor(depths)[:, None], -1)


def draw_children(
    probs: Tensor, depths: Sequence[int], num_children: int, budget: DraftBudget, rng: torch.Generator
) -> Tensor:
    """Distinct tokens `[rows, parents, num_children]`, drawn in turn from `probs` `[rows, parents, vocab]`.

    Each parent draws anew, unless the budget brings noise: then that of `depths`, where the children of each parent
    stand. Where fewer tokens than children have probability, the last children have none.
    """
    noise = _coming_noise(probs, depths, budget)
    if noise is None:  # in float64 no quotient becomes 0, so that draws are from `probs` however small a part of it is
        noise = torch.empty(probs.shape, dtype=torch.double, device=rng.device).exponential_(generator=rng)
        probs = probs.to(noise.device)
    children = draw_distinct(probs.flatten(0, 1), noise.flatten(0, 1), num_children)
    return children.reshape(*probs.shape[:2], -1)


def probs_of_nodes(
    probs: Tensor, found: Tensor, parents: Tensor, depths: Sequence[int], budget: DraftBudget
) -> Tensor:
    """Probability that the target takes each token of `found` `[rows, nodes]`, by `probs` `[rows, parents, vocab]`.

    `parents` `[nodes]` are indices into `probs`. Noise of the budget is taken into account, as in grown trees.
    """
    noise = _coming_noise(probs, depths, budget)
    weights = probs if noise is None else probs / noise
    likely = weights / weights.sum(dim=-1, keepdim=True)
    return likely[:, parents].gather(-1, found.to(probs.device)[..., None]).squeeze(-1).float().cpu()


def _coming_noise(probs: Tensor, depths: Sequence[int], budget: DraftBudget) -> Tensor | None:
    if budget.noise is None:
        return None
    noises = [budget.noise(row, depth) for row in range(len(probs)) for depth in depths]
    return torch.stack(noises).reshape(probs.shape).to(probs.device)
