"""Decoding options as they lie beside the weights of a drafter or of an adapter, in a folder or on the Hub."""

from typing import Any, cast

from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from ..generation.options import SpeculationConfig


def hub_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments of `from_pretrained` that say where to look."""
    names = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
    return {name: kwargs[name] for name in names if name in kwargs}


def read_options(name_or_path: Any, **hub: Any) -> SpeculationConfig | None:
    """The options there; None where there are none."""
    found = cached_file(str(name_or_path), GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False, **hub)
    if found is None:
        return None
    return cast(
        SpeculationConfig, SpeculationConfig.from_pretrained(name_or_path, **hub)
    )  # the base class is declared
