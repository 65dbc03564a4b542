"""Training drafters with the Hugging Face Trainer: data, features of the target, objectives, evaluation."""

from importlib import import_module
from typing import Any

from ..errors import OptionError


def required(module: str) -> Any:
    """Import a module of a package that only training needs; an [`OptionError`] says so where it is missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise OptionError(
            f"Training needs the package `{error.name}`, which is not installed. Run `pip install {error.name}`."
        ) from error
