"""Pairs for training: features and labels from the frozen target, with the tokens that follow them."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.packing import one_text, shift_left
from ..errors import OptionError
from ..generation.head import apply_head
from ..generation.model_parts import decoder_of, device_of, is_spread
from ..generation.target import Target
from .arguments import DrafterTrainingArguments
from .packed_inputs import packed_inputs


@dataclass(frozen=True)
class PairBatch:
    """The drafter's inputs and labels for a batch. Pair p holds the feature of token p and token p + 1.

    A label counts in the loss if the token that it predicts, p + distance + 1, is the assistant's.
    """

    input_ids: Int[Tensor, "rows tokens"]  # tokens = pairs + 1
    positions: Int[Tensor, "_ tokens"]  # of each token in its conversation, see `core/packing.py`; one row or all
    token_embeds: Float[Tensor, "rows pairs embed"]  # of token p + 1
    features: Float[Tensor, "rows pairs feature"]  # of token p
    labels: Float[Tensor, "rows pairs hidden"]  # inputs of the target's head at p + distance; zeros past the end
    is_token: Bool[Tensor, "rows pairs"]  # False at padding, and where token p ends its conversation
    is_counted: Bool[Tensor, "rows pairs"]  # whether the label counts


class TargetFeatures:
    """Makes pairs from batches: reads features from the frozen target, or uses those that a batch already holds.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target; it is put into evaluation mode, and its weights get no
            gradient.
        feature_layers (`tuple[int, ...]`): Hidden states that the drafter reads, numbered as in Transformers.
        distance (`int`): Tokens from a feature to its label; k for a drafter that predicts features k ahead.
        embeddings (`nn.Module`, *optional*): Those of a drafter that has its own; by default the target's are read.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        feature_layers: tuple[int, ...],
        distance: int,
        embeddings: nn.Module | None = None,
    ) -> None:
        self.embeddings = embeddings
        self.target = target.eval().requires_grad_(False)
        self.feature_layers, self.distance = feature_layers, distance

    @property
    def device(self) -> torch.device:
        """Where the target reads."""
        return device_of(self.target)

    @torch.no_grad()
    def read(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None) -> dict[str, Tensor]:
        """Read the `features` `[rows, tokens, feature]` of a batch, and the `head_inputs` if they differ from these.

        Padding is on the right. Rows that hold several conversations come with the position of each token in its own.

        Raises:
            [`OptionError`]: rows hold several conversations, and the target would let them see one another.
        """
        inputs: dict[str, Any] = {"attention_mask": attention_mask, "use_cache": False}
        if position_ids is not None:  # padding comes last, where no token sees it, so no mask is needed
            inputs = packed_inputs(self.target, decoder_of(self.target), position_ids)
        target = Target(self.target, self.feature_layers)
        with target.feature_hooks.active():
            outputs = decoder_of(self.target)(input_ids=input_ids, **inputs)
            features = target.feature_hooks.take(input_ids.shape[1])
        assert features is not None  # at least one layer is read
        if self.feature_layers == (-1,):  # the features are the head's inputs
            return {"features": features}
        return {"features": features, "head_inputs": outputs[0]}

    def counted(self, batch: dict[str, Tensor]) -> Tensor:
        """Which labels `[rows, pairs]` of a batch count in the loss; the target is not read."""
        positions = positions_of(batch)
        shifted = shift_left(batch["assistant_mask"], positions, self.distance + 1)[:, :-1]
        return shifted & _is_token(batch, positions)

    @torch.no_grad()
    def __call__(self, batch: dict[str, Tensor]) -> PairBatch:
        """Make the pairs of a batch; the target is not read if a [`FeatureCache`] has added its `features`."""
        input_ids, mask = batch["input_ids"], batch["attention_mask"]
        packed, positions = batch.get("position_ids"), positions_of(batch)
        states = batch if "features" in batch else self.read(input_ids, mask, packed)
        features, head_inputs = states["features"].to(input_ids.device), states.get("head_inputs", states["features"])
        embed: Any = self.target.get_input_embeddings() if self.embeddings is None else self.embeddings
        return PairBatch(
            input_ids=input_ids,
            positions=positions,
            token_embeds=embed(input_ids[:, 1:]).to(input_ids.device),
            features=features[:, :-1],
            labels=shift_left(head_inputs.to(input_ids.device), positions, self.distance)[:, :-1],
            is_token=_is_token(batch, positions),
            is_counted=self.counted(batch),
        )

    def head(self, features: Tensor) -> Tensor:
        """The target's logits for head inputs, in float32 and on their device; gradients flow back to the inputs."""
        return apply_head(self.target, features).to(features.device)


def positions_of(batch: dict[str, Tensor]) -> Tensor:
    """The position of each token in its conversation."""
    ids = batch["input_ids"]
    return batch.get("position_ids", one_text(ids.shape[1], ids.device))


def _is_token(batch: dict[str, Tensor], positions: Tensor) -> Tensor:
    """Which pairs `[rows, pairs]` hold a token that goes on with the conversation of the one before."""
    return batch["attention_mask"][:, 1:].bool() & (positions[:, 1:] > 0)


def move_target(target: PreTrainedModel, args: DrafterTrainingArguments) -> None:
    """Move the target to the device of the training, unless `device_map` spread it; that is for one process only."""
    if not is_spread(target):
        target.to(args.device)  # type: ignore[arg-type]  # a decorator hides the signature
    elif args.world_size > 1:
        raise OptionError(
            f"A target spread over devices serves one process, but there are {args.world_size}. Start one process, or "
            "load the target without `device_map`, whole for each."
        )
