"""`falcon-spec calibrate`: fit temperatures that make a drafter's probabilities come true, and save them."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..drafters.base import DrafterModel
from ..drafters.config_fields import update_config
from ..evaluation.calibration import DrafterObserver, Observations, ObservedText, fit, num_seen_positions
from ..evaluation.methods import decoding_options
from ..evaluation.prompts import Prompt, check_lengths
from ..generation.options import SpeculationConfig
from ..generation.timed import timed_generate
from ..records import Records, texts_of
from .loading import check_own_config, load_drafter
from .options import CalibrateCommand

NUM_TREE_NODES = 32  # of the observed trees
TREE_TOP_K = 8
DECODINGS = ("greedy", "temperature-0.7", "temperature-1")


def run(command: CalibrateCommand) -> None:
    """Observe drafts, fit the temperatures, write the results, and save the temperatures if asked."""
    target, drafter, texts = observed_texts(command, Observations)
    fitted = fit(texts, drafter.block_size)
    command.write({"provenance": command.origin(target), "fit": fitted})
    for name, values in fitted.items():
        print(f"{name}: {' '.join(f'{value:.2f}' for value in values)}")

    num_seen = num_seen_positions(texts, drafter.block_size)
    if num_seen < drafter.block_size:
        print(f"Too few texts reached deeper positions: those behind {num_seen} take its temperatures.")

    if command.save:
        update_config(Path(command.drafter), confidence_temperatures=fitted)
        print(f"{command.drafter}/config.json holds the temperatures.")


def observed_texts(
    command: CalibrateCommand, kind: type[Observations]
) -> tuple[PreTrainedModel, DrafterModel, list[ObservedText]]:
    """Load the pair, and write the texts that are not measured yet; returns all of them, with a `kind` of each."""
    if command.save:
        check_own_config(command.drafter)

    prompts = command.read_prompts()
    target, tokenizer = command.load_target()
    check_lengths(prompts, tokenizer, target.config, command.max_new_tokens)
    drafter = load_drafter(command.drafter, target)
    depth = max((1 + drafter.goes_on) * drafter.block_size, drafter.tree_depth)
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

    def observed(text: tuple[str, Prompt]) -> dict[str, Any]:
        name, prompt = text
        options = decoding_options(name)
        ids = prompt.input_ids(tokenizer)
        timed_generate(target, ids, command.max_new_tokens, options, command.seed, observer.drafter)
        seen = observer.take(options.get("temperature"), kind)
        return {
            "decoding": name,
            "prompt": f"{prompt.set_name} {prompt.prompt_id}",
            "seen": None if seen is None else seen.to_json(),
        }

    found = []
    for entry in records.measured(texts_of(prompts, DECODINGS), observed, "calibrate"):
        if entry["seen"] is not None:
            name = entry["decoding"]
            temperature = decoding_options(name).get("temperature")
            seen = kind.from_json(entry["seen"])
            found.append(ObservedText(entry["prompt"], name, temperature, seen))

    return target, drafter, found
