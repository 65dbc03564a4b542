"""`falcon-spec find`: list the drafters that people published on the Hub for a target."""

import json
from typing import Any

from huggingface_hub import HfApi, ModelInfo
from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled  # type: ignore[attr-defined]
from rich.console import Console
from rich.table import Table

from ..drafters.registry import METHODS
from ..errors import HubError
from .options import FindCommand

_FOREIGN = {"eagle3": "Eagle-3", "dflash2": "DFlash2", "dflash": "DFlash"}  # of other software, by their architectures


def run(command: FindCommand) -> None:
    """Search the Hub, and print the drafters, the most downloaded first."""
    found = sorted(_drafters(command.target), key=lambda row: (-row["downloads"], row["repo_id"]))
    if command.json:
        print(json.dumps(found, indent=1))
        return

    if not found:
        print(f"No drafter on the Hub names `{command.target}` as its base model. Train one: `falcon-spec train`.")
        return

    table = Table("drafter", "method", "downloads")
    for row in found:
        table.add_row(row["repo_id"], row["method"], str(row["downloads"]))

    Console().print(table)


def _drafters(target: str) -> list[dict[str, Any]]:
    """List the drafters whose card names `target` as their base model."""
    api = HfApi()
    try:
        models = list(api.list_models(filter=f"base_model:{target}", cardData=True, fetch_config=True))
    except (HTTPError, OfflineModeIsEnabled) as error:
        raise HubError(
            f"Finding drafters needs the Hub at {api.endpoint}, but it does not answer: {type(error).__name__}: "
            f"{error} Look at the network, `HF_ENDPOINT` and `HF_HUB_OFFLINE`."
        ) from error

    found = []
    for model in models:  # fine-tuned and quantised targets name their base model, too
        if title := _method_of(model):
            found.append({"repo_id": model.id, "method": title, "downloads": model.downloads or 0})

    return found


def _method_of(model: ModelInfo) -> str | None:
    """How a model drafts, as far as its config and tags say so; None if it is no drafter that is known."""
    config: dict[str, Any] = model.config or {}
    kinds = {config.get("model_type"), *(model.tags or ())}
    if method := next((method for method in METHODS.values() if method.model_type in kinds), None):
        return method.title

    names = " ".join(config.get("architectures") or ()).lower()
    return next((title for mark, title in _FOREIGN.items() if mark in names), None)
