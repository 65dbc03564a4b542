"""`falcon-spec easyspec tune`: find which layers of an EasySpec drafter should compute their attention at once.

Acceptance is measured for each possible group alone, then for the divisions of all layers that lose least. Parts of a
pass are timed on this device; links between devices are measured under `torchrun`, or given. From these the time of
drafting on 1 to 8 devices is calculated, all else as measured here. An interrupted run continues where it stopped.

Example:
  falcon-spec easyspec tune --target BIG --drafter layer-parallel:4:SMALL --prompts benchmarks/prompts/held_out.jsonl
                            --output runs/groups.json --link_latency_us 10 --link_gb_per_second 100
"""

import os
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, logging

from ..drafters.easyspec import LayerParallelDrafter
from ..errors import OptionError
from ..evaluation.decoding import decoding_options
from ..evaluation.draft_replay import DraftReplay, StepCounts, WrittenText, written_texts
from ..evaluation.layer_group_costs import Link, StepModel, measure_costs, measure_link
from ..evaluation.layer_groups import Groups, best_divisions, candidate_groups, single_layers, with_group
from ..evaluation.records import Records
from ..generation.distributed import ProcessGroup
from ..generation.options import SpeculationConfig
from ..generation.timed import timed_generate
from .loading import load_drafter
from .options import PairOptions, ResultOptions, TextOptions, check_least, option

SETTINGS = ("prompts", "limit", "depth", "num_tree_nodes", "tree_top_k", "max_new_tokens", "dtype")  # of all records
LEAST_LAYERS = 4  # with fewer there is nothing to group between the first and the last
MOST_TIMED = 20  # texts that are written to time steps
MOST_CONTEXT = 512  # tokens before the timed passes
SECONDS_TO_MEET = 120.0


@dataclass(kw_only=True)
class TuneGroupsCommand(PairOptions, TextOptions, ResultOptions):
    """The groups to try, the trees to draft, and the link between devices."""

    drafter: str = option("An EasySpec drafter, or `layer-parallel:N:FOLDER` of a language model.")
    max_new_tokens: int = option("Most tokens of a text.", 96)
    max_group_size: int = option("Largest group to try.", 5)
    depth: int = option("Depth of the drafts.", 5)
    num_tree_nodes: int = option("Nodes of a tree.", 16)
    tree_top_k: int = option("Nodes of a depth that grow children; 1 drafts chains.", 4)
    repeats: int = option("Timed passes.", 20)
    link_latency_us: float | None = option("Microseconds from device to device; with `link_gb_per_second`.", None)
    link_gb_per_second: float | None = option(
        "Gigabytes a second; without both one device is modelled, or links are measured under torchrun.", None
    )

    def __post_init__(self) -> None:
        """Check the least values, and that a link is described by both of its options or none."""
        super().__post_init__()
        check_least(self, max_group_size=2, depth=2, max_new_tokens=2, repeats=1)
        given = (self.link_latency_us, self.link_gb_per_second)
        if (given[0] is None) != (given[1] is None) or not all(value is None or value > 0 for value in given):
            raise OptionError(
                "`link_latency_us` and `link_gb_per_second` describe a link together and must be above 0, but they "
                f"are {given}."
            )


@dataclass(frozen=True)
class _Models:
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: LayerParallelDrafter


def run(command: TuneGroupsCommand) -> None:
    """Write texts, measure the acceptance of each group, time the parts of a pass, and print the best divisions."""
    logging.set_verbosity_error()
    link, is_first = _link(command)
    if not is_first:
        return
    models = _load(command)
    replay = DraftReplay(models.target, models.drafter, _options(command), command.max_new_tokens)
    records = Records(command.records_file, command.settings(models.target, models.drafter, *SETTINGS))
    named, rate = written_texts(
        models.target, models.tokenizer, command.read_prompts(), command.max_new_tokens, records
    )
    texts = list(named.values())
    result = _result(command, models, texts, _Counts(replay, texts, records), link)
    result = {"provenance": command.origin(models.target), "tokens_per_second_of_target": rate, **result}
    command.write(result)
    _show(result, command.output)


def _result(
    command: TuneGroupsCommand, models: _Models, texts: list[WrittenText], counts: "_Counts", link: Link | None
) -> dict[str, Any]:
    """Return the acceptance of single groups and of divisions, and the modelled speed on each number of devices."""
    num_layers = len(models.drafter.layered.layers)
    exact = counts.of(single_layers(num_layers))
    found = {
        each: counts.of(with_group(num_layers, *each)) for each in candidate_groups(num_layers, command.max_group_size)
    }
    losses = {each: exact.acceptance_length - steps.acceptance_length for each, steps in found.items()}
    model, rows = _model(command, models, texts, exact, link), []
    for groups in best_divisions(num_layers, losses):
        steps, lost = counts.of(groups), sum(losses.get((group[0], len(group)), 0.0) for group in groups)
        row = {"layer_groups": groups, "acceptance_length": steps.acceptance_length}
        row["predicted_acceptance_length"] = exact.acceptance_length - lost
        rows.append({**row, "devices": model.on_devices(groups, steps)})
    return {
        "acceptance_length_of_model": exact.acceptance_length,
        "groups_alone": [
            {"start": start, "size": size, "acceptance_length": steps.acceptance_length}
            for (start, size), steps in found.items()
        ],
        "model": asdict(model),
        "divisions": rows,
        "proposed": _proposed(rows),
    }


def _link(command: TuneGroupsCommand) -> tuple[Link | None, bool]:
    """Return the link between devices, given or measured, and whether this process continues."""
    if command.link_latency_us is not None and command.link_gb_per_second is not None:
        return Link(command.link_latency_us * 1e-6, command.link_gb_per_second * 1e9), int(
            os.environ.get("RANK", "0")
        ) == 0
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None, True
    dist.init_process_group()
    ranks, device = ProcessGroup(SECONDS_TO_MEET), torch.device("cpu")
    if command.device != "cpu":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    link = measure_link(ranks, device, command.repeats)
    dist.destroy_process_group()
    return link, ranks.is_first


def _load(command: TuneGroupsCommand) -> _Models:
    target, tokenizer = command.load_target()
    drafter = load_drafter(command.drafter, target)
    if not isinstance(drafter, LayerParallelDrafter) or len(drafter.layered.layers) < LEAST_LAYERS:
        raise OptionError(
            f"`drafter` must be an EasySpec drafter of at least {LEAST_LAYERS} layers, or `layer-parallel:N:FOLDER` "
            f"of such a language model, for the first and the last layer stand alone, but it is `{command.drafter}`."
        )
    drafter.check_target(target)
    drafter.config.backend = "sequential"
    return _Models(target, tokenizer, drafter)


def _options(command: TuneGroupsCommand) -> SpeculationConfig:
    names = ("num_tree_nodes", "tree_top_k")
    return SpeculationConfig(tune=False, tree_depth=command.depth, **{name: getattr(command, name) for name in names})


class _Counts:
    """Counts the steps that texts take with given groups, once for each division."""

    def __init__(self, replay: DraftReplay, texts: list[WrittenText], records: Records) -> None:
        self._replay, self._texts, self._records = replay, texts, records
        self._known = {str(entry["groups"]): entry["steps"] for entry in records.entries if "groups" in entry}

    def of(self, groups: Groups) -> StepCounts:
        if str(groups) not in self._known:
            each = [self._replay.count(text, groups) for text in tqdm(self._texts, desc=str(groups)[:60], leave=False)]
            steps = asdict(sum(each, StepCounts()))
            self._records.append({"groups": groups, "steps": steps})
            self._known[str(groups)] = steps
        return StepCounts(**self._known[str(groups)])


def _model(
    command: TuneGroupsCommand, models: _Models, texts: list[WrittenText], exact: StepCounts, link: Link | None
) -> StepModel:
    """Time the parts of drafting; the rest of a step is a measured step less its drafting."""
    drafter = models.drafter
    longest = max(texts, key=lambda text: len(text.token_ids))
    ids = torch.tensor([longest.token_ids[:MOST_CONTEXT]], device=drafter.device)
    costs = measure_costs(drafter, ids, command.tree_top_k, round(exact.acceptance_length), command.repeats)
    drafter.config.layer_groups, drafter.generation_config = (
        single_layers(len(drafter.layered.layers)),
        _options(command),
    )
    seconds, num_steps = 0.0, 0
    for text in texts[:MOST_TIMED]:
        prompt = torch.tensor([text.token_ids[: text.prompt_len]])
        options = decoding_options("greedy")
        timed = timed_generate(models.target, prompt, command.max_new_tokens, options, 0, assistant_model=drafter)
        stats = timed.output.speculation
        seconds, num_steps = seconds + stats.total_seconds - stats.prefill_seconds, num_steps + stats.num_steps
    drafting = StepModel(costs, 0.0, None).draft_seconds(drafter.config.layer_groups, exact, 1)
    return StepModel(costs, max(seconds / max(num_steps, 1) - drafting, 0.0), link)


def _proposed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each number of devices the division with most tokens per second."""
    found = []
    for index, device in enumerate(rows[0]["devices"]):
        best = max(rows, key=lambda row: row["devices"][index]["tokens_per_second"])
        found.append({**device, **best["devices"][index], "layer_groups": best["layer_groups"]})
    return found


def _show(result: dict[str, Any], output: str) -> None:
    """Print the divisions, and the best one for each number of devices."""
    console, devices = Console(), [str(device["devices"]) for device in result["divisions"][0]["devices"]]
    table = Table("sizes of groups", "length", "expected", *devices)
    table.title = "Acceptance length, what single groups let expect, and modelled tokens per second by devices"
    for row in result["divisions"]:
        sizes = " ".join(str(len(group)) for group in row["layer_groups"])
        lengths = (f"{row['acceptance_length']:.2f}", f"{row['predicted_acceptance_length']:.2f}")
        table.add_row(sizes, *lengths, *(f"{device['tokens_per_second']:.0f}" for device in row["devices"]))
    console.print(table)
    lines = [f"devices: {best['devices']}, layer_groups={best['layer_groups']}" for best in result["proposed"]]
    rate = result["tokens_per_second_of_target"]
    lines.append(f"The target alone: {rate:.1f} tokens per second. `{output}` holds the rest.")
    console.print("\n".join(lines), highlight=False, soft_wrap=True, markup=False)
