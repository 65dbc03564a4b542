"""`falcon-spec trees`: measure acceptance by depth and sibling rank, and write the best static tree of a size."""

from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from ..drafters.config_fields import update_config
from ..evaluation.methods import decoding_options
from ..evaluation.prompts import Prompt, check_lengths
from ..evaluation.tree_fit import TreeFit, fit_result
from ..records import Records, texts_of
from .loading import check_own_config, load_drafter
from .options import TreesCommand


def run(command: TreesCommand) -> None:
    """Measure every prompt with every decoding, fit the tree, write it, and print what it promises."""
    if command.save:
        check_own_config(command.drafter)

    options = {name: decoding_options(name) for name in command.decodings}
    prompts = command.read_prompts()
    target, tokenizer = command.load_target()
    check_lengths(prompts, tokenizer, target.config, command.max_new_tokens)
    drafter = load_drafter(command.drafter, target)
    owner = CONFIG_NAME if drafter.generation_config.draft_tree is None else GENERATION_CONFIG_NAME
    fit = TreeFit(target, tokenizer, drafter, command.passes)
    settings = command.settings(target, drafter, "max_new_tokens", "seed", "dtype", **fit.settings)
    records = Records(command.records_file, settings)

    def counted(text: tuple[str, Prompt]) -> dict[str, Any]:
        name, prompt = text
        log = fit.watch(prompt, options[name], command.max_new_tokens, command.seed)
        return {"counts": log.counts(fit.depth)}

    entries = records.measured(texts_of(prompts, options), counted, "trees")
    result = fit_result(fit, [entry["counts"] for entry in entries], command.nodes)
    result["provenance"] = command.origin(target, passes=fit.settings["passes"])
    command.write(result)
    _show_fit(result, drafter.is_tree_dynamic, command.output)
    if command.save:
        update_config(Path(command.drafter), owner, draft_tree=result["draft_tree"])


def _show_fit(result: dict[str, Any], is_grown: bool, output: str) -> None:
    """Print the expected acceptance length of the tree."""
    num_nodes = len(result["draft_tree"]["parents"])
    present = result["present_expected_acceptance_length"]
    expected = f"{num_nodes} nodes, expected acceptance length {result['expected_acceptance_length']:.2f}"
    if present is not None:
        expected += f"; the present tree, {result['present_num_nodes']} nodes: {present:.2f}"

    print(f"{expected}. `{output}` holds the tree, and the acceptance by depth and rank.")
    if is_grown:
        print(
            "This drafter grows its trees; the static one serves rules that accept drawn tokens, and "
            "`dynamic_tree=False`."
        )
