"""The objectives of drafters that fill in blocks of masks in one pass: DFlash and diffusion drafters.

A block stands after an anchor, a token of the text. Sources: arXiv 2602.06036, section 4.2, of DFlash. A diffusion
drafter starts as layers of an autoregressive model, so it is trained on what it does in decoding, one block of masks
after clean text, and not on masks spread over a text.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...core.masks import additive
from ...drafters.dflash import ATTENTION, context_layers
from ...errors import OptionError
from ..features import PairBatch, TargetFeatures
from .base import Objective, Outcome, token_loss, token_outcome, token_terms

OFFSET_DECAY = 0.85  # weight of a block offset relative to the one before
PREFIX_WEIGHT = 0.3  # of the loss on the clean text's own next tokens

# What converted drafters may have besides, and training does not compute.
_PLAIN: dict[str, Any] = {
    "causal_layer_types": None,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "selector_rank": 0,
}


class BlockObjective(Objective):
    """Learns to fill in blocks of masks, each after an anchor that is drawn."""

    has_draft_tree = False

    def weight(self, is_counted: Bool[Tensor, "rows pairs"]) -> int:
        """The number of blocks that are drawn from a batch, as [`draw_anchors`] does."""
        return int(is_counted[:, 1:].sum(-1).clamp(max=self.args.num_anchors).sum())

    def most_guesses(self, num_tokens: int) -> int:
        """One for each mask of each block."""
        return min(self.args.num_anchors, num_tokens) * self.num_offsets


class DFlashObjective(BlockObjective):
    """A block is a token of the text, the anchor, and masks, which learn the distributions of the next tokens.

    A block sees itself and the features of the text before its anchor, as in decoding. The mask at distance k from the
    anchor has weight exp(-(k - 1) / gamma), where gamma is half the block size, close to the paper's 7, 5 and 4 for
    blocks of 16, 10 and 8. The paper trains on the cross-entropy to the text's tokens.
    """

    generate_options: ClassVar = {"speculation_type": "dflash"}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        plain = {**_PLAIN, "layer_types": [ATTENTION] * self.config.num_hidden_layers}
        for name, value in plain.items():
            asked = getattr(self.config, name, value)
            if asked != value:
                raise OptionError(
                    f"A DFlash drafter must have a `{name}` of {value!r} to be trained, but that of this one is "
                    f"{asked!r}. Train a fresh one: `--method dflash`."
                )

        self.block_size = int(self.config.block_size)
        self.num_offsets = self.block_size - 1

    @classmethod
    def read_target(cls, drafter: Any, target: PreTrainedModel) -> TargetFeatures:
        """Features are what the drafter reads in `generate`, labels the head's inputs at the same tokens."""
        return TargetFeatures(target, context_layers(drafter), 0)

    def __call__(self, model: nn.Module, pairs: PairBatch, generator: torch.Generator, /, *_: Any) -> Outcome:
        """The mean loss over all masks that stand for an assistant token, weighted by distance from the anchor."""
        blocks = draw_blocks(pairs, self.num_offsets, self.args.num_anchors, generator)
        states = self.fill_in(model, pairs, blocks.anchors)[blocks.is_counted]
        head = self.features.target.get_output_embeddings()  # alone, as in `generate`, without the scaling of some
        logits = head(states.to(self.features.target.dtype)).float()
        target_logits = self.features.head(pairs.labels[blocks.labels])
        return token_outcome(logits, target_logits, blocks.offsets, decay=math.exp(-2 / self.block_size))

    def fill_in(self, model: nn.Module, pairs: PairBatch, anchors: Int[Tensor, "rows anchors"]) -> Tensor:
        """The drafter's states at the masks of all blocks, `[rows, anchors, offsets, hidden]`."""
        num_rows, num_anchors = anchors.shape
        embed = self.features.target.get_input_embeddings()
        shape = (num_rows, num_anchors, self.num_offsets)
        masks = embed(torch.full(shape, self.config.mask_token_id, device=anchors.device))
        first = pairs.token_embeds.gather(1, (anchors - 1)[..., None].expand(-1, -1, masks.shape[-1]))
        blocks = torch.cat([first[:, :, None], masks], dim=2).flatten(1, 2)

        num_pairs = pairs.features.shape[1]
        positions = torch.arange(num_pairs, device=anchors.device).expand(num_rows, -1)
        block_positions = (anchors[..., None] + torch.arange(self.block_size, device=anchors.device)).flatten(1)
        seen = block_mask(anchors, num_pairs, self.block_size)

        dtype = next(model.parameters()).dtype
        outputs = model(
            noise_embeds=blocks.to(dtype),
            context_hidden_states=pairs.features.to(dtype),
            attention_mask={ATTENTION: additive(seen, dtype)},
            position_ids=torch.cat([positions, block_positions], dim=1),
        )
        return outputs[0].unflatten(1, (num_anchors, self.block_size))[:, :, 1:]


class DiffusionObjective(BlockObjective):
    """Every token of a block learns the target's distribution there; block offset i of 0, 1, .. has weight 0.85^i.

    The clean text does not see the masks, so a conversation is read once together with `num_anchors` blocks. No block
    sees another one or the text after its anchor, and the text itself learns its next tokens with weight 0.3.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_offsets = int(self.config.num_draft_tokens)

    def most_guesses(self, num_tokens: int) -> int:
        """One for each token, and one for each mask of each block."""
        return num_tokens + super().most_guesses(num_tokens)

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

    def __call__(self, model: nn.Module, pairs: PairBatch, generator: torch.Generator, /, *_: Any) -> Outcome:
        """The mean loss over all masks of assistant tokens, weighted by block offset, plus that of the clean text."""
        blocks = draw_blocks(pairs, self.num_offsets, self.args.num_anchors, generator)
        inputs, drafting = self.packed(pairs.input_ids, blocks.anchors)
        sources = drafting[blocks.is_counted]

        # Outputs are computed for the kept slots alone: those that draft, and those of the clean text that count.
        num_pairs = pairs.is_counted.shape[1]
        kept = torch.zeros_like(inputs["token_ids"], dtype=torch.bool)
        kept.view(-1)[sources] = True
        kept[:, :num_pairs] |= pairs.is_counted
        outputs = model(**inputs, kept=kept)
        index = kept.flatten().cumsum(0) - 1  # of each slot among those with an output

        target_logits = self.features.head(pairs.labels[blocks.labels])
        outcome = token_outcome(outputs[index[sources]], target_logits, blocks.offsets, OFFSET_DECAY)
        own = outputs[index.reshape(kept.shape)[:, :num_pairs][pairs.is_counted]]
        prefix_loss = token_loss(*token_terms(own, self.features.head(pairs.labels[pairs.is_counted]))).mean()
        return replace(
            outcome,
            loss=outcome.loss + PREFIX_WEIGHT * prefix_loss,
            terms={**outcome.terms, "prefix_loss": prefix_loss},
        )

    def packed(self, input_ids: Tensor, anchors: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The drafter's input: clean text up to each anchor, which stands for the newest token, followed by masks."""
        shift = self.config.logits_shift
        return packed_blocks(input_ids, anchors, self.num_offsets - shift, shift, self.config.mask_token_id)


def packed_blocks(
    input_ids: Int[Tensor, "rows tokens"],
    anchors: Int[Tensor, "rows anchors"],
    num_masks: int,
    shift: int,
    mask_token_id: int,
) -> tuple[dict[str, Tensor], Int[Tensor, "rows anchors offsets"]]:
    """One causal text followed by all blocks of masks; a block sees itself and the text up to its anchor.

    With `shift` 1 the first token of a block is drafted by the output of its anchor, which needs no copy for the
    block.

    Returns:
        `tuple`: what the drafter reads: `token_ids` and `positions` of all slots, and which slots each one is
            `allowed` to see; then the slot whose output drafts each token, counted through all texts.
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

    inputs = {
        "token_ids": torch.cat([input_ids, torch.full_like(mask_positions, mask_token_id)], dim=1),
        "positions": torch.cat([text.expand(num_rows, -1), mask_positions], dim=1),
        "allowed": torch.cat([causal, of_blocks], dim=1),
    }
    return inputs, sources + num_slots * torch.arange(num_rows, device=device)[:, None, None]


# Blocks


@dataclass(frozen=True)
class Blocks:
    """Blocks of guesses, each after an anchor."""

    anchors: Int[Tensor, "rows anchors"]  # index of each anchor in its row
    is_counted: Bool[Tensor, "rows anchors offsets"]  # which guesses count in the loss
    labels: tuple[Tensor, Tensor]  # row and column of the label of each guess that counts
    offsets: Int[Tensor, " counted"]  # of each of them in its block


def draw_blocks(pairs: PairBatch, num_offsets: int, num_anchors: int, generator: torch.Generator) -> Blocks:
    """Draw up to `num_anchors` blocks in each conversation; they may reach beyond its end, where no guess counts."""
    anchors, is_anchor = draw_anchors(pairs.is_counted, num_anchors, generator)
    num_pairs = pairs.is_counted.shape[1]
    offsets = torch.arange(num_offsets, device=anchors.device)
    columns = anchors[..., None] + offsets
    is_inside = columns < num_pairs
    columns = columns.clamp(max=num_pairs - 1)
    rows = torch.arange(len(columns), device=columns.device)[:, None, None].expand_as(columns)
    counted = is_anchor[..., None] & is_inside & pairs.is_counted[rows, columns]
    return Blocks(anchors, counted, (rows[counted], columns[counted]), offsets.expand_as(columns)[counted])


def draw_anchors(
    is_counted: Bool[Tensor, "rows pairs"], most: int, generator: torch.Generator
) -> tuple[Int[Tensor, "rows anchors"], Bool[Tensor, "rows anchors"]]:
    """Draw up to `most` anchors in each conversation: tokens that an assistant token follows, in random order.

    The first token is never an anchor, for there is nothing before it. Rows with fewer anchors are filled up with
    index 1; the second result is False there.
    """
    can_start = is_counted.clone()
    can_start[:, 0] = False
    scores = torch.rand(can_start.shape, generator=generator, dtype=torch.float).to(can_start.device)
    drawn = scores.masked_fill(~can_start, -1.0).topk(min(most, scores.shape[1]), dim=-1)

    is_anchor = drawn.values >= 0
    num_anchors = max(int(is_anchor.sum(-1).max()), 1)
    is_anchor = is_anchor[:, :num_anchors]
    return drawn.indices[:, :num_anchors].where(is_anchor, 1), is_anchor


def block_mask(
    anchors: Int[Tensor, "rows anchors"], num_context: int, block_size: int
) -> Bool[Tensor, "rows queries keys"]:
    """Which keys each token of each block sees; the keys are those of the context, then those of all blocks."""
    context = torch.arange(num_context, device=anchors.device)
    sees_context = (context < anchors[..., None]).repeat_interleave(block_size, dim=1)
    block = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(block_size)
    sees_block = (block[:, None] == block).expand(len(anchors), -1, -1)
    return torch.cat([sees_context, sees_block], dim=-1)
