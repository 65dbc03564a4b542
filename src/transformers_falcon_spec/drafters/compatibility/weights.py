"""Weights after reading: finite, and, where they came from the Hub, what the Hub says they are."""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel

from ...errors import CheckpointError
from ...provenance import file_sha256

_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_finite(model: PreTrainedModel, name_or_path: Any) -> None:
    """Refuse weights with NaN or infinity.

    Raises:
        [`CheckpointError`]: there are some.
    """
    wrong = [
        name
        for name, weight in model.named_parameters()
        if weight.device.type != "meta" and not weight.isfinite().all()
    ]
    if wrong:
        raise CheckpointError(
            f"`{name_or_path}` must hold finite weights, but {len(wrong)} hold NaN or infinity, the first of them "
            f"`{wrong[0]}`. Take an earlier checkpoint of the training."
        )


def check_download(name_or_path: Any, **hub: Any) -> None:
    """Refuse weights in the Hub's cache whose checksum is not the one that the Hub gave; folders have none.

    The cache names the content of a large file by that checksum; huggingface_hub itself compares sizes alone.

    Raises:
        [`CheckpointError`]: the checksum is another.
    """
    if name_or_path is None or Path(name_or_path).is_dir():
        return
    subfolder, options = hub.get("subfolder"), {key: hub[key] for key in ("cache_dir", "revision") if hub.get(key)}
    config = try_to_load_from_cache(
        str(name_or_path), f"{subfolder}/config.json" if subfolder else "config.json", **options
    )
    for path in sorted(Path(config).parent.glob("*.safetensors")) if isinstance(config, str) else ():
        expected, given = path.resolve().name, file_sha256(path)
        if _SHA256.fullmatch(expected) and given != expected:
            raise CheckpointError(
                f"`{path.name}` of `{name_or_path}` must have the checksum {expected}, which the Hub gives, but it "
                f"has {given}: it was changed on its way or on this disk. Fetch it again: `from_pretrained(..., "
                "force_download=True)`."
            )
