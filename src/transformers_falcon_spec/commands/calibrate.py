"""`falcon-spec calibrate`: fit temperatures that make a drafter's probabilities come true, and save them."""

from operator import itemgetter
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, logging

from ..drafters.base import DrafterModel
from ..drafters.config_fields import update_config
from ..errors import OptionError
from ..evaluation.calibration import (
    MIN_LISTS,
    NUM_FOLDS,
    DrafterObserver,
    Observations,
    ObservedText,
    compare,
    fit,
    fits_of_folds,
)
from ..evaluation.methods import decoding_options
from ..evaluation.prompts import Prompt, check_lengths
from ..generation.options import SpeculationConfig
from ..generation.timed import timed_generate
from ..records import Records
from .loading import check_own_config, load_drafter
from .options import CalibrateCommand

NUM_TREE_NODES = 32  # of the observed trees
TREE_TOP_K = 8
DECODINGS = ("greedy", "temperature-0.7", "temperature-1")


def run(command: CalibrateCommand) -> None:
    """Observe drafts, fit the temperatures, write the results, and save the temperatures if asked."""
    target, drafter, texts = observed_texts(command, Observations)
    size = drafter.block_size
    num_positions = command.passes * size
    fitted = fit(texts, num_positions, size)
    folds = fits_of_folds(texts, num_positions, size)
    result = {
        "provenance": command.origin(target),
        "fit": fitted.to_json(),
        "rows": compare(texts, folds, size),
    }
    command.write(result)
    _show(result)
    if command.save:
        update_config(Path(command.drafter), confidence_temperatures=fitted.to_json())
        print(f"{command.drafter}/config.json holds the temperatures.")


def observed_texts(
    command: CalibrateCommand, kind: type[Observations]
) -> tuple[PreTrainedModel, DrafterModel, list[ObservedText]]:
    """Load the pair, and write the texts that are not measured yet; returns all of them, with a `kind` of each."""
    logging.set_verbosity_error()
    if command.save:
        check_own_config(command.drafter)
    prompts = _announced_prompts(command)
    target, tokenizer = command.load_target()
    check_lengths(prompts, tokenizer, target.config, command.max_new_tokens)
    drafter = load_drafter(command.drafter, target)
    _check_positions(command, drafter, len(prompts))
    depth = max(max(command.passes, 1 + drafter.goes_on) * drafter.block_size, drafter.tree_depth)
    drafter.generation_config = SpeculationConfig(
        tune=False,  # every step must draft
        dynamic_tree=True,
        num_tree_nodes=NUM_TREE_NODES,
        tree_depth=depth,
        tree_top_k=TREE_TOP_K,
    )
    observer = DrafterObserver(drafter)

    measured = {"depth": depth, "num_tree_nodes": NUM_TREE_NODES, "observed": kind.__name__}
    records = Records(command.records_file, command.settings(target, drafter, "max_new_tokens", "seed", **measured))
    texts = {f"{p.set_name}|{p.prompt_id}|{name}": (p, name) for p in prompts for name in DECODINGS}

    def observed(key: str) -> dict[str, Any]:
        prompt, name = texts[key]
        ids, options = prompt.input_ids(tokenizer), decoding_options(name)
        timed_generate(target, ids, command.max_new_tokens, options, command.seed, observer.drafter)
        seen = observer.take(options.get("temperature"), kind)
        return {"key": key, "seen": None if seen is None else seen.to_json()}

    entries = records.measured({key: key for key in texts}, observed, itemgetter("key"), "calibrate")
    found = []
    for entry, (prompt, name) in zip(entries, texts.values(), strict=True):
        if entry["seen"] is not None:
            temperature = decoding_options(name).get("temperature")
            seen = kind.from_json(entry["seen"])
            found.append(ObservedText(f"{prompt.set_name} {prompt.prompt_id}", name, temperature, seen))
    return target, drafter, found


def _announced_prompts(command: CalibrateCommand) -> list[Prompt]:
    """Read the prompts, and say what is needed and what will be written; what cannot be enough is refused."""
    prompts = command.read_prompts()
    num_texts, num_folded = len(DECODINGS) * len(prompts), len(prompts) // NUM_FOLDS * command.max_new_tokens
    print(
        f"{len(prompts)} prompts, each answered {' and '.join(DECODINGS)}: {num_texts} texts of up to "
        f"{command.max_new_tokens} tokens. They must be held out of the training. Every position of a block must be "
        f"drafted at least {MIN_LISTS} times in each half of the prompts; a text drafts it once a step at most."
    )
    if num_folded < MIN_LISTS:
        raise OptionError(
            f"Half of the prompts must write at least {MIN_LISTS} tokens greedily, but {len(prompts)} prompts of "
            f"{command.max_new_tokens} tokens write {num_folded} at most. Give more prompts or longer texts."
        )
    return prompts


def _check_positions(command: CalibrateCommand, drafter: DrafterModel, num_prompts: int) -> None:
    """Refuse positions that no texts can show often enough, before any is written."""
    size = drafter.block_size
    most_passes = (NUM_TREE_NODES - 1) // size if drafter.goes_on else 1
    if command.passes > most_passes:
        raise OptionError(
            f"`passes` must be at most {most_passes} for this `{type(drafter).__name__}`, which reaches no positions "
            f"beyond, but it is {command.passes}."
        )

    most_lists = num_prompts // NUM_FOLDS * ((command.max_new_tokens - 1) // size)
    if most_lists < MIN_LISTS:
        raise OptionError(
            f"Each position needs at least {MIN_LISTS} tokens in each half of the prompts, but position {size} can "
            f"see {most_lists} at most: {num_prompts} prompts write up to {command.max_new_tokens} tokens, and a "
            f"block has {size}. Give more prompts or longer texts."
        )


def _show(result: dict[str, Any]) -> None:
    for name, values in result["fit"].items():
        print(f"{name}: {' '.join(f'{value:.2f}' for value in values)}")
    for row in result["rows"]:
        print(
            f"{row['decoding']}: loss {row['loss_before']:.3f} before and {row['loss_after']:.3f} after, as fitted to "
            f"other prompts; {row['num_lists']} lists"
        )
