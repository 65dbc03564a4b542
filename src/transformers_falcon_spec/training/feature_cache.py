"""Features of the training data on disk, extracted once and then read instead of running the target.

This saves time from the second epoch on. An interrupted extraction continues with the missing shards.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from ..drafters.checkpoint import let_others_read
from ..errors import TrainingError
from ..provenance import weights_fingerprint
from .checkpoints import explain_write_errors
from .dataset import ConversationCollator, ConversationDataset
from .features import TargetFeatures
from .row_encoding import Example

logger = logging.getLogger(__name__)

SHARD_SIZE = 256  # examples
BATCH_SIZE = 8  # examples that the target reads together


class FeatureCache(Dataset[Example]):
    """The examples of a [`ConversationDataset`], each with its `features` (and `head_inputs`, where they differ).

    Shards are safetensors files that are mapped into memory, which processes share. Each shard holds a fingerprint of
    the target, the feature layers and the token ids that it was made from, and a digest of its values, which is
    compared when a process first reads from it. Its dtype is that of the target.

    Raises:
        [`TrainingError`]: a shard belongs to another target or other data or is damaged, or the disk has too little
            space.
    """

    def __init__(self, dataset: ConversationDataset, features: TargetFeatures, folder: str | Path) -> None:
        self.conversations, self.folder = dataset, Path(folder)
        self.lengths = dataset.lengths
        self._fingerprint = _fingerprint(dataset, features)
        firsts = range(0, len(dataset), SHARD_SIZE)
        self._members = [range(first, min(first + SHARD_SIZE, len(dataset))) for first in firsts]
        self._extents: list[tuple[int, slice]] = []  # for each example the number of its shard, and its tokens there
        for number, members in enumerate(self._members):
            bounds = accumulate((self.lengths[index] for index in members), initial=0)
            self._extents += [(number, slice(*ends)) for ends in pairwise(bounds)]
        self._extract(features)
        self._shards = [self._open(number) for number in range(len(self._members))]
        self._unproven = set(range(len(self._members)))  # shards whose digest was not compared yet

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> Example:
        number, extent = self._extents[index]
        shard = self._shards[number]
        if number in self._unproven:
            self._prove(number)
        features = {name: shard.get_slice(name)[extent] for name in shard.keys()}  # noqa: SIM118
        return {**self.conversations[index], **features}

    def _path(self, number: int) -> Path:
        return self.folder / f"features-{number:05d}.safetensors"

    def _open(self, number: int) -> safe_open:
        """Open a shard and check that it was made for this target and data."""
        path = self._path(number)
        try:
            shard = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise TrainingError(
                f"`{path}` must be a whole shard, but it is not: {error}. Delete it; it is made again."
            ) from error
        stored, _digest = _read_marks(shard)
        if stored != self._fingerprint:
            raise TrainingError(
                f"`{path}` must hold features of this target and data (fingerprint {self._fingerprint}), but it "
                f"holds others ({stored}). Give another folder, or delete this one."
            )
        return shard

    def _prove(self, number: int) -> None:
        """Compare a shard with its digest, the first time that this process reads from it."""
        shard, path = self._shards[number], self._path(number)
        tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        num_tokens = sum(self.lengths[index] for index in self._members[number])
        _fingerprint, stored = _read_marks(shard)
        is_long_enough = all(len(value) == num_tokens for value in tensors.values())
        if not is_long_enough or digest_of(tensors) != stored:
            raise TrainingError(
                f"`{path}` must hold the features that were written to it, but its digest is another one: the file is "
                "damaged. Delete it; it is made again."
            )
        self._unproven.remove(number)

    def _extract(self, features: TargetFeatures) -> None:
        """Write the missing shards, each in one process."""
        state = PartialState()
        missing = [number for number in range(len(self._members)) if not self._path(number).is_file()]
        state.wait_for_everyone()  # all processes list the same missing shards before one is written
        if missing:
            num_tokens = sum(self.lengths[index] for number in missing for index in self._members[number])
            self._check_disk_space(features, num_tokens)
        mine = missing[state.process_index :: state.num_processes]
        for number in tqdm(mine, desc="extract features", unit="shard", disable=not state.is_main_process):
            tensors = self._read(features, self._members[number])
            with explain_write_errors(self.folder):
                # another run may be writing the same shard
                fresh = self._path(number).with_suffix(f".{os.getpid()}.tmp")
                marks = (
                    f"{self._fingerprint} {digest_of(tensors)}"  # one field, for safetensors orders several at will
                )
                save_file(tensors, fresh, metadata={"marks": marks})
                let_others_read(fresh)
                fresh.replace(self._path(number))
        state.wait_for_everyone()

    def _check_disk_space(self, features: TargetFeatures, num_tokens: int) -> None:
        with explain_write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        needed = num_tokens * bytes_per_token(features)
        free = shutil.disk_usage(self.folder).free
        logger.info("Features of %d tokens go to `%s`: %.2f GB of %.2f GB free.",
                    num_tokens, self.folder, needed / 1e9, free / 1e9)  # fmt: skip
        if needed > free:
            raise TrainingError(
                f"`{self.folder}` must have room for {needed / 1e9:.2f} GB of features, but {free / 1e9:.2f} GB are "
                "free. Choose another folder or a narrower dtype of the target, or train without a cache."
            )

    def _read(self, features: TargetFeatures, indices: range) -> dict[str, Tensor]:
        """The tensors of a shard: examples of similar length are read together, then all are joined in order."""
        collate, device = ConversationCollator(0), features.device
        found: dict[int, dict[str, Tensor]] = {}
        ordered = sorted(indices, key=self.lengths.__getitem__)
        for start in range(0, len(ordered), BATCH_SIZE):
            members = ordered[start : start + BATCH_SIZE]
            batch = collate([self.conversations[index] for index in members])
            states = features.read(batch["input_ids"].to(device), batch["attention_mask"].to(device))
            for row, index in enumerate(members):
                found[index] = {name: value[row, : self.lengths[index]].cpu() for name, value in states.items()}
        return {name: torch.cat([found[index][name] for index in indices]) for name in found[indices[0]]}


def _read_marks(shard: safe_open) -> tuple[str, str]:
    """The fingerprint of what a shard was made of, and the digest of its values."""
    fingerprint, _, digest = (shard.metadata() or {}).get("marks", "").partition(" ")
    return fingerprint, digest


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """A hash of all values of a shard."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def bytes_per_token(features: TargetFeatures) -> int:
    """The size of a token's features, measured on one token."""
    probe = features.read(*(torch.ones(1, 1, dtype=torch.long, device=features.device) for _ in range(2)))
    return sum(value[0, 0].nbytes for value in probe.values())


def _fingerprint(dataset: ConversationDataset, features: TargetFeatures) -> str:
    """A hash of the target's weights, the feature layers and the token ids."""
    digest = hashlib.blake2b(repr(features.feature_layers).encode(), digest_size=8)
    for example in dataset.examples:
        digest.update(repr(example["input_ids"]).encode())
    digest.update(weights_fingerprint(features.target).encode())
    return digest.hexdigest()
