"""The Hugging Face Hub: publishing drafters with a card, figures and code that runs them."""

from pathlib import Path
from typing import Any

from ..drafters.base import DrafterModel
from ..drafters.registry import resolved


def let_drafters_publish() -> None:
    """Give every drafter its `push_to_hub` and its code; what they need is imported when they are called."""
    DrafterModel.publisher, DrafterModel.code_writer = _push, _write_code


def _write_code(drafter: DrafterModel, folder: Path) -> None:
    resolved(".hub.bundle:add_code")(type(drafter), folder)


def _push(drafter: DrafterModel, repo_id: str, **options: Any) -> str:
    return str(resolved(".hub.publish:push")(drafter, repo_id, **options))
