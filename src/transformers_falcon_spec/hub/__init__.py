"""The Hugging Face Hub: publishing drafters with a card, figures and code that runs them."""

from typing import Any

from ..drafters.base import DrafterModel
from ..drafters.registry import resolved


def let_drafters_publish() -> None:
    """Give every drafter its `push_to_hub`; what that needs is imported when it is called."""
    DrafterModel.publisher = _push


def _push(drafter: DrafterModel, repo_id: str, **options: Any) -> str:
    return str(resolved(".hub.publish:push")(drafter, repo_id, **options))
