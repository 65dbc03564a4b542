"""`falcon-spec trees fit`: measure how often each rank at each depth is accepted, and write the best static tree of a size.

The drafter drafts a wide tree in the decoding loop itself, on prompts that nothing was trained on and that no benchmark measures.
The best tree of N nodes holds the N likeliest ones; docs/trees.md says why. A fit that was interrupted goes on where it stopped.

Example, on the embedded pair:
  falcon-spec trees fit --target models/reference-target --drafter models/falcon-reference --nodes 12 --output tree.json
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import logging

from ..errors import OptionError
from ..evaluation.decoding import decoding_options
from ..evaluation.prompts import Prompt, check_lengths, read_prompts
from ..evaluation.records import Records
from ..evaluation.tree_fit import TreeFit, fit_result
from ..provenance import provenance, weights_fingerprint
from .loading import load_drafter, load_target, save_tree

NUM_SHOWN = 6  # ranks in the table


@dataclass
class FitTreeCommand:
    """What to measure, and where the tree goes."""

    target: str = field(metadata={"help": "Folder or Hub name of the target."})
    drafter: str = field(metadata={"help": "Folder or Hub name of a Falcon, Eagle or Medusa drafter."})
    nodes: int = field(metadata={"help": "Nodes of the tree, root included."})
    prompts: list[str] = field(
        default_factory=lambda: ["benchmarks/prompts/held_out.jsonl"],
        metadata={
            "help": "JSON lines files. Neither training text, where drafters are better than elsewhere, nor what is "
            "benchmarked with the tree later: this repository's test sets are refused."
        },
    )
    passes: int | None = field(
        default=None, metadata={"help": "Drafter passes of a draft; None takes those of the drafter's present tree."}
    )
    ranks: int = field(default=10, metadata={"help": "Ranks to measure at each depth."})
    width: int = field(
        default=6, metadata={"help": "Nodes of each depth, those of the best ranks, below which ranks are measured."}
    )
    decodings: list[str] = field(
        default_factory=lambda: ["greedy", "temperature-0.7"],
        metadata={"help": "Names of decodings, see docs/options.md; the tree is fitted to all of them together."},
    )
    max_new_tokens: int = field(default=128, metadata={"help": "Most tokens of a text."})
    limit: int | None = field(default=None, metadata={"help": "Use this many prompts of each file only."})
    output: str | None = field(
        default=None,
        metadata={
            "help": "JSON file for the tree and the numbers behind it; each text's go to the same name with .jsonl, where a later "
            "run goes on. None with `save`: draft_tree.json beside the drafter's weights."
        },
    )
    save: bool = field(default=False, metadata={"help": "Put the tree into the drafter's config.json."})
    seed: int = field(default=0, metadata={"help": "Of the sampling."})
    dtype: str = field(default="float32", metadata={"help": "auto, float32, bfloat16 or float16."})
    device: str = field(default="cpu", metadata={"help": "cpu, cuda, or auto to spread over devices."})


def run(command: FitTreeCommand) -> None:
    """Measure every prompt under every decoding, fit, write, show."""
    logging.set_verbosity_error()
    output, prompts = _checked(command)
    target, tokenizer = load_target(command.target, command.dtype, command.device)
    check_lengths(prompts, tokenizer, target.config, command.max_new_tokens)
    drafter = load_drafter(command.drafter, target)
    fit = TreeFit(target, tokenizer, drafter, command.passes, command.ranks, command.width)
    records = Records(output.with_suffix(".jsonl"), _settings(command, fit))
    found = {(entry["decoding"], entry["set"], entry["prompt"]): entry["counts"] for entry in records.entries}
    asked = [(name, prompt) for name in command.decodings for prompt in prompts]
    todo = [(name, prompt) for name, prompt in asked if _key(name, prompt) not in found]
    for name, prompt in tqdm(todo, desc="trees fit", unit="text"):
        counts = fit.watch(prompt, decoding_options(name), command.max_new_tokens, command.seed).counts(fit.depth)
        found[_key(name, prompt)] = counts
        records.append({"decoding": name, "set": prompt.set_name, "prompt": prompt.prompt_id, "counts": counts})
    result = fit_result(fit, [found[_key(*each)] for each in asked], command.nodes)
    dtype = str(target.dtype).removeprefix("torch.")
    result["provenance"] = provenance(**{**vars(command), "passes": fit.num_passes, "dtype": dtype})
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _show(result, drafter.is_tree_dynamic, output)
    if command.save:
        save_tree(Path(command.drafter), result["draft_tree"])


def _checked(command: FitTreeCommand) -> tuple[Path, list[Prompt]]:
    """Where to write and what to answer; options that nothing could serve are refused before anything is loaded."""
    for name in command.decodings:
        decoding_options(name)
    for option, least in (("nodes", 2), ("max_new_tokens", 2)):
        if getattr(command, option) < least:
            raise OptionError(f"`{option}` must be at least {least}, but it is {getattr(command, option)}.")
    for path in map(Path, command.prompts):
        if path.resolve().parts[-3:-1] == ("benchmarks", "prompts") and path.stem != "held_out":
            raise OptionError(
                f"`prompts` must not be what benchmarks measure with the tree later, but one is the test set `{path}`. Take "
                "benchmarks/prompts/held_out.jsonl, or prompts of your own."
            )
    prompts = read_prompts(command.prompts, command.limit)
    if not prompts or not command.decodings:
        raise OptionError("There must be a prompt to answer and a decoding, but `limit` or `decodings` leaves none.")
    return _output(command), prompts


def _output(command: FitTreeCommand) -> Path:
    if command.save and not (Path(command.drafter) / "config.json").is_file():
        raise OptionError(
            f"`save` writes into the drafter's config.json, so `drafter` must be a folder that holds one, but it is "
            f"`{command.drafter}`. Download it, or give `--output FILE.json`."
        )
    if command.output is None and not command.save:
        raise OptionError("The tree must go somewhere: give `--output FILE.json` or `--save`.")
    output = Path(command.drafter) / "draft_tree.json" if command.output is None else Path(command.output)
    if output.suffix != ".json":
        raise OptionError(f"`output` must end in `.json`, but it is `{output}`; other files are named after it.")
    return output


def _settings(command: FitTreeCommand, fit: TreeFit) -> dict[str, Any]:
    """What all records have in common."""
    models = {"target": weights_fingerprint(fit.target), "drafter": weights_fingerprint(fit.drafter)}
    names = ("ranks", "width", "max_new_tokens", "seed", "dtype")
    return {**models, "passes": fit.num_passes, **{name: getattr(command, name) for name in names}}


def _key(decoding: str, prompt: Prompt) -> tuple[str, str, str]:
    return decoding, prompt.set_name, prompt.prompt_id


def _show(result: dict[str, Any], is_grown: bool, output: Path) -> None:
    """The acceptance and what to expect of the tree."""
    console, tree = Console(), result["draft_tree"]
    rates = result["acceptance"]
    table = Table("depth", "asked", *(f"rank {rank}" for rank in range(len(rates[0]))[:NUM_SHOWN]), title="Acceptance")
    for depth, (row, num_asked) in enumerate(zip(rates, result["num_asked"], strict=True), start=1):
        table.add_row(str(depth), str(num_asked), *(f"{rate:.3f}" for rate in row[:NUM_SHOWN]))
    console.print(table)
    present = result["present_expected_acceptance_length"]
    expected = f"{len(tree['parents'])} nodes, expected acceptance length {result['expected_acceptance_length']:.2f}"
    if present is not None:
        expected += f"; the present tree, {result['present_num_nodes']} nodes: {present:.2f}"
    console.print(f"{expected}. `{output}` holds the tree.", highlight=False, markup=False, soft_wrap=True)
    if is_grown:
        console.print(
            "This drafter grows its trees; the static one serves rules that judge drawn tokens, and `dynamic_tree=False`.",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
