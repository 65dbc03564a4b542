"""The Hub: publishing a drafter with its card, its recipe and its figures."""

import importlib
from typing import Any

from ..drafters.base import DrafterModel


def let_drafters_publish() -> None:
    """Give every drafter its `push_to_hub`; what that needs is imported when it is called."""
    DrafterModel.publisher = _push


def _push(drafter: DrafterModel, repo_id: str, **options: Any) -> str:
    return str(importlib.import_module(".publish", __name__).push(drafter, repo_id, **options))
