"""The objective of diffusion drafters, which fill in a block of masks after a text in one pass.

The drafter starts as layers of an autoregressive model. It is trained on what it does in decoding, one block of masks
after clean text, and not on masks spread over a text.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import OptionError
from ..features import PairBatch, TargetFeatures
from .base import Objective, Outcome, token_loss, token_outcome, token_terms
from .dflash import block_mask, count_anchors, draw_blocks

OFFSET_DECAY = 0.85  # weight of a block offset relative to the one before
PREFIX_WEIGHT = 0.3  # of the loss on the clean text's own next tokens


@dataclass(frozen=True)
class Layout:
    """The drafter's input for a batch: clean text and blocks of masks."""

    token_ids: Int[Tensor, "texts slots"]
    positions: Int[Tensor, "texts slots"]  # of each slot in its text
    allowed: Bool[Tensor, "texts slots slots"]  # which slots each slot sees
    sources: Int[Tensor, "rows anchors offsets"]  # slot whose output drafts each token, counted through all texts


class DiffusionObjective(Objective):
    """Every token of a block learns the target's distribution there; block offset i of 0, 1, .. has weight 0.85^i.

    The clean text does not see the masks, so a conversation is read once together with `num_anchors` blocks. No block
    sees another one or the text after its anchor, and the text itself learns its next tokens with weight 0.3.
    """

    has_draft_tree = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_offsets = int(self.config.most_draft_tokens)

    @classmethod
    def read_target(cls, drafter: Any, target: PreTrainedModel) -> TargetFeatures:
        """Labels are the inputs of the target's head at the same tokens.

        Raises:
            [`OptionError`]: its attention is not `"prefix_causal"`, or it lacks tokens of the target.
            [`DrafterMismatchError`]: the drafter does not fit the target.
        """
        config = drafter.config
        if config.attention != "prefix_causal" or config.draft_vocab_size != config.vocab_size:
            raise OptionError(
                'A diffusion drafter is trained with `attention` `"prefix_causal"` and all tokens of the target, but '
                f"it has {config.attention!r} and {config.draft_vocab_size} of {config.vocab_size} tokens. Make one "
                "with `DiffusionDrafter.from_target(target)`."
            )

        drafter.check_target(target)
        return TargetFeatures(target, (-1,), 0)

    def __call__(self, model: nn.Module, pairs: PairBatch, generator: torch.Generator, progress: float) -> Outcome:
        """The mean loss over all masks of assistant tokens, weighted by block offset, plus that of the clean text."""
        del progress  # training is the same from start to end
        blocks = draw_blocks(pairs, self.num_offsets, self.args.num_anchors, generator)
        layout = self.layout(pairs, blocks.anchors)
        sources = layout.sources[blocks.is_counted]

        # Outputs are computed for the kept slots alone: those that draft, and those of the clean text that count.
        num_pairs = pairs.is_counted.shape[1]
        kept = torch.zeros_like(layout.token_ids, dtype=torch.bool)
        kept.view(-1)[sources] = True
        kept[:, :num_pairs] |= pairs.is_counted
        outputs = model(token_ids=layout.token_ids, positions=layout.positions, allowed=layout.allowed, kept=kept)
        index = kept.flatten().cumsum(0) - 1  # of each slot among those with an output

        target_logits = self.features.head(pairs.labels[blocks.labels])
        outcome = token_outcome(outputs[index[sources]], target_logits, blocks.offsets, OFFSET_DECAY)
        own = outputs[index.reshape(kept.shape)[:, :num_pairs][pairs.is_counted]]
        prefix_loss = token_loss(*token_terms(own, self.target_logits(pairs))).mean()
        return replace(
            outcome,
            loss=outcome.loss + PREFIX_WEIGHT * prefix_loss,
            terms={**outcome.terms, "prefix_loss": prefix_loss},
        )

    def weight(self, is_counted: Bool[Tensor, "rows pairs"]) -> int:
        """The number of blocks that are drawn from a batch."""
        return count_anchors(is_counted, self.args.num_anchors)

    def layout(self, pairs: PairBatch, anchors: Int[Tensor, "rows anchors"]) -> Layout:
        """The drafter's input: clean text up to each anchor, which stands for the newest token, followed by masks."""
        shift = self.config.logits_shift
        return packed_blocks(pairs.input_ids, anchors, self.num_offsets - shift, shift, self.config.mask_token_id)


def packed_blocks(
    input_ids: Int[Tensor, "rows tokens"],
    anchors: Int[Tensor, "rows anchors"],
    num_masks: int,
    shift: int,
    mask_token_id: int,
) -> Layout:
    """One causal text followed by all blocks of masks; a block sees itself and the text up to its anchor.

    With `shift` 1 the first token of a block is drafted by the output of its anchor, which needs no copy for the
    block.
    """
    num_rows, num_tokens = input_ids.shape
    num_anchors = anchors.shape[1]
    num_slots = num_tokens + num_anchors * num_masks
    device = input_ids.device
    masks = torch.arange(num_masks, device=device)
    text = torch.arange(num_tokens, device=device)

    causal = nn.functional.pad(text <= text[:, None], (0, num_anchors * num_masks)).expand(num_rows, -1, -1)
    of_blocks = block_mask(anchors + 1, num_tokens, num_masks)
    mask_positions = (anchors[..., None] + 1 + masks).flatten(1)

    first = num_tokens + num_masks * torch.arange(num_anchors, device=device)[:, None]
    sources = (first + masks).expand(num_rows, -1, -1)
    if shift:
        sources = torch.cat([anchors[..., None], sources], dim=-1)
    return Layout(
        token_ids=torch.cat([input_ids, torch.full_like(mask_positions, mask_token_id)], dim=1),
        positions=torch.cat([text.expand(num_rows, -1), mask_positions], dim=1),
        allowed=torch.cat([causal, of_blocks], dim=1),
        sources=sources + num_slots * torch.arange(num_rows, device=device)[:, None, None],
    )
