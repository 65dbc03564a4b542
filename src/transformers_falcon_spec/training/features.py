"""What a drafter learns from: features and labels of the frozen target, read on the way or once and kept on disk."""

import hashlib
import logging
import os
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from jaxtyping import Bool, Float, Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..drafters.checkpoint import let_others_read
from ..errors import OptionError, TrainingError
from ..generation.head import apply_head, head_rows
from ..generation.model_parts import decoder_of, device_of, is_spread
from ..generation.target import Target
from ..provenance import configs_digest, weights_fingerprint
from .arguments import DrafterTrainingArguments
from .dataset import ConversationCollator, ConversationDataset
from .row_encoding import Example

logger = logging.getLogger(__name__)

SHARD_SIZE = 256  # examples
BATCH_SIZE = 8  # examples that the target reads together


@dataclass(frozen=True)
class PairBatch:
    """The drafter's inputs and labels for a batch. Pair p holds the feature of token p and token p + 1.

    A label counts in the loss if the token that it predicts, p + distance + 1, is the assistant's.
    """

    input_ids: Int[Tensor, "rows tokens"]  # tokens = pairs + 1
    token_embeds: Float[Tensor, "rows pairs embed"]  # of token p + 1
    features: Float[Tensor, "rows pairs feature"]  # of token p
    labels: Float[Tensor, "rows pairs hidden"]  # inputs of the target's head at p + distance; zeros past the end
    is_token: Bool[Tensor, "rows pairs"]  # False at padding
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
        self.target = target.eval().requires_grad_(False)
        self.feature_layers = feature_layers
        self.distance = distance
        self.embeddings = embeddings

    @torch.no_grad()
    def read(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Read the `features` `[rows, tokens, feature]` of a batch, and the `head_inputs` if they differ from these.

        Padding is on the right.
        """
        decoder = decoder_of(self.target)
        hooks = Target(self.target, self.feature_layers).feature_hooks
        with hooks.active():
            outputs = decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
            features = hooks.take(input_ids.shape[1])

        assert features is not None  # at least one layer is read
        if self.feature_layers == (-1,):  # the features are the head's inputs
            return {"features": features}

        return {"features": features, "head_inputs": outputs[0]}

    def counted(self, batch: dict[str, Tensor]) -> Tensor:
        """Which labels `[rows, pairs]` of a batch count in the loss; the target is not read."""
        shifted = shift_left(batch["assistant_mask"], self.distance + 1)[:, :-1]
        return shifted & _is_token(batch)

    @torch.no_grad()
    def __call__(self, batch: dict[str, Tensor]) -> PairBatch:
        """Make the pairs of a batch; the target is not read if a [`FeatureCache`] has added its `features`."""
        input_ids = batch["input_ids"]
        states = batch
        if "features" not in batch:
            states = self.read(input_ids, batch["attention_mask"])

        features = states["features"].to(input_ids.device)
        head_inputs = states.get("head_inputs", features).to(input_ids.device)

        embed: Any = self.target.get_input_embeddings() if self.embeddings is None else self.embeddings
        return PairBatch(
            input_ids=input_ids,
            token_embeds=embed(input_ids[:, 1:]).to(input_ids.device),
            features=features[:, :-1],
            labels=shift_left(head_inputs, self.distance)[:, :-1],
            is_token=_is_token(batch),
            is_counted=self.counted(batch),
        )

    def head(self, features: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """The target's logits for head inputs, in float32 and on their device; gradients flow back to the inputs.

        With `token_ids` `[tokens]` they are those of these tokens alone.
        """
        rows = None if token_ids is None else head_rows(self.target, token_ids)
        return apply_head(self.target, features, rows).to(features.device)


def shift_left(values: Tensor, distance: int) -> Tensor:
    """Values `[rows, tokens, ...]` moved left: index i gets the value at i + distance, or zero past the end."""
    end = values.new_zeros(len(values), distance, *values.shape[2:])
    return torch.cat([values, end], dim=1)[:, distance:]


def _is_token(batch: dict[str, Tensor]) -> Tensor:
    """Which pairs `[rows, pairs]` are no padding."""
    return batch["attention_mask"][:, 1:].bool()


def move_target(target: PreTrainedModel, args: DrafterTrainingArguments) -> None:
    """Move the target to the device of the training, unless `device_map` spread it; that is for one process only."""
    if not is_spread(target):
        target.to(args.device)  # type: ignore[arg-type]  # a decorator hides the signature
    elif args.world_size > 1:
        raise OptionError(
            f"A target spread over devices serves one process, but there are {args.world_size}. Start one process, or "
            "load the target without `device_map`, whole for each."
        )


# Features on disk


class FeatureCache(Dataset[Example]):
    """The examples of a [`ConversationDataset`], each with its `features` (and `head_inputs`, where they differ).

    They are extracted once and then read instead of running the target, which saves time from the second epoch on. An
    interrupted extraction continues with the missing shards.

    Shards are safetensors files that are mapped into memory, which processes share. Each shard holds a fingerprint of
    the target, the feature layers and the token ids that it was made from. Its dtype is that of the target.

    Raises:
        [`TrainingError`]: a shard belongs to another target or other data.
    """

    def __init__(self, dataset: ConversationDataset, features: TargetFeatures, folder: str | Path) -> None:
        self.conversations = dataset
        self.lengths = dataset.lengths
        self.folder = Path(folder)
        self._fingerprint = _fingerprint(dataset, features)
        self._starts = [0, *accumulate(self.lengths)]  # the number of tokens before each example

        num_shards = len(range(0, len(dataset), SHARD_SIZE))
        self._extract(features, num_shards)
        self._shards = [self._open(number) for number in range(num_shards)]

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> Example:
        index = range(len(self))[index]  # raises an `IndexError` at the end, which ends a loop over the rows
        number = index // SHARD_SIZE
        start = self._starts[index] - self._starts[number * SHARD_SIZE]
        end = start + self.lengths[index]
        shard = self._shards[number]
        example = dict(self.conversations[index])
        for name in shard.keys():  # noqa: SIM118
            example[name] = shard.get_slice(name)[start:end]

        return example

    def _path(self, number: int) -> Path:
        return self.folder / f"features-{number:05d}.safetensors"

    def _open(self, number: int) -> safe_open:
        """Open a shard and check that it was made for this target and data."""
        path = self._path(number)
        shard = safe_open(path, framework="pt")
        stored = (shard.metadata() or {}).get("fingerprint")
        if stored != self._fingerprint:
            raise TrainingError(
                f"`{path}` must hold features of this target and data (fingerprint {self._fingerprint}), but it "
                f"holds others ({stored}). Give another folder, or delete this one."
            )

        return shard

    def _extract(self, features: TargetFeatures, num_shards: int) -> None:
        """Write the missing shards, each in one process."""
        state = PartialState()
        missing = [number for number in range(num_shards) if not self._path(number).is_file()]
        self.folder.mkdir(parents=True, exist_ok=True)
        state.wait_for_everyone()  # all processes list the same missing shards before one is written
        mine = missing[state.process_index :: state.num_processes]
        for number in tqdm(mine, desc="extract features", unit="shard", disable=not state.is_main_process):
            first = number * SHARD_SIZE
            tensors = self._read(features, range(first, min(first + SHARD_SIZE, len(self))))
            fresh = self._path(number).with_suffix(f".{os.getpid()}.tmp")  # another run may be writing the same shard
            save_file(tensors, fresh, metadata={"fingerprint": self._fingerprint})
            let_others_read(fresh)
            fresh.replace(self._path(number))

        state.wait_for_everyone()

    def _read(self, features: TargetFeatures, indices: range) -> dict[str, Tensor]:
        """The tensors of a shard: examples of similar length are read together, then all are joined in order."""
        collate = ConversationCollator(0)
        device = device_of(features.target)
        found: dict[int, dict[str, Tensor]] = {}
        ordered = sorted(indices, key=self.lengths.__getitem__)
        for start in range(0, len(ordered), BATCH_SIZE):
            members = ordered[start : start + BATCH_SIZE]
            batch = collate([self.conversations[index] for index in members])
            states = features.read(batch["input_ids"].to(device), batch["attention_mask"].to(device))
            for row, index in enumerate(members):
                found[index] = {name: value[row, : self.lengths[index]].cpu() for name, value in states.items()}

        names = found[indices[0]]
        return {name: torch.cat([found[index][name] for index in indices]) for name in names}


def bytes_per_token(features: TargetFeatures) -> int:
    """The size of a token's features, measured on one token."""
    token = torch.ones(1, 1, dtype=torch.long, device=device_of(features.target))
    found = features.read(token, attention_mask=token)
    return sum(value[0, 0].nbytes for value in found.values())


def _fingerprint(dataset: ConversationDataset, features: TargetFeatures) -> str:
    """A hash of the target's weights and config, the feature layers and the token ids."""
    digest = hashlib.blake2b(repr(features.feature_layers).encode(), digest_size=8)
    for index in range(len(dataset)):
        digest.update(repr(dataset[index]["input_ids"]).encode())

    digest.update(weights_fingerprint(features.target).encode())
    digest.update(configs_digest(features.target, "config").encode())
    return digest.hexdigest()
