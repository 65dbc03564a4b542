"""Finding published drafters for a target: the Hub is searched for cards that name the target as base model."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import HfApi, ModelInfo
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    HFValidationError,
    HTTPError,  # that of `httpx` or `httpx2`
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ..drafters.registry import METHODS
from ..errors import HubError, OptionError


@dataclass(frozen=True)
class PublishedDrafter:
    """A drafter that is published on the Hub."""

    repo_id: str
    method: str  # title of its drafting method
    downloads: int  # in the last 30 days
    # Acceptance lengths on its card, one for each set of prompts, by the name there of the way of decoding, or "".
    acceptance: dict[str, list[float]] = field(default_factory=dict)


def find_drafters(target: str) -> list[PublishedDrafter]:
    """The drafters of this package whose card names `target` as their base model, most downloaded first.

    Raises:
        [`OptionError`]: `target` is no name on the Hub.
        [`HubError`]: the Hub cannot be reached, or refuses.
    """
    try:
        validate_repo_id(target)
    except HFValidationError as error:
        raise OptionError(
            f"`target` must be a name on the Hub, such as `Qwen/Qwen3-0.6B`, but it is {target!r}: {error}"
        ) from error
    api = HfApi()
    try:
        found = list(_drafters(api.list_models(filter=f"base_model:{target}", cardData=True, fetch_config=True)))
    except OfflineModeIsEnabled as error:
        raise HubError(
            "Finding drafters needs the Hub, but `HF_HUB_OFFLINE` is set. Unset it for this command: "
            "`HF_HUB_OFFLINE=0`."
        ) from error
    except HTTPError as error:
        raise HubError(
            f"Finding drafters needs the Hub at {api.endpoint}, but it does not answer as it should: "
            f"{type(error).__name__}: {error}. Look at the network and at `HF_ENDPOINT`; drafters that are on this "
            "machine work without it."
        ) from error
    return sorted(found, key=lambda drafter: (-drafter.downloads, drafter.repo_id))


def _drafters(models: Any) -> Iterator[PublishedDrafter]:
    """The drafters among the models; fine-tuned and quantised targets name their base model, too."""
    for model in models:
        kinds = {(model.config or {}).get("model_type"), *(model.tags or ())}
        method = next((method for method in METHODS.values() if method.model_type in kinds), None)
        if method is not None:
            yield PublishedDrafter(model.id, method.title, model.downloads or 0, _acceptance(model))


def _acceptance(model: ModelInfo) -> dict[str, list[float]]:
    """The acceptance lengths in a card's `model-index`.

    Cards may be written by hand, so anything but a number is skipped. Cards of this package name metrics as in
    "acceptance length, greedy".
    """
    results: Any = getattr(model.card_data, "eval_results", None) or []
    found: dict[str, list[float]] = {}
    for result in results:
        metric, value = f"{result.metric_type} {result.metric_name}".lower().replace("_", " "), result.metric_value
        if "acceptance length" in metric and isinstance(value, int | float) and not isinstance(value, bool):
            decoding = (result.metric_name or "").partition(",")[2].strip()
            found.setdefault(decoding, []).append(float(value))
    return found
