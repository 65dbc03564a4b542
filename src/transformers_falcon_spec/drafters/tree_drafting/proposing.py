"""The base of generators whose drafter reads pairs of feature and token, and drafts static trees or grown ones.

Pairs wait until the drafter is asked. Then it reads them and drafts, pass by pass. The nodes of a static tree take the
best tokens, or tokens drawn for rejection sampling. A tree that grows feeds the likeliest blocks in every pass, and of
all nodes the likeliest are kept. Token matching follows the target's own tokens, so any tree will do for it. Where
drawn tokens are compared with their probabilities the tree is static, for choosing nodes by what was drawn would bias
the text. Source: arXiv 2406.16858, section 4, there with blocks of one token.

A tree may have a branch of repeated text: what followed the newest tokens where they stood before. Where that is all
but sure, as in a loop, it is the whole draft, and what the drafter did not read waits.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from ...core.sampling import draw_distinct
from ...core.tree import Children, DraftTree, TreeGrowth, with_chain
from ...errors import OptionError
from ...generation.capture.compile import compiled_call
from ...generation.capture.norms import as_captured
from ...generation.drafting import Committed, Draft, DraftBudget, FixedGenerator, Kept, TargetView
from ...generation.slot_cache import BUCKETS, EXACT
from ...generation.stock_cache import ENDLESS
from ...generation.tuning import NODES_PER_WIDTH
from ..config_fields import block_temperatures
from .block_passes import DraftedNodes, DraftPass, draft_passes, fitted, placed
from .repeated_text import NGRAM_SIZE, Branch, RepeatedText
from .text import DraftText, FixedDraft, TextKind, newest_of

LEAST_BLOCKS = 2  # fed in a later pass where there are so many; `lab/log/trees.md` says what the second one brings
MOST_UNREAD = 128  # pairs that wait for the drafter while the text goes on alone
MOST_WAITING = 512  # pairs of a row that wait for a drafter that is not asked
PASSES_THAT_MAY_PAY = 3  # times the usual depth, where passes are paid for
ROOM = 256  # tokens behind the prompt that have slots at first
SWITCHING = ("dynamic", "longrope")  # kinds of rotary positions


@dataclass
class FilledTree:
    """The tokens of a tree's nodes, and what they were chosen by where that is wanted."""

    token_ids: Tensor  # [rows, nodes]
    dist_index: Tensor  # [1, nodes] which of `dists`, side by side, the children of a node were drawn from; -1 = none
    dists: list[Tensor] = field(default_factory=list)  # [rows, parents, vocab] of each part of a pass


class PairGenerator(FixedGenerator):
    """A generator that drafts `block_size` tokens a pass; all rows share the passes, each has a tree of its own."""

    least_pairs: int = 1  # of a row before anything is drafted
    text: DraftText  # what is kept of the texts, from the first commit on
    predicts_independently: bool = True  # tokens of a block, without regard to those that stand before them in it
    num_before: int = 1  # tokens that stand before one and are read for it, where it is not predicted independently

    def __init__(self, drafter: Any, target: TargetView, max_length: int, rng: torch.Generator) -> None:
        super().__init__(drafter, target, max_length, rng)
        # the target's id of each token that can be drafted; None: all, as they are
        self.draft_token_ids: Tensor | None = getattr(drafter, "draft_token_ids", None)
        self.draft_ids: Tensor | None = getattr(drafter, "draft_ids", None)  # the drafter's id of each of the target's
        self.window: int | None = drafter.sliding_window
        self.block_size: int = drafter.block_size
        self.tree: DraftTree = drafter.draft_tree
        self.has_text = False  # from the first commit on
        self.is_tree_dynamic: bool = drafter.is_tree_dynamic
        self.tree_depth: int = drafter.tree_depth  # of trees that grow
        self.num_draftable_tokens = target.vocab_size if self.draft_token_ids is None else len(self.draft_token_ids)
        self.constants: dict[Any, Any] = {}  # made of the host's numbers once
        self.repeated_text: RepeatedText | None = None
        if drafter.num_text_tokens:
            num_matching = drafter.generation_config.max_matching_ngram_size or NGRAM_SIZE
            self.repeated_text = RepeatedText(drafter.num_text_tokens, num_matching)

        num_ranks = max(int(self.tree.ranks.max()) + 1, drafter.generation_config.tree_top_k * self.is_tree_dynamic)
        if num_ranks > self.num_draftable_tokens:
            raise OptionError(
                f"`draft_tree` and `tree_top_k` ask for the {num_ranks} best tokens of a position, but the drafter "
                f"knows {self.num_draftable_tokens}. Take a narrower tree."
            )

    # The text: what waits, and reading it

    def commit(self, committed: Committed) -> None:
        """Keep the new text and its pairs for the next proposal."""
        if not self.has_text:
            kind = self._kind_of_text(committed)
            num_slots = min(max(committed.num_new) + ROOM, self.max_length)
            self.text = DraftText(kind, num_slots, self.fresh_states(kind.num_rows))
            self.has_text = True

        self._make_room_for(committed.num_new)
        self.text.add(committed)
        if self.repeated_text is not None:
            self.repeated_text.commit(committed)

    def commit_kept(self, kept: Kept) -> None:
        """The same of what lies on the device, after `enter_fixed`."""
        self._make_room_for(kept.num_new)
        self.text.add_kept(kept)
        if self.repeated_text is not None:
            self.repeated_text.commit_kept(kept)

    def _make_room_for(self, num_new: Sequence[int]) -> None:
        """Read what waits for a drafter that is not asked, if so many new pairs would be too many beside it."""
        num_waiting = max(map(sum, zip(self.text.num_waiting, num_new, strict=True)))
        most = self.text.room if self.text.is_fixed else MOST_WAITING
        if any(self.text.num_read) and num_waiting > most:
            self.text.read(self.read_pairs)

    def _kind_of_text(self, committed: Committed) -> TextKind:
        assert committed.features is not None  # a drafter of this kind reads at least one layer
        return TextKind(
            shapes=EXACT,
            num_rows=len(committed.lengths),
            device=self.drafter.device,
            feature_size=committed.features.shape[-1],
            feature_dtype=committed.features.dtype,
            num_layers=self.num_layers,
            num_draft_slots=self.num_draft_slots,
            most_kept=1,
            window=self.window,
            reach=self.reach,
            settings=(repr(getattr(self.drafter.config, "confidence_temperatures", None)), self.settings),
        )

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self.text.select(rows)
        if self.repeated_text is not None:
            self.repeated_text.select_rows(rows)

    @property
    def has_unread(self) -> bool:
        """Whether there are pairs that the drafter has not read."""
        return self.has_text and any(self.text.num_waiting)

    @abstractmethod
    def read_pairs(self, token_ids: Tensor, features: Tensor, num: Tensor) -> Tensor:
        """Read pairs behind the texts: features `[rows, 1, k, hidden]` of the first pass of a draft.

        Of ids `[rows, pairs]` and features `[rows, pairs, feature]` each row's first `num` `[rows, 1]` count. Carries
        on what the text carries, and writes keys and values; `text.cache.lengths` grow after it.
        """

    def newest_within_reach(self, token_ids: Tensor, features: Tensor, num: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of pairs that are read together the newest on which drafts depend; those before them count as read."""
        if token_ids.shape[1] <= self.reach:
            return token_ids, features, num

        num_before = (num - self.reach).clamp(min=0)
        columns = num_before + torch.arange(self.reach, device=num.device)
        self.text.cache.lengths.add_(num_before)
        return token_ids.gather(1, columns), newest_of(features, columns), num - num_before

    @cached_property
    def reach(self) -> int:
        """The newest pairs of a row on which drafts depend: a window for each layer, and a block that is read anew."""
        if self.window is None:
            return ENDLESS

        return self.drafter.config.num_hidden_layers * self.window + self.least_pairs

    @property
    def num_layers(self) -> int:
        """Layers of the drafter that keep keys and values."""
        return int(self.drafter.config.num_hidden_layers)

    def fresh_states(self, num_rows: int) -> dict[str, Tensor]:  # noqa: ARG002  a subclass needs it
        """What is carried on from pair to pair besides keys and values, `[rows, ...]` by name, as it is at first."""
        return {}

    # Drafting

    def propose(self, budget: DraftBudget) -> Draft | None:
        """The drafter's tree with the branch of repeated text, or the branch alone.

        None while no row has new pairs, and as many as a draft takes.
        """
        branch = None
        # rules that compare drafted tokens with what these were drawn from get none: nothing is drawn there
        if self.repeated_text is not None and budget.has_free_shape:
            branch = self.repeated_text.branch(budget.depths, budget.num_nodes - 1)

        may_wait = branch is not None and budget.num_passes is None and max(self.text.num_waiting) < MOST_UNREAD
        if branch is not None and branch.is_sure and may_wait:
            return self._joined(self._roots_alone(), branch, budget)

        draft = self.propose_tree(budget)
        if draft is None or branch is None or budget.is_chain:
            return draft

        return self._joined(draft, branch, budget)

    def propose_tree(self, budget: DraftBudget) -> Draft | None:
        """What the drafter drafts of the text: it reads what is new, and goes on from there."""
        if not self.has_text:
            return None

        text = self.text
        text.read(self.read_pairs)
        deepest = self._deepest(budget)
        limits = []
        is_ready = False
        for depth, num_read, num_new in zip(budget.depths, text.num_read, text.num_new, strict=True):
            has_enough = num_read >= self.least_pairs and num_new > 0
            limits.append(min(depth, deepest) if has_enough else 0)
            is_ready = is_ready or has_enough

        text.num_new = [0] * len(text.num_new)
        if not is_ready:
            return None

        if text.is_fixed:
            return self._fixed_draft(tuple(limits), deepest, budget)

        return self._draft(torch.tensor(limits, device=self.drafter.device)[:, None], max(limits), budget)

    def _draft(self, limits: Tensor, deepest: int, budget: DraftBudget) -> Draft:
        """A tree within the budget and each row's depth `[rows, 1]`, of which none is more than `deepest`."""
        if self.is_tree_dynamic and budget.has_free_shape:
            growth = TreeGrowth(self.text.roots, limits[:, 0])
            return self._grow(growth, deepest, budget)

        tree = self._within(deepest, budget)
        passes = draft_passes(tree, self.block_size, self.drafter.device)
        parents, depths = placed(tree, self.drafter.device)
        self.constants[tree] = (passes, parents, depths)  # kept alive for captured work, which reads them

        filled = self._fill(tree, passes, budget)
        drawn: dict[str, Any] = {}
        if filled.dists:
            drawn = {"draft_probs": torch.cat(filled.dists, dim=1), "dist_index": filled.dist_index}

        by_row = parents.where(depths <= limits, -1)  # nodes below a row's limit belong to nobody
        return Draft(filled.token_ids, by_row, num_passes=len(passes), **drawn)

    def _fixed_draft(self, limits: tuple[int, ...], deepest: int, budget: DraftBudget) -> Draft:
        """The same in buffers, by work that asks the host for nothing and is the same whatever the limits of rows."""
        assert budget.prices is None  # the host would be asked what pays
        shape: tuple[Any, ...]
        if self.is_tree_dynamic:
            num_nodes, width = self._grown_size
            num_nodes = min(num_nodes, budget.num_nodes)
            shape = (width, num_nodes, deepest, budget.is_chain)
        else:
            tree = self._within(deepest, budget)
            num_nodes = len(tree)
            shape = (tree,)

        num_passes = -(-deepest // self.block_size)
        coming, draws = drawn_ahead(budget, len(limits), num_passes * self.block_size)
        buffers = self.text.draft((*shape, draws), num_nodes)
        self.constants = buffers.constants
        self._keep_vocabulary()

        def work() -> None:
            draft = self._draft(self.text.limits, deepest, coming)
            num = draft.token_ids.shape[1]  # fewer than there is room for, where not so many are considered
            buffers.token_ids[:, :num].copy_(draft.token_ids)
            buffers.parents[:, :num].copy_(draft.parents)

        self.text.limit(limits)
        self.text.fill(buffers, self.text.shown(max(self.text.num_read)), work)
        return Draft(
            buffers.token_ids, buffers.parents, num_passes=num_passes, max_depth=max(limits), copies=buffers.copies
        )

    def _deepest(self, budget: DraftBudget) -> int:
        """How deep trees may be, whatever the budget says of rows.

        Those that grow are as deep as the options say, or, where none does, as far as passes pay or are asked for.
        """
        if not (self.is_tree_dynamic and budget.has_free_shape):
            return int(self._within(len(self.tree), budget).depths.max())

        options = self.drafter.generation_config
        depth = self.tree_depth
        feeds_itself = self.drafter.feature_layers in {(), (-1,)}
        if (budget.prices or budget.num_passes) and options.tree_depth is None and feeds_itself:
            depth *= PASSES_THAT_MAY_PAY

        return depth if budget.num_passes is None else min(depth, budget.num_passes * self.block_size)

    def draft_blocks(self, token_ids: Tensor, features: Tensor, parents: Tensor, seen: Tensor, number: int) -> Tensor:
        """Features `[rows, blocks, k, hidden]` of all blocks of pass `number`, 1 or more, in one forward.

        Each block of the tokens `[rows, blocks, k]` continues the block of the pass before that `parents`
        `[rows, blocks]` names, from whose `features` it is drafted, and sees the drafted tokens `seen`
        `[rows, blocks * k, draft slots]`. Keys and values stay in the cache until the draft is whole. A drafter whose
        trees end where its first block does has none.
        """
        raise NotImplementedError(f"A `{type(self).__name__}` drafts in one pass, so that no pass follows.")

    def prepare(self, features: Tensor) -> Tensor:
        """Of features `[rows, blocks, k, hidden]` what [`change_after`] needs of them, computed once."""
        return features

    def change_after(self, token_ids: Tensor, prepared: Tensor) -> Tensor:  # noqa: ARG002  subclasses read them
        """What nodes change in the logits after them, `[rows, nodes, tokens]`: nothing, unless a subclass says so.

        Of each node `token_ids` `[rows, nodes, tokens]` has the newest tokens of its block up to itself, `num_before`
        or more where there are so many; a block begins with the token that it follows. `prepared`
        `[rows, nodes, ...]` is that of its block at the next offset.
        """
        return prepared.new_zeros(1)

    def logits_after(self, token_ids: Tensor, logits: Tensor, prepared: Tensor, blocks: Tensor) -> Tensor:
        """Logits `[rows, nodes, tokens]` after nodes, from `logits` and `prepared` of all `blocks` at one offset."""
        if logits.shape[1] > 1:  # of one block they are all alike
            index = blocks[..., None]
            logits = logits.gather(1, index.expand(-1, -1, logits.shape[-1]))
            prepared = prepared.gather(1, index.expand(-1, -1, prepared.shape[-1]))
        # numbers are added as they are, the sum has the wider type
        return logits + self.change_after(token_ids, prepared.expand(*blocks.shape, -1))

    @cached_property
    def head_rows(self) -> nn.Linear | None:
        """The rows of the target's head for the tokens that can be drafted; None where all of it is read, or none."""
        has_own_head = hasattr(self.drafter, "lm_head")
        return None if self.draft_token_ids is None or has_own_head else self.target.head_rows(self.draft_token_ids)

    def draft_logits(self, features: Tensor) -> Tensor:
        """Logits of features, over the tokens that the drafter can draft."""
        return self.target.head(features, rows=self.head_rows)

    def _keep_vocabulary(self) -> None:
        """Let work that is repeated read the list of tokens and their rows of the head where it read them at first.

        All are copied there: list and target may have changed since.
        """
        known = self.constants
        for name in ("draft_token_ids", "draft_ids"):
            ids = getattr(self, name)
            if ids is not None and name not in known:
                with torch.inference_mode(False):
                    known[name] = ids.clone()

            setattr(self, name, None if ids is None else known[name].copy_(ids))

        rows = self.head_rows
        if rows is not None:
            self.head_rows = known.setdefault("head_rows", rows)
            self.head_rows.load_state_dict(rows.state_dict())

    def target_ids(self, token_ids: Tensor) -> Tensor:
        """The target's ids of the drafter's."""
        return token_ids if self.draft_token_ids is None else self.draft_token_ids.to(token_ids.device)[token_ids]

    def over_target_ids(self, probs: Tensor) -> Tensor:
        """Probabilities over the target's tokens; what cannot be drafted has none."""
        if self.draft_token_ids is None:
            return probs

        spread = probs.new_zeros(*probs.shape[:-1], self.target.vocab_size)
        return spread.index_copy(-1, self.draft_token_ids.to(probs.device), probs)

    # Static trees

    def _within(self, max_depth: int, budget: DraftBudget) -> DraftTree:
        """The part of the static tree above `max_depth` that the budget allows, whatever it says of rows."""
        max_depth = min(max_depth, int(self.tree.depths.max()))
        if budget.num_passes is not None:
            max_depth = min(max_depth, budget.num_passes * self.block_size)

        return fitted(self.tree, max_depth, budget.num_nodes, budget.is_chain)

    def _fill(self, tree: DraftTree, passes: Sequence[DraftPass], budget: DraftBudget) -> FilledTree:
        """The tokens of a tree's nodes, pass by pass."""
        text = self.text
        features = text.first
        token_ids = text.roots.repeat(1, len(tree))
        filled = FilledTree(token_ids, torch.full_like(token_ids[:1], -1))
        for number, draft_pass in enumerate(passes):
            if number:
                parents = draft_pass.parent_blocks.expand(len(token_ids), -1)
                seen = draft_pass.tail_mask.expand(len(token_ids), -1, -1)
                features = self.draft_blocks(token_ids[:, draft_pass.fed_nodes], features, parents, seen, number)

            logits = self.draft_logits(features)
            if self.predicts_independently:
                self._choose(filled, draft_pass.drafted, logits.flatten(1, 2), budget)
                continue

            prepared = self.prepare(features)
            for offset, part in enumerate(draft_pass.by_block_offset):
                above = token_ids[:, part.paths]
                blocks = part.blocks.expand(len(token_ids), -1)
                lists = self.logits_after(above, logits[:, :, offset], prepared[:, :, offset], blocks)
                self._choose(filled, part, lists, budget)

        text.forget_drafted()
        return filled

    def _choose(self, filled: FilledTree, part: DraftedNodes, lists: Tensor, budget: DraftBudget) -> None:
        """Give some nodes of a pass their tokens, of logits `[rows, lists, tokens]`: the best, or drawn ones."""
        if budget.temperature is None:
            sources, ranks = part.sources
            best = lists.topk(part.num_ranks, dim=-1).indices
            filled.token_ids[:, part.nodes] = self.target_ids(best[:, sources, ranks])
            return

        probs = torch.softmax(lists[:, part.lists] / budget.temperature, dim=-1)
        probs = self.over_target_ids(probs)  # [rows, parents, vocab]
        children = draw_children(probs, part.depths, part.num_siblings, budget, self.rng)
        parents, places = part.siblings
        filled.token_ids[:, part.nodes] = children[:, parents, places].to(filled.token_ids.device)

        if budget.noise is None:
            num_before = sum(dist.shape[1] for dist in filled.dists)
            indices = torch.arange(len(part.parents), device=filled.dist_index.device)
            filled.dist_index[0, part.parents] = num_before + indices
            filled.dists.append(probs)

    # Trees that grow

    @property
    def _grown_size(self) -> tuple[int, int]:
        """Nodes of a tree, and least nodes of a depth that get children, where no prices decide."""
        options = self.drafter.generation_config
        num_nodes: int = self.drafter.num_tree_nodes
        if options.num_tree_nodes is None and self.num_cheap_nodes > num_nodes:
            num_nodes = max(self.num_cheap_nodes - self.drafter.num_text_tokens, num_nodes)
            return num_nodes, max(options.tree_top_k, num_nodes // NODES_PER_WIDTH)

        return num_nodes, options.tree_top_k

    def _grow(self, growth: TreeGrowth, depth: int, budget: DraftBudget) -> Draft:
        """The draft after the passes that `depth` takes, or as many of them as pay."""
        num_wanted, wanted = self._grown_size
        size = self.block_size
        prices = budget.prices
        features = self.text.first

        if prices:
            wanted = max(wanted, prices.width)
        width = 1 if budget.is_chain else min(wanted, self.num_draftable_tokens)
        num_blocks = max(width // size, LEAST_BLOCKS)  # so that a pass feeds about `width` tokens
        num_passes = -(-depth // size)

        ends = torch.zeros_like(self.text.roots)  # nodes that blocks of a pass follow
        blocks = ends  # whose lists these are
        seen = torch.zeros(*ends.shape, 0, dtype=torch.bool, device=ends.device)  # blocks that each block sees
        num_kept = min(num_wanted, budget.num_nodes)
        net_gain = 0.0
        marginal_gains: list[tuple[float, float]] = []

        def pays() -> bool:  # what is below nodes that do not
            assert prices is not None  # else nobody asks
            return growth.newest_are_kept(growth.best_tree_size(prices.nodes, prices.weights)[0])

        for number in range(num_passes):
            if number:
                expected_tokens = float(growth.log_node_probs.gather(1, ends).exp().sum()) if prices else 0.0
                if prices and not prices.pays(number, expected_tokens):
                    num_passes = number
                    break

                features, seen = self._feed(growth, ends, features, blocks, seen, number)

            children = self.children_of(growth, features, budget, number * size, width)
            grown = growth.expand_blocks(ends, size, children, num_blocks, pays if prices else None)

            if prices:
                before = net_gain
                num_kept, net_gain = growth.best_tree_size(prices.nodes, prices.weights)
                if number:
                    marginal_gains.append((expected_tokens, net_gain - before))

            if grown is None:
                num_passes = number + 1
                break

            ends, blocks = grown

        self.text.forget_drafted()
        token_ids, parents = growth.best(num_kept)
        return Draft(
            token_ids,
            parents,
            num_passes=num_passes,
            expected_by_depth=growth.expected_by_depth(num_kept, self._deepest(budget)) if prices else None,
            marginal_gains=tuple(marginal_gains),
        )

    def _feed(
        self, growth: TreeGrowth, ends: Tensor, features: Tensor, blocks: Tensor, seen: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        """Run pass `number` on the tokens that end at the nodes `ends`: its features, and what its blocks see."""
        size = self.block_size
        own = torch.eye(ends.shape[1], dtype=torch.bool, device=ends.device).expand(len(ends), -1, -1)
        above = seen.gather(1, blocks[..., None].expand(-1, -1, seen.shape[-1]))
        seen = torch.cat([above, own], dim=-1)

        slots = seen.repeat_interleave(size, dim=1).repeat_interleave(size, dim=2)
        fed = growth.token_ids.gather(1, growth.path_up(ends, size).flatten(1)).unflatten(1, (-1, size))
        return self.draft_blocks(fed, features, blocks, slots, number), seen

    def children_of(
        self, growth: TreeGrowth, features: Tensor, budget: DraftBudget, depth: int, width: int
    ) -> Children:
        """The candidates at each offset of blocks that start below `depth`, for [`TreeGrowth.expand_blocks`].

        Their log-probability is that the target takes them. It takes the best of its own scores. If those are the
        drafter's plus independent Gumbel noise of some spread, the probability of a token is the softmax of the
        drafter's scores at that spread as temperature: as `confidence_temperatures` of the config have it, else 1 or
        the temperature of the draws.
        """
        scores = self.scores(self.draft_logits(features), budget, depth)
        temperatures = self._temperatures(budget, scores)
        if self.predicts_independently:  # what stands before an offset changes nothing there
            log_probs = (scores / temperatures[:, None]).log_softmax(dim=-1)
            best = log_probs.topk(width, dim=-1)
            token_ids = self.target_ids(best.indices)
        else:
            prepared = self.prepare(features)

        seen = features[..., :0]  # later the newest tokens `[rows, nodes, tokens]` in the block of each node

        def children(offset: int, nodes: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
            if self.predicts_independently:
                lists = blocks[..., None].expand(-1, -1, width)
                return token_ids[:, :, offset].gather(1, lists), best.values[:, :, offset].gather(1, lists)

            nonlocal seen
            newest = growth.token_ids.gather(1, nodes)[..., None]
            if offset and self.num_before > 1:
                above = seen[..., 1 - self.num_before :]
                above = above.gather(1, growth.origins[..., None].expand(-1, -1, above.shape[-1]))
                newest = torch.cat([above, newest], dim=-1)
            seen = newest
            after = self.logits_after(seen, scores[:, :, offset], prepared[:, :, offset], blocks)
            found = (after / temperatures[offset]).log_softmax(dim=-1).topk(width, dim=-1)
            return self.target_ids(found.indices), found.values

        return children

    def _temperatures(self, budget: DraftBudget, scores: Tensor) -> Tensor:
        """The temperatures of the positions of a block, in the type and on the device of `scores`."""
        key = (budget.temperature, scores.dtype, scores.device)
        if key not in self.constants:
            stored = self.drafter.config.confidence_temperatures
            values = block_temperatures(stored, self.block_size, budget.temperature)
            self.constants[key] = scores.new_tensor(values)

        return self.constants[key]

    def scores(self, logits: Tensor, budget: DraftBudget, depth: int) -> Tensor:
        """Scores of which the target would take the best if its logits were these, less scaled log noise."""
        if budget.noise is None:
            return logits

        rows, _blocks, size, _tokens = logits.shape
        noise = stacked_noise(budget.noise, range(rows), range(depth + 1, depth + size + 1)).to(logits)
        if self.draft_token_ids is not None:
            noise = noise[:, self.draft_token_ids.to(noise.device)]

        return logits - (budget.temperature or 1.0) * noise.log().reshape(rows, 1, size, -1)

    # The branch of repeated text

    def _roots_alone(self) -> Draft:
        alone = self.text.draft("roots", 1)

        def work() -> None:
            alone.token_ids.copy_(self.text.roots)  # which change when text is added

        draft = Draft(alone.token_ids, alone.parents, num_passes=0, max_depth=0, is_text_alone=True)
        if not self.text.is_fixed:
            work()
            return draft

        self.text.fill(alone, 0, work)
        return replace(draft, copies=alone.copies)

    def _joined(self, draft: Draft, branch: Branch, budget: DraftBudget) -> Draft:
        """A draft with the tokens of the branch that it does not hold, as many as the budget allows and as pay."""
        num_before = draft.token_ids.shape[1]
        room = budget.num_nodes - num_before
        if len(branch) > room:
            branch = branch.first(room)
        if budget.prices is not None:
            branch = branch.paying(budget.prices, num_before)
        if not len(branch):
            return draft

        added: dict[str, Any] = {}
        if draft.max_depth is not None:
            added["max_depth"] = max(draft.max_depth, len(branch))

        if self.text.is_fixed:
            joined = self._joined_fixed(draft, branch, room)
            return replace(draft, token_ids=joined.token_ids, parents=joined.parents, copies=joined.copies, **added)

        device = draft.token_ids.device
        parents = draft.parents.to(device).expand_as(draft.token_ids)
        depth = min(num_before - 1, len(branch))
        token_ids, parents, num_held = with_chain(draft.token_ids, parents, branch.token_ids.to(device), depth)
        num_new = int((parents[:, num_before:] >= 0).sum(1).max())
        if not num_new:
            return draft

        if draft.expected_by_depth is not None:
            expected = branch.expected_by_depth(num_held.to(branch.log_probs.device)).to(draft.expected_by_depth)
            added["expected_by_depth"] = pad_sequence([draft.expected_by_depth, expected]).sum(1)

        num_nodes = num_before + num_new
        return replace(draft, token_ids=token_ids[:, :num_nodes], parents=parents[:, :num_nodes], **added)

    def _joined_fixed(self, draft: Draft, branch: Branch, room: int) -> FixedDraft:
        """The same by work that is repeated: there is a node for each token that a branch may have."""
        assert self.repeated_text is not None  # it gave the branch
        num_before = draft.token_ids.shape[1]
        num_tokens = min(self.repeated_text.num_tokens, room)
        sources = (draft.token_ids.data_ptr(), draft.parents.data_ptr(), num_before)
        joined = self.text.draft(("with text", *sources, num_tokens), num_before + num_tokens)
        known = joined.constants
        if not known:
            with torch.inference_mode(False):
                known["chain"] = joined.token_ids[:, :num_tokens].clone()

            known["draft"] = draft

        known["chain"].copy_(
            functional.pad(branch.token_ids, (0, num_tokens - len(branch)), value=-1), non_blocking=True
        )

        def work() -> None:
            depth = min(num_before - 1, num_tokens)
            token_ids, parents, _ = with_chain(draft.token_ids, draft.parents, known["chain"], depth)
            joined.token_ids.copy_(token_ids)
            joined.parents.copy_(parents)

        self.text.fill(joined, 0, work)
        return joined

    # The drafter and its device

    @property
    def num_draft_slots(self) -> int:
        """About as many tokens as are fed to draft a tree; a draft that feeds more gets the slots when it does."""
        num_grown = self._grown_size[1] * self.tree_depth * self.is_tree_dynamic
        return max(len(self.tree), num_grown)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings of the target, or of the drafter where it has its own, in the drafter's type and device."""
        own = getattr(self.drafter, "embed_tokens", None)
        read = self.target.embed if own is None else own
        return self.to_drafter(read(token_ids))

    def to_drafter(self, states: Tensor) -> Tensor:
        """`states` in the drafter's type and device."""
        return states.to(self.drafter.device, self.drafter.dtype)

    def run(self, name: str, *inputs: Any) -> Any:
        """What the drafter's method of this name gives; work that is repeated is compiled if the call asks for it."""
        if not self.text.is_repeating:
            return getattr(self.drafter, name)(*inputs)
        if self.backend is None:
            return getattr(as_captured(self.drafter), name)(*inputs)

        return compiled_call(self.drafter, self.backend, name, *inputs)

    def why_not_fixed(self, budget: DraftBudget) -> str | None:
        """Why drafts within such budgets cannot be made in fixed shapes, in words; None if they can."""
        rotary = getattr(self.drafter, "rotary_emb", None)
        if rotary is not None and rotary.rope_type in SWITCHING:
            return "the drafter's rotary frequencies depend on the length of the text"
        if not budget.has_free_shape:
            return "drafts are drawn, and their probabilities compared with the target's"

        return None

    @property
    def settings(self) -> Any:
        """What decides work in fixed shapes besides weights, the text and what drafts are asked for."""
        return None

    def enter_fixed(self, num_slots: int, most_kept: int, buffers: Any = None) -> DraftText:
        """Read what waits to buffers that stay where they are, and go on in them."""
        prompt = self.text
        kind = replace(prompt.kind, shapes=BUCKETS, most_kept=most_kept, num_draft_slots=self.num_draft_slots)
        is_fit = isinstance(buffers, DraftText) and buffers.kind == kind

        text: DraftText = buffers if is_fit else DraftText(kind, num_slots, self.fresh_states(kind.num_rows))
        text.begin()
        text.roots.copy_(prompt.roots)
        self.text = self.fixed = text
        text.read_now(self.read_pairs, prompt)
        return text


def drawn_ahead(budget: DraftBudget, num_rows: int, depth: int) -> tuple[DraftBudget, Any]:
    """The budget with the noise of all draws down to `depth` in place, and what work on it holds of the draws."""
    if budget.noise is None:
        return budget, None

    noises = {(row, at): budget.noise(row, at) for row in range(num_rows) for at in range(1, depth + 1)}
    places = (budget.temperature, *(noise.data_ptr() for noise in noises.values()))
    return replace(budget, noise=lambda row, at: noises[row, at]), places


def draw_children(
    probs: Tensor, depths: Sequence[int], num_children: int, budget: DraftBudget, rng: torch.Generator
) -> Tensor:
    """Distinct tokens `[rows, parents, num_children]`, drawn in turn from `probs` `[rows, parents, vocab]`.

    Each parent draws anew, unless the budget brings noise: then that of `depths`, where the children of each parent
    stand. Where fewer tokens than children have probability, the last children have none.
    """
    if budget.noise is not None:
        coming = stacked_noise(budget.noise, range(len(probs)), depths)
        noise = coming.reshape(probs.shape).to(probs.device)
    else:  # in float64 no quotient becomes 0, so that draws are from `probs` however small a part of it is
        noise = torch.empty(probs.shape, dtype=torch.double, device=rng.device).exponential_(generator=rng)
        probs = probs.to(noise.device)

    children = draw_distinct(probs.flatten(0, 1), noise.flatten(0, 1), num_children)
    return children.reshape(*probs.shape[:2], -1)


def stacked_noise(noise: Callable[[int, int], Tensor], rows: Sequence[int], depths: Sequence[int]) -> Tensor:
    """The noise of rows, at each of these depths, `[rows * depths, vocab]`."""
    return torch.stack([noise(row, depth) for row in rows for depth in depths])
