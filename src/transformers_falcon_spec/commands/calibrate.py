"""`falcon-spec calibrate`: fit the temperatures at which a drafter's chances come true, and store them in its config.

Trees that grow keep the nodes with the highest chances, and what a node is worth is its chance. So of nodes drafted with chance c whose
parent was kept, a share c should be kept. The drafter writes texts with its target, greedy and at two temperatures, and the
temperatures are fitted to what the target chose. The text never depends on them. Take held-out prompts, not those of a benchmark.
A run that was interrupted goes on where it stopped.

Example, on the embedded pair:
  falcon-spec calibrate --target models/reference-target --drafter models/falcon-reference
                        --prompts benchmarks/prompts/held_out.jsonl --output runs/calibration.json --save
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, logging

from ..drafters.base import DrafterModel
from ..errors import OptionError
from ..evaluation.calibration import Text, compare, fit, fits_of_folds
from ..evaluation.confidence import NUM_BEST, ListWatch, Observations
from ..evaluation.decoding import decoding_options
from ..evaluation.prompts import Prompt, check_lengths, read_prompts
from ..evaluation.records import Records
from ..generation.options import SpeculationConfig
from ..generation.timed import timed_generate
from ..provenance import provenance, weights_fingerprint
from .loading import load_drafter, load_target, save_fields

DECODINGS = ("greedy", "temperature-0.7", "temperature-1")


@dataclass
class CalibrateCommand:
    """Which drafter to calibrate, on what, and where the figures go."""

    target: str = field(metadata={"help": "Folder or Hub name of the target."})
    drafter: str = field(metadata={"help": "Folder or Hub name of a drafter that can grow trees."})
    prompts: list[str] = field(metadata={"help": "JSON lines files of held-out prompts."})
    output: str = field(
        metadata={
            "help": "JSON file to write; what was seen goes to the same name with .jsonl, where a later run goes on."
        }
    )
    html: str | None = field(
        default=None, metadata={"help": "HTML page with the reliability plots; needs matplotlib, the extra `report`."}
    )
    save: bool = field(
        default=False, metadata={"help": "Store the temperatures in the `config.json` of the drafter's folder."}
    )
    passes: int = field(
        default=1,
        metadata={
            "help": "Passes whose places get temperatures of their own; later passes take those of the last one."
        },
    )
    tree_depth: int | None = field(
        default=None,
        metadata={
            "help": "How deep trees are grown to look; None takes two passes, or what trees of the drafter take if it is more."
        },
    )
    num_tree_nodes: int = field(default=32, metadata={"help": "Nodes of the trees that are grown to look."})
    max_new_tokens: int = field(default=96, metadata={"help": "Most tokens of a text."})
    limit: int | None = field(default=None, metadata={"help": "Use this many prompts of each file only."})
    seed: int = field(default=0, metadata={"help": "Of the draws and of the intervals."})
    dtype: str = field(default="float32", metadata={"help": "auto, float32, bfloat16 or float16."})
    device: str = field(default="cpu", metadata={"help": "cpu, cuda, or auto to spread over devices."})


def run(command: CalibrateCommand) -> None:
    """Look, fit, write, show, and store if asked.

    Raises:
        [`OptionError`]: the drafter grows no trees, or too little was seen.
    """
    logging.set_verbosity_error()
    output = Path(command.output)
    if output.suffix != ".json":
        raise OptionError(f"`output` must end in `.json`, but it is `{output}`; other files are named after it.")
    if command.passes < 1:
        raise OptionError(f"`passes` must be at least 1, but it is {command.passes}.")
    if command.save and not (Path(command.drafter) / "config.json").is_file():
        raise OptionError(
            f"`save` writes into the drafter's config.json, so `drafter` must be a folder that holds one, but it is `{command.drafter}`. "
            "Download it; an adapter is merged and saved first."
        )
    target, tokenizer = load_target(command.target, command.dtype, command.device)
    drafter = load_drafter(command.drafter, target)
    texts = _look(
        command, target, tokenizer, drafter, Records(output.with_suffix(".jsonl"), _settings(command, target, drafter))
    )
    size, num_places = drafter.block_size, command.passes * drafter.block_size
    folds, found = fits_of_folds(texts, num_places, size), fit(texts, num_places, size)
    result = {
        "provenance": provenance(**{**vars(command), "dtype": str(target.dtype).removeprefix("torch.")}),
        "fit": found.to_json(),
        "fits_of_folds": [each.to_json() for each in folds],
        "rows": compare(texts, folds, size, command.seed),
    }
    output.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    _show(result)
    if command.save:
        save_fields(Path(command.drafter), {"confidence_temperatures": found.to_json()})
        print(f"{command.drafter}/config.json holds the temperatures.")
    if command.html is not None:
        from ..evaluation.calibration_page import render_calibration_page  # noqa: PLC0415  needs matplotlib

        Path(command.html).write_text(render_calibration_page(result), encoding="utf-8")
        print(f"{command.html} shows the reliability plots.")


def _settings(command: CalibrateCommand, target: PreTrainedModel, drafter: DrafterModel) -> dict[str, Any]:
    """What all that was seen has in common."""
    names = ("num_tree_nodes", "max_new_tokens", "seed")
    return {
        "target": weights_fingerprint(target),
        "drafter": weights_fingerprint(drafter),
        "depth": _depth(command, drafter),
        **{name: getattr(command, name) for name in names},
    }


def _depth(command: CalibrateCommand, drafter: DrafterModel) -> int:
    """How deep trees are grown to look."""
    least = max(command.passes, 2) * drafter.block_size
    return max(least, drafter.tree_depth) if command.tree_depth is None else command.tree_depth


def _look(
    command: CalibrateCommand,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DrafterModel,
    records: Records,
) -> list[Text]:
    """Write every text that was not written yet, and take what was seen."""
    prompts = read_prompts(command.prompts, command.limit)
    check_lengths(prompts, tokenizer, target.config, command.max_new_tokens)
    drafter.generation_config = SpeculationConfig(
        tune=False,  # whatever it costs
        dynamic_tree=True,
        num_tree_nodes=command.num_tree_nodes,
        tree_depth=_depth(command, drafter),
        tree_top_k=NUM_BEST,
    )
    watch, done = ListWatch(drafter), {entry["key"] for entry in records.entries}
    todo = [(prompt, name) for prompt in prompts for name in DECODINGS if _key(prompt, name) not in done]
    for prompt, name in tqdm(todo, desc="calibrate", unit="text"):
        ids, options = prompt.input_ids(tokenizer), decoding_options(name)
        timed_generate(target, ids, command.max_new_tokens, options, command.seed, watch.drafter)
        seen = watch.take(options.get("temperature"))
        records.append({"key": _key(prompt, name), "seen": None if seen is None else seen.to_json()})
    asked = {_key(prompt, name): (prompt, name) for prompt in prompts for name in DECODINGS}
    found = [(entry, *asked[entry["key"]]) for entry in records.entries if entry["key"] in asked]
    return [
        Text(
            f"{prompt.set_name} {prompt.prompt_id}",
            name,
            decoding_options(name).get("temperature"),
            Observations.from_json(entry["seen"]),
        )
        for entry, prompt, name in found
        if entry["seen"] is not None
    ]


def _key(prompt: Prompt, decoding: str) -> str:
    return f"{prompt.set_name}|{prompt.prompt_id}|{decoding}"


def _show(result: dict[str, Any]) -> None:
    for name, values in result["fit"].items():
        print(f"{name}: {' '.join(f'{value:.2f}' for value in values)}")
    for row in result["rows"]:
        before, after = (row[side]["best_nodes"]["error"] for side in ("before", "after"))
        low, high = row["loss_saved_interval"]
        print(
            f"{row['decoding']}: calibration error of the best nodes {before:.3f} before and {after:.3f} after, loss lower by "
            f"{row['loss_saved']:.3f} ({low:.3f} to {high:.3f}); {row['num_lists']} lists"
        )
