"""Who takes part in comparisons of drafters: those that are named, and what needs neither training nor a folder."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import MuseGlimmerAssistantConfig, PreTrainedModel

from transformers_falcon_spec.commands.loading import PROMPT_LOOKUP, load_drafter, load_method
from transformers_falcon_spec.drafters.checkpoint import kind_of, readable
from transformers_falcon_spec.errors import DrafterMismatchError, FalconSpecError, OptionError, quoted
from transformers_falcon_spec.evaluation.methods import Method, with_drafter
from transformers_falcon_spec.training.metrics import MAX_RANK, rank_shares


@dataclass(frozen=True)
class Entrant:
    """A method that takes part: its name, and its folder or what `bench` calls it."""

    name: str
    source: str
    is_in_our_loop: bool = False  # a drafter of Transformers in this package's loop

    def load(self, target: PreTrainedModel) -> Method:
        """The method for `target`, in its dtype and on its device."""
        if not self.is_in_our_loop:
            return load_method(self.source, target)
        drafter = load_drafter(self.source, target)
        drafter.check_target(target)
        return with_drafter(self.name, drafter)


def entries_of(folders: Sequence[str]) -> list[Entrant]:
    """The drafters in these folders, and prompt lookup.

    DFlash drafters of Transformers take part in the stock loop, and as `NAME-tree` in this package's.

    Raises:
        [`OptionError`]: there is no such folder, or one has the name of another that takes part.
    """
    missing = [folder for folder in folders if not (Path(folder) / "config.json").is_file()]
    if missing:
        raise OptionError(
            f"`--drafters` must name folders with a `config.json` each, but {quoted(missing)} have none."
        )

    entries = [Entrant(Path(folder).name, folder) for folder in folders]
    for folder in folders:
        if _is_stock_dflash(folder):
            entries.append(Entrant(f"{Path(folder).name}-tree", folder, is_in_our_loop=True))
    entries.append(Entrant(PROMPT_LOOKUP, PROMPT_LOOKUP))

    shared = [name for name, count in Counter(entry.name for entry in entries).items() if count > 1]
    if shared:
        raise OptionError(
            f"Drafters must have names of their own, but {quoted(shared)} is that of two. Rename a folder."
        )

    return entries


def _is_stock_dflash(folder: str) -> bool:
    with readable(folder):
        return kind_of(folder) == MuseGlimmerAssistantConfig.model_type


def loaded(entry: Entrant, target: PreTrainedModel) -> Method:
    """The method for `target`; models of Transformers are checked, too, which stock generation does not do.

    Raises:
        [`DrafterMismatchError`]: the folder cannot be loaded, or it was made for another target.
    """
    try:
        method = entry.load(target)
        if method.is_stock and method.assistant is not None:
            _check_stock(method.assistant, target)
    except FalconSpecError as error:
        raise DrafterMismatchError(
            f"Every drafter that takes part must fit the target, but `{entry.source}` does not: {error}"
        ) from error

    return method


def _check_stock(model: Any, target: PreTrainedModel) -> None:
    """Refuse a language model with other tokens, and a DFlash drafter of another width or for a deeper target."""
    config, text = model.config, target.config.get_text_config(decoder=True)
    if model.can_generate():
        if config.vocab_size != text.vocab_size:
            raise DrafterMismatchError(f"It has {config.vocab_size} tokens, and the target {text.vocab_size}.")
        return
    if config.hidden_size != text.hidden_size:
        raise DrafterMismatchError(f"It is {config.hidden_size} channels wide, and the target {text.hidden_size}.")
    if max(config.target_layer_ids) >= text.num_hidden_layers:
        raise DrafterMismatchError(
            f"It reads layers {config.target_layer_ids}, and the target has {text.num_hidden_layers}."
        )


def training_of(entry: Entrant) -> dict[str, Any] | None:
    """What a drafter was trained for, as `training.json` in its folder says; None where it was not trained, or says nothing.

    `num_readings` counts the conversations of this run, repeats included; a run that went on from another names that in `start`.
    """
    file = Path(entry.source) / "training.json"
    if not file.is_file():
        return None
    record = json.loads(file.read_text(encoding="utf-8"))
    words = record["command"].replace("=", " ").split()
    options = {name: value for name, value in pairwise(words) if name.startswith("--")}
    recipe = record.get("recipe") or {}
    by_recipe = recipe.get("training", {}) if isinstance(recipe, dict) else {}
    last = next((point for point in reversed(record["curve"]) if "eval_accuracy_at_1" in point), {})

    return {
        "method": entry.name,
        "num_steps": record["curve"][-1]["step"],
        "num_readings": round(record["curve"][-1]["epoch"] * record["num_examples"]),
        "num_examples": record["num_examples"],
        "learning_rate": float(options.get("--learning_rate") or by_recipe["learning_rate"]),
        "start": options.get("--drafter"),
        "seed": record["seed"],
        "accuracy": last.get("eval_accuracy_at_1"),
        "command": record["command"],
    }


def measured_acceptance(folder: Path, block_size: int) -> torch.Tensor:
    """Share of held-out rows whose best token stood at each rank, by place in the block: `[block_size, ranks]`."""
    curve = json.loads((folder / "training.json").read_text(encoding="utf-8"))["curve"]
    last = next(entry for entry in reversed(curve) if "eval_rank_0_at_1" in entry)
    return rank_shares(last, block_size, MAX_RANK, prefix="eval")
