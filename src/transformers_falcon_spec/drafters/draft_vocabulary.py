"""The tokens that a drafter can draft: all of the target's, or a short list of those that it writes most often.

Logits over a short list cost less, and so do a head and tables over it, in memory, in training and in a draft. The
target reads drafts as ever, so that texts stay what they are: a token outside the list is never drafted, and never
lost. Sources: FR-Spec (arXiv 2502.14856) for lists counted on text; the weights published with Eagle-3
(arXiv 2503.01840) for `d2t` and `t2d`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, OptionError, quoted


class DraftVocabulary(nn.Module):
    """The part of a drafter that knows which tokens it can draft; its config is a [`DraftVocabularyConfig`].

    The drafter numbers them from 0 on, by ascending ids of the target.
    """

    config: Any
    device: Any
    d2t: Tensor  # [draft vocab] what to add to an id of the drafter's for the target's
    t2d: Tensor  # [vocab] whether a token can be drafted

    def _list_tokens(self, device: torch.device | None = None) -> None:
        """Make room for a list, if the config says that there is one: the first tokens, until others are set."""
        if self.config.has_own_vocabulary:
            num_tokens = self.config.num_draftable_tokens
            self.register_buffer("d2t", torch.zeros(num_tokens, dtype=torch.long, device=device))
            self.register_buffer("t2d", torch.arange(self.config.vocab_size, device=device) < num_tokens)

    def set_draft_vocabulary(self, token_ids: Sequence[int]) -> None:
        """Set the target's tokens that can be drafted; by default the first. Rows of a head follow ascending ids.

        A drafter that was made for all tokens may get a list, too, if it drafts through the target's head and has no
        table over the tokens, as Eagle-1 and DFlash.

        Raises:
            [`OptionError`]: they are not as many different ids of the target as `draft_vocab_size` says, or weights of
                the drafter are those of other tokens.
        """
        config = self.config
        num_tokens = len(token_ids) if config.draft_vocab_size is None else config.draft_vocab_size
        chosen = sorted(set(token_ids))
        if not len(chosen) == len(token_ids) == num_tokens > 0 or chosen[0] < 0 or chosen[-1] >= config.vocab_size:
            raise OptionError(
                f"`token_ids` must be `draft_vocab_size` = {num_tokens} different ids in 0..{config.vocab_size - 1}, "
                f"but they are {len(token_ids)}, {len(chosen)} of them different, in "
                f"{min(token_ids, default=0)}..{max(token_ids, default=0)}."
            )

        if config.draft_vocab_size is None:
            tables = [name for name, weight in self.named_parameters() if config.vocab_size in weight.shape]
            tables = [name for name in tables if not name.startswith("embed_tokens.")]
            if tables:
                raise OptionError(
                    f"`draft_vocab_size` of this drafter must be set before it is trained, for {quoted(tables)} stand "
                    f"for all {config.vocab_size} tokens. Train one: `--drafter_config draft_vocab_size={num_tokens}`."
                )
            config.draft_vocab_size = num_tokens
            self._list_tokens(self.device)

        if config.has_own_vocabulary:
            ids = torch.tensor(chosen, device=self.d2t.device)
            self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
            self.t2d.zero_()[ids] = True

    @property
    def draft_token_ids(self) -> Tensor | None:
        """The target's id of each token that can be drafted; None where all of them can, as they are."""
        if "d2t" not in self._buffers:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def draft_ids(self) -> Tensor | None:
        """The drafter's id of each of the target's tokens, `[vocab]`; `num_draftable_tokens` where it has none.

        None where all of them can be drafted, as they are.
        """
        known = self.draft_token_ids
        if known is None:
            return None

        numbers = torch.arange(len(known), device=known.device)
        return known.new_full((self.config.vocab_size,), len(known)).scatter(0, known, numbers)

    def check_draft_vocabulary(self, name: Any) -> None:
        """Refuse a list that leads to anything but different tokens of the target.

        Raises:
            [`CheckpointError`]: it does; `name` is that of the checkpoint.
        """
        ids = self.draft_token_ids
        if ids is None or ids.is_meta:
            return

        marked = self.t2d.nonzero().flatten()
        if not marked.equal(ids.sort().values):
            raise CheckpointError(
                f"`d2t` of `{name}` must lead to the {len(ids)} tokens that `t2d` marks, but it does not. An offset "
                "is added to the drafter's id: target = draft + d2t[draft]."
            )
