"""Converting DFlash drafters to a [`DFlashDrafter`], weight for weight: of Transformers, as published, of speculators.

Sources: Transformers, `muse_glimmer_assistant`; z-lab/dflash, `dflash/model.py`, whose form SpecForge writes, too;
vllm-project/speculators, `models/dflash`, and vLLM, which reads both. `published_dflash.py` reads their configs.
"""

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from ..drafters.dflash import DFlashConfig, DFlashDrafter
from ..errors import CheckpointError
from .conversion import (
    COMPARED,
    EMBEDDINGS,
    TRAINING_COPIES,
    Conversion,
    check_shape,
    is_targets_own,
    rename_weights,
)
from .formats import shortened
from .published_dflash import published_fields, speculators_fields
from .source import Checkpoint
from .target_facts import check_widths, fields_of, needs_target

_SELECTOR = "candidate_selector"
_FOREIGN_NAMES = {  # by those of this package and Transformers
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
    **{f"{_SELECTOR}.{each}.weight": f"{_SELECTOR}.{each}" for each in ("predecessor_codebook", "successor_codebook")},
}
HEAD = "lm_head.weight"
TARGETS_PARTS = {EMBEDDINGS: "get_input_embeddings", HEAD: "get_output_embeddings"}  # copied by speculators
OWN_MASK = "mask_embedding"


def convert_dflash_transformers(checkpoint: Checkpoint, target: PreTrainedModel | None) -> Conversion:
    """Convert a drafter of Transformers for `target`, whose embeddings and head it uses; it names no vocabulary."""
    if target is None:
        raise needs_target("how large the vocabulary is")
    config = DFlashConfig.of_stock(checkpoint.config, target)
    check_widths(config.hidden_size, target)
    weights, _dropped = rename_weights(checkpoint, {name: name for name in _own_names(config)})
    return Conversion(DFlashDrafter, config, weights)


def convert_dflash(checkpoint: Checkpoint, target: PreTrainedModel | None) -> Conversion:
    """Convert a drafter in the form of z-lab's repositories, DFlash or DFlash2."""
    fields = published_fields(checkpoint, target)
    vocabulary = fields_of(checkpoint.config, target, None)
    return _converted(checkpoint, target, DFlashConfig(**{**fields, **vocabulary}))


def convert_dflash_speculators(checkpoint: Checkpoint, target: PreTrainedModel | None) -> Conversion:
    """Convert a drafter in the form of speculators, where the layers have a config of their own."""
    fields, inner = speculators_fields(checkpoint, target)
    verifier = (checkpoint.config.get("speculators_config") or {}).get("verifier") or {}  # the target
    config = DFlashConfig(**{**fields, **fields_of(inner, target, verifier.get("name_or_path"))})
    _check_copies(checkpoint, target, config)
    return _converted(checkpoint, target, config, {**dict.fromkeys(TARGETS_PARTS, COMPARED), **TRAINING_COPIES})


def _check_copies(checkpoint: Checkpoint, target: PreTrainedModel | None, config: DFlashConfig) -> None:
    """Refuse embeddings and a head of the drafter's own, for which there is no place."""
    copies = {name: part for name, part in TARGETS_PARTS.items() if name in checkpoint.tensors}
    for name in copies:
        check_shape(checkpoint, name, (config.vocab_size, config.hidden_size))

    is_own = {name: is_targets_own(checkpoint, name, target, part) for name, part in copies.items()}
    unknown = [name for name, found in is_own.items() if found is None]
    if unknown:
        raise needs_target(f"whether {shortened(unknown)} equal the weights of the target, which must lie here")
    own = [name for name, found in is_own.items() if not found]
    if own:
        raise CheckpointError(
            f"A DFlash drafter must read the embeddings and the head of its target to be converted, but {own} of "
            f"`{checkpoint.name}` differ from the target's. Name the target that it was trained for; if it is that "
            "one, the drafter has weights of its own, for which drafters here have no place."
        )


def _converted(
    checkpoint: Checkpoint,
    target: PreTrainedModel | None,
    config: DFlashConfig,
    droppable: Mapping[str, str] | None = None,
) -> Conversion:
    if OWN_MASK in checkpoint.tensors:
        raise CheckpointError(
            f"A DFlash drafter must read the target's embedding of its mask to be converted, but `{checkpoint.name}` "
            f"has one of its own (`{OWN_MASK}`), for which drafters here have no place. Take one without it."
        )
    check_widths(config.hidden_size, target)
    names = {_FOREIGN_NAMES.get(name, name): name for name in _own_names(config)}
    return Conversion(DFlashDrafter, config, *rename_weights(checkpoint, names, droppable))


def _own_names(config: DFlashConfig) -> list[str]:
    """The names of a drafter's weights."""
    with torch.device("meta"):
        return list(DFlashDrafter(config).state_dict())
