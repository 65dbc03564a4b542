"""What differs between the versions of Transformers that this package supports.

All other code speaks the language of the newest one.
"""

import inspect
import logging
from collections.abc import Callable
from functools import cache as once
from typing import Any

import transformers

logger = logging.getLogger(__name__)

NEWEST_TESTED = (5, 24)  # `pyproject.toml` bounds Transformers by it
INSTALLED = tuple(int(part) for part in transformers.__version__.split(".")[:2])

# Transformers 5.24 renamed `past_key_values` to `cache` in `model_kwargs`, forwards and outputs.
CACHE = "cache" if INSTALLED >= (5, 24) else "past_key_values"

# Before 5.23, a prompt that is read in chunks was read from its first token on, also where the cache held some of it.
CHUNKS_READ_CACHED_TOKENS_AGAIN = INSTALLED < (5, 23)

# Before 5.20, targets that drop their cache at a length, as Phi3 does, read only the newest token again.
FORGETS_DROPPED_TEXT = INSTALLED < (5, 20)


def cache_name(forward: Callable[..., Any]) -> str:
    """What a forward calls its cache: code from the Hub may keep the old name."""
    is_old = "past_key_values" in inspect.signature(forward).parameters
    return "past_key_values" if is_old else CACHE


@once
def warn_if_untested() -> None:
    """Say once, at the first call with a drafter, that this version of Transformers is newer than the tested ones."""
    if INSTALLED > NEWEST_TESTED:
        newest = "{}.{}".format(*NEWEST_TESTED)
        logger.warning(
            "Transformers %s is newer than %s, the newest version that this package was tested with. If a call fails, "
            "run `pip install transformers==%s.*`, and report it.",
            transformers.__version__,
            newest,
            newest,
        )
