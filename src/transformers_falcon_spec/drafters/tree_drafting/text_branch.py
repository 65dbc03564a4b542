"""The text branch of a draft: what followed the newest tokens where they stood before, as one more branch of its tree.

Where the branch is all but sure, as in a loop, it is the whole draft, and what the drafter did not read waits.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from ...core.branches import with_chain
from ...generation.drafting import Committed, Draft, DraftBudget, Kept
from .pairs import gives_probs
from .repeated_text import Branch, RepeatedText
from .static import StaticTreeGenerator

MOST_UNREAD = 128  # pairs that wait for the drafter while the text goes on alone


class TextBranchGenerator(StaticTreeGenerator):
    """A generator whose trees get a branch of repeated text, where its options ask for one."""

    text: RepeatedText | None = None

    @abstractmethod
    def propose_tree(self, budget: DraftBudget) -> Draft | None:
        """What the drafter drafts within the budget; None where it can draft nothing."""

    def commit(self, committed: Committed) -> None:
        """Keep the new text and its pairs for the next proposal."""
        super().commit(committed)
        if self.text is not None:
            self.text.commit(committed)

    def commit_kept(self, kept: Kept) -> None:
        """The same in fixed shapes."""
        super().commit_kept(kept)
        if self.text is not None:
            self.text.commit_kept(kept)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        super().select_rows(rows)
        if self.text is not None:
            self.text.select_rows(rows)

    def propose(self, budget: DraftBudget) -> Draft | None:
        """The drafter's tree with the branch of repeated text, or the branch alone."""
        branch = self._branch(budget)
        if branch is None:
            return self.propose_tree(budget)
        if branch.is_sure and budget.num_passes is None and max(self.num_unread, default=0) < MOST_UNREAD:
            return self._joined(self._roots_alone(), branch, budget)
        draft = self.propose_tree(budget)
        return draft if draft is None or budget.is_chain else self._joined(draft, branch, budget)

    def _branch(self, budget: DraftBudget) -> Branch | None:
        """The branch of this step, if there is one.

        Rules that compare drafted tokens with what these were drawn from get none: nothing was drawn here.
        """
        if self.text is None or gives_probs(budget) or not budget.allows_grown_trees:
            return None
        return self.text.branch(budget.depths, budget.num_nodes - 1)

    def _roots_alone(self) -> Draft:
        roots = self.roots
        parents = None if self.fixed is None else self.fixed.draft("roots", 1).parents  # which nobody writes to
        parents = torch.full_like(roots, -1) if parents is None else parents
        return Draft(roots, parents, num_passes=0, max_depth=0, is_text_alone=True)

    def _joined(self, draft: Draft, branch: Branch, budget: DraftBudget) -> Draft:
        """A draft with the tokens of the branch that it does not hold, as many as the budget allows and as pay."""
        num_before = draft.token_ids.shape[1]
        room = budget.num_nodes - num_before
        branch = branch.first(room)
        if budget.prices is not None:
            branch = branch.paying(budget.prices, num_before)
        if not len(branch):
            return draft
        return self._joined_anew(draft, branch) if self.fixed is None else self._joined_in_place(draft, branch, room)

    def _joined_anew(self, draft: Draft, branch: Branch) -> Draft:
        """In as many nodes as it takes."""
        device, num_before = draft.token_ids.device, draft.token_ids.shape[1]
        parents = draft.parents.to(device).expand_as(draft.token_ids)
        depth = min(num_before - 1, len(branch))
        token_ids, parents, num_held = with_chain(draft.token_ids, parents, branch.token_ids.to(device), depth)
        num_new = int((parents[:, num_before:] >= 0).sum(1).max())
        if not num_new:
            return draft
        num_held, num_nodes, added = num_held.cpu(), num_before + num_new, dict[str, Any]()
        if draft.max_depth is not None:
            added["max_depth"] = max(draft.max_depth, len(branch))
        if draft.node_probs is not None:
            columns = (num_held + torch.arange(num_new)).clamp(max=len(branch) - 1)
            new_probs = branch.next_probs.gather(1, columns).to(draft.node_probs)
            added["node_probs"] = torch.cat([draft.node_probs, new_probs], dim=1)
        if draft.expected_by_depth is not None:
            expected = branch.expected_by_depth(num_held).to(draft.expected_by_depth)
            added["expected_by_depth"] = pad_sequence([draft.expected_by_depth, expected]).sum(1)
        return replace(draft, token_ids=token_ids[:, :num_nodes], parents=parents[:, :num_nodes], **added)

    def _joined_in_place(self, draft: Draft, branch: Branch, room: int) -> Draft:
        """In tensors of fixed shape, which has a node for each token that a branch may have."""
        assert self.fixed is not None  # the caller asked
        assert self.text is not None  # it gave the branch
        num_before, num_tokens = draft.token_ids.shape[1], min(self.text.num_tokens, room)
        sources = (draft.token_ids.data_ptr(), draft.parents.data_ptr(), num_before)
        joined = self.fixed.draft(("with text", *sources, num_tokens), num_before + num_tokens)
        known, depth = joined.constants, min(num_before - 1, num_tokens)
        if not known:
            with torch.inference_mode(False):
                chain = torch.zeros(len(joined.token_ids), num_tokens, dtype=torch.long, device=joined.parents.device)
            known |= {"token_ids": draft.token_ids, "parents": draft.parents, "chain": chain}
        padded = functional.pad(branch.token_ids, (0, num_tokens - len(branch)), value=-1)
        known["chain"].copy_(padded, non_blocking=True)

        def work() -> None:
            token_ids, parents, _ = with_chain(known["token_ids"], known["parents"], known["chain"], depth)
            joined.token_ids.copy_(token_ids)
            joined.parents.copy_(parents)

        self.fixed.fill(joined, 0, work)
        max_depth = max(draft.depth, len(branch))
        return replace(draft, token_ids=joined.token_ids, parents=joined.parents, max_depth=max_depth)
