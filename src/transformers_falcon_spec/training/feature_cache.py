"""Features of the training data on disk, extracted once and then read instead of running the target.

This saves time from the second epoch on. An interrupted extraction continues with the missing shards.
"""

import hashlib
import logging
import os
import shutil
from pathlib import Path

import torch
from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from ..errors import TrainingError
from ..provenance import weights_fingerprint
from .checkpoints import explain_write_errors
from .dataset import ConversationCollator, ConversationDataset, Example
from .features import TargetFeatures

logger = logging.getLogger(__name__)

SHARD_SIZE = 256  # examples
BATCH_SIZE = 8  # examples that the target reads together


class FeatureCache(Dataset[Example]):
    """The examples of a [`ConversationDataset`], each with its `features` (and `head_inputs`, where they differ).

    Shards are safetensors files that are mapped into memory, which processes share. Each shard holds a fingerprint of
    the target, the feature layers and the token ids that it was made from. Its dtype is that of the target.

    Raises:
        [`TrainingError`]: a shard belongs to another target or other data or is cut short, or the disk has too little
            space.
    """

    def __init__(self, dataset: ConversationDataset, features: TargetFeatures, folder: str | Path) -> None:
        self.conversations, self.folder = dataset, Path(folder)
        self._fingerprint = _fingerprint(dataset, features)
        self._starts = [0] * len(dataset)  # index of each example's first token in its shard
        for index in range(1, len(dataset)):
            if index % SHARD_SIZE:
                self._starts[index] = self._starts[index - 1] + self._length(index - 1)
        self._open: dict[int, safe_open] = {}
        self._extract(features)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens in each example."""
        return self.conversations.lengths

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> Example:
        index = range(len(self))[index]
        shard, start = self._shard(index // SHARD_SIZE), self._starts[index]
        stop = start + self._length(index)
        features = {name: shard.get_slice(name)[start:stop] for name in shard.keys()}  # noqa: SIM118
        return {**self.conversations[index], **features}

    def _length(self, index: int) -> int:
        return len(self.conversations[index]["input_ids"])

    def _path(self, number: int) -> Path:
        return self.folder / f"features-{number:05d}.safetensors"

    def _members(self, number: int) -> range:
        return range(number * SHARD_SIZE, min((number + 1) * SHARD_SIZE, len(self)))

    def _shard(self, number: int) -> safe_open:
        """Open a shard and check that it was made for this target and data."""
        if number not in self._open:
            path = self._path(number)
            try:
                shard = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise TrainingError(
                    f"`{path}` must be a whole shard, but it is not: {error}. Delete it; it is made again."
                ) from error
            stored = (shard.metadata() or {}).get("fingerprint")
            if stored != self._fingerprint:
                raise TrainingError(
                    f"`{path}` must hold features of this target and data (fingerprint {self._fingerprint}), but it "
                    f"holds others ({stored}). Give another folder, or delete this one."
                )
            self._open[number] = shard
        return self._open[number]

    def _extract(self, features: TargetFeatures) -> None:
        """Write the missing shards, each in one process, and check all shards."""
        state = PartialState()
        numbers = range(-(-len(self) // SHARD_SIZE))
        missing = [number for number in numbers if not self._path(number).is_file()]
        state.wait_for_everyone()  # all processes list the same missing shards before one is written
        if missing:
            self._check_disk_space(features, sum(self._length(i) for number in missing for i in self._members(number)))
        mine = missing[state.process_index :: state.num_processes]
        for number in tqdm(mine, desc="extract features", unit="shard", disable=not state.is_main_process):
            tensors = self._read(features, number)
            with explain_write_errors(self.folder):
                # another run may be writing the same shard
                fresh = self._path(number).with_suffix(f".{os.getpid()}.tmp")
                save_file(tensors, fresh, metadata={"fingerprint": self._fingerprint})
                fresh.replace(self._path(number))
        state.wait_for_everyone()
        for number in numbers:
            self._shard(number)

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

    def _read(self, features: TargetFeatures, number: int) -> dict[str, Tensor]:
        """The tensors of one shard: examples of similar length are read together, then all are joined in order."""
        collate, device = ConversationCollator(0), features.target.device
        tensors: dict[int, dict[str, Tensor]] = {}
        ordered = sorted(self._members(number), key=self._length)
        for start in range(0, len(ordered), BATCH_SIZE):
            members = ordered[start : start + BATCH_SIZE]
            batch = collate([self.conversations[index] for index in members])
            states = features.read(batch["input_ids"].to(device), batch["attention_mask"].to(device))
            for row, index in enumerate(members):
                tensors[index] = {name: value[row, : self._length(index)].cpu() for name, value in states.items()}
        names = tensors[ordered[0]].keys()
        return {name: torch.cat([tensors[index][name] for index in self._members(number)]) for name in names}


def bytes_per_token(features: TargetFeatures) -> int:
    """The size of a token's features, measured on one token."""
    probe = features.read(*(torch.ones(1, 1, dtype=torch.long, device=features.target.device) for _ in range(2)))
    return sum(value[0, 0].nbytes for value in probe.values())


def _fingerprint(dataset: ConversationDataset, features: TargetFeatures) -> str:
    """A hash of the target's weights, the feature layers and the token ids."""
    digest = hashlib.blake2b(repr(features.feature_layers).encode(), digest_size=8)
    for example in (dataset[index] for index in range(len(dataset))):
        digest.update(repr(example["input_ids"]).encode())
    digest.update(weights_fingerprint(features.target).encode())
    return digest.hexdigest()
