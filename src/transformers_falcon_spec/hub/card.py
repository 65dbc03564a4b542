"""The model card of a drafter: a template filled from its config, provenance and measurements.

Measurements come from results files of `falcon-spec bench` that the drafter's own weights and settings gave; no figure
is written by hand.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from jinja2 import Environment, StrictUndefined, TemplateError

from ..convert.conversion import RECORD as CONVERSION
from ..drafters.base import DrafterModel
from ..drafters.fingerprint import FIELD
from ..drafters.registry import method_of
from ..errors import PublishError, quoted
from ..evaluation.prompts import SET_NAMES
from ..evaluation.summary import Record, last_evaluation, read_result
from ..provenance import portable, weights_fingerprint
from ..training.row_encoding import describe_rows

TRAINING = "training.json"
TEMPLATE = Path(__file__).parent / "templates" / "card.md"
_SIZES = ("vocab_size", "feature_size", "feature_layers", "embedding_size")  # of the target, in a drafter's config


@dataclass(frozen=True)
class About:
    """Facts for the card that are in no file of a drafter.

    Args:
        license (`str`, *optional*): Licence of the drafter, as the Hub names it.
        data (`list[dict]`, *optional*): Training data: the `name` and `licence` of each source.
        notes (`list[str]`, *optional*): Further limits: what is not established, or known to be wrong.
    """

    license: str | None = None
    data: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "About":
        """Read the facts from a JSON file.

        Raises:
            [`PublishError`]: the file cannot be read, or holds other fields.
        """
        try:
            about = cls(**json.loads(path.read_text(encoding="utf-8")))
            if any(set(source) != {"name", "licence"} for source in about.data):
                raise ValueError("each of `data` must have `name` and `licence`")
            if not isinstance(about.notes, list):
                raise ValueError("`notes` must be a list of texts")

            return about
        except (OSError, TypeError, ValueError, AttributeError) as error:
            known = quoted(each.name for each in fields(cls))
            raise PublishError(f"`{path}` must be a JSON object of {known}, but {error}.") from error


@dataclass(frozen=True)
class Publication:
    """What is published in addition to the files of a drafter's folder.

    Args:
        results (`Sequence[str | Path]`, *optional*): Results files of `falcon-spec bench` on this drafter.
        about (`About`, *optional*): Licences and notes.
        target (`str`, *optional*): The Hub name of the target; None takes it from the drafter's config.
    """

    results: Sequence[str | Path] = ()
    about: About | None = None
    target: str | None = None


def render_card(
    drafter: DrafterModel,
    repo_id: str,
    target: str,
    figures: Sequence[Record] = (),
    records: Mapping[str, Mapping[str, Any]] | None = None,
    publication: Publication | None = None,
) -> str:
    """Render `README.md` of a drafter from its measurements, the records beside its weights and what is said of it."""
    records = records or {}
    about = (publication or Publication()).about or About()
    method = method_of(drafter)
    metadata = ModelCardData(
        base_model=target,
        base_model_relation="adapter",  # for weights that are of no use without their base model
        library_name="transformers",
        pipeline_tag="text-generation",
        license=about.license,
        tags=["speculative-decoding", "falcon-spec", drafter.config.model_type],
    )
    facts = {
        "metadata": metadata.to_yaml(),
        "repo_id": repo_id,
        "target": target,
        "method": method.title if method else drafter.config.model_type,
        "drafter_class": type(drafter).__name__,
        "num_parameters": drafter.num_parameters(),
        "target_facts": {name: getattr(drafter.config, name, None) for name in _SIZES},
        "fingerprint": getattr(drafter.config, FIELD, None),
        "figures": figures,
        "rows": [row for each in figures for row in each["rows"]],
        "set_names": SET_NAMES,
        "conversion": records.get(CONVERSION),
        "about": vars(about),
    }

    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    try:
        text = template.render(facts, training=_training_facts(records.get(TRAINING)))
    except (TemplateError, LookupError, TypeError) as error:
        raise PublishError(
            f"`{TRAINING}` and `{CONVERSION}` beside the weights must be those of `falcon-spec train` and "
            f"`falcon-spec convert`, but {type(error).__name__}: {error}. Take them out, or train again."
        ) from error

    return str(ModelCard(text).content)  # raises an error if the metadata is not YAML


def check_target_name(name: str | None) -> str:
    """Check the name of a target on the Hub and return it."""
    if name is not None and not Path(name).exists():
        with suppress(HFValidationError):
            validate_repo_id(name)
            return name

    raise PublishError(
        "The card must name the target as the Hub does, so that the drafter is found by it, but the drafter's config "
        f"says {name!r}. Name it: `--target OWNER/NAME`."
    )


def _training_facts(training: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The facts of `training.json` for the card, with those of its curve: steps, and the last accuracies."""
    if training is None:
        return None

    steps = max((row["step"] for row in training["curve"]), default=0)
    metrics = last_evaluation(training["curve"])
    accuracy = {name: value for name, value in metrics.items() if name.startswith("eval_accuracy_at_")}
    data = f"{training['num_examples']} conversations"
    if "rows" in training:  # other data than conversations has none
        data = f"{describe_rows(training['rows'])}; {training['num_examples']} examples"

    return {**training, "data": data, "steps": steps, "accuracy": accuracy}


def read_figures(paths: Iterable[str | Path], drafter: DrafterModel) -> list[Record]:
    """Read the measurements of `drafter` from each file, as the template of the card takes them."""
    return [_figures(path, read_result(path), drafter) for path in map(Path, paths)]


def _figures(path: Path, result: Record, drafter: DrafterModel) -> Record:
    """The measurements of `drafter` in one file."""
    dtypes = result["provenance"]["dtype"]
    found = [method for method in result["methods"] if _is_of(method, drafter, dtypes)]
    rows = []
    for row in result["rows"]:
        if len(found) == 1 and (row["target"], row["method"]) == (found[0]["target"], found[0]["method"]):
            rows.append(row)

    if not rows:
        raise PublishError(
            f"`{path}` must hold the figures of this drafter, once, but {len(found)} of its {len(result['methods'])} "
            "methods have its weights and settings. Measure it: `falcon-spec bench --methods DRAFTER`."
        )

    return {
        "name": path.name,
        "origin": portable(result["provenance"]),
        "dtype": dtypes[found[0]["target"]],
        "conditions": found[0]["conditions"],  # revision and chat template of the target
        "rows": rows,  # one for each set of prompts and way of decoding
    }


def _is_of(method: Mapping[str, Any], drafter: DrafterModel, dtypes: Mapping[str, str]) -> bool:
    """Whether a method that was measured is this drafter, with its weights and settings."""
    if method["kind"] != "drafter" or method["settings"] != drafter.draft_settings:
        return False

    measured: Any = deepcopy(drafter).to(dtype=getattr(torch, dtypes[method["target"]]))  # type: ignore[call-arg]
    return bool(method["weights"] == weights_fingerprint(measured))
