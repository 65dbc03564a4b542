"""The target's side of training: features of a batch from the frozen target, paired as the drafter reads them."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from ..core.packing import one_text, shift_left
from ..errors import OptionError
from ..generation.model_parts import apply_head, decoder_of, is_spread
from ..generation.target import Target
from .arguments import DrafterTrainingArguments
from .packed_inputs import packed_inputs


@dataclass(frozen=True)
class PairBatch:
    """Rows as the drafter reads them, and what it should say. Row p pairs token p + 1 with the feature of token p.

    Args:
        input_ids (`torch.Tensor` of shape `(rows, pairs + 1)`): The tokens themselves.
        positions (`torch.Tensor` of shape `(rows, pairs + 1)` or `(1, pairs + 1)`): Place of each token in its
            conversation; see
            `core/packing.py`.
        token_embeds (`torch.Tensor` of shape `(rows, pairs, embed)`): Embedding of token p + 1.
        features (`torch.Tensor` of shape `(rows, pairs, feature)`): Feature of token p.
        labels (`torch.Tensor` of shape `(rows, pairs, hidden)`): The head's input at token p + distance; zeros past
            the end of
            the conversation.
        is_token (`torch.Tensor` of shape `(rows, pairs)`): False at padding, and where token p is the last of its
            conversation.
        is_counted (`torch.Tensor` of shape `(rows, pairs)`): The token that this label speaks of, p + distance + 1, is
            the
            assistant's.
    """

    input_ids: Int[Tensor, "rows tokens"]
    positions: Int[Tensor, "_ tokens"]
    token_embeds: Float[Tensor, "rows pairs embed"]
    features: Float[Tensor, "rows pairs feature"]
    labels: Float[Tensor, "rows pairs hidden"]
    is_token: Bool[Tensor, "rows pairs"]
    is_counted: Bool[Tensor, "rows pairs"]


class TargetFeatures:
    """Reads features from a frozen target while the drafter trains, or takes those that a batch brings along.

    Args:
        target ([`~transformers.PreTrainedModel`]): Put into evaluation mode; its weights get no gradient.
        feature_layers (`tuple[int, ...]`): Hidden states that the drafter reads, as Transformers counts them.
        distance (`int`): How far ahead labels lie; k for a drafter that predicts the feature k ahead.
    """

    def __init__(self, target: PreTrainedModel, feature_layers: tuple[int, ...], distance: int) -> None:
        self.target = target.eval().requires_grad_(False)
        self.feature_layers, self.distance = feature_layers, distance

    @torch.no_grad()
    def read(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None) -> dict[str, Tensor]:
        """The `features` `[rows, tokens, feature]` and, where those are other ones, the `head_inputs` of a batch.

        Args:
            input_ids (`torch.Tensor` of shape `(rows, tokens)`): The tokens.
            attention_mask (`torch.Tensor` of shape `(rows, tokens)`): 0 at padding, on the right.
            position_ids (`torch.Tensor` of shape `(rows, tokens)`, *optional*): Place of each token in its
                conversation, where
                rows hold several.

        Raises:
            [`OptionError`]: rows hold several conversations, and the target would mix them.
        """
        how: dict[str, Any] = {"attention_mask": attention_mask, "use_cache": False}
        if position_ids is not None:  # padding is behind what counts, so that no mask is needed
            how = packed_inputs(self.target, decoder_of(self.target), position_ids)
        view = Target(self.target, self.feature_layers)
        with view.feature_hooks.active():
            outputs = decoder_of(self.target)(input_ids=input_ids, **how)
            features = view.feature_hooks.take(input_ids.shape[1])
        assert features is not None  # at least one layer is tapped
        found = {"features": features, "head_inputs": outputs[0]}
        return found if self.feature_layers != (-1,) else {"features": features}

    @torch.no_grad()
    def __call__(self, batch: dict[str, Tensor]) -> PairBatch:
        """The pairs of one collated batch; `features` that a [`FeatureCache`] added are not read again."""
        input_ids, mask = batch["input_ids"], batch["attention_mask"]
        packed = batch.get("position_ids")
        positions = one_text(input_ids.shape[1], input_ids.device) if packed is None else packed
        found = batch if "features" in batch else self.read(input_ids, mask, packed)
        features, head_inputs = found["features"].to(input_ids.device), found.get("head_inputs", found["features"])
        is_token = mask[:, 1:].bool() & (positions[:, 1:] > 0)
        return PairBatch(
            input_ids=input_ids,
            positions=positions,
            token_embeds=self.target.get_input_embeddings()(input_ids[:, 1:]).to(input_ids.device),
            features=features[:, :-1],
            labels=shift_left(head_inputs.to(input_ids.device), positions, self.distance)[:, :-1],
            is_token=is_token,
            is_counted=shift_left(batch["assistant_mask"], positions, self.distance + 1)[:, :-1] & is_token,
        )

    def head(self, features: Tensor) -> Tensor:
        """The target's logits of head inputs, in float32, on their device; gradients pass through to the features."""
        return apply_head(self.target, features).to(features.device)


def place(target: PreTrainedModel, args: DrafterTrainingArguments) -> None:
    """Put the target where the drafter is trained; one that is spread over devices stays.

    Raises:
        [`OptionError`]: it is spread out, and there are several processes.
    """
    if not is_spread(target):
        target.to(args.device)  # type: ignore[arg-type]  # a decorator hides the signature
    elif args.world_size > 1:
        raise OptionError(
            f"A target spread over devices serves one process, but there are {args.world_size}. Start one process, or "
            "load the target without `device_map`, whole for each."
        )
