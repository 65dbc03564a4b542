"""Find which layers of an EasySpec drafter should compute their attention at once.

Texts are written with each possible group alone, then with the divisions of all layers that lose least acceptance. How
fast drafting would be on 1 to 8 devices is calculated from what these texts took on this device and from the link
between devices, which is given, or measured under `torchrun`. Drafts are as the drafter's generation config says, one
in every step. An interrupted run continues where it stopped.

Command: python -m lab.easyspec_tune --target BIG --drafter layer-parallel:4:SMALL --prompts benchmarks/prompts/held_out.jsonl
    --output runs/groups.json --link_latency_us 10 --link_gb_per_second 100
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, logging

from lab.layer_groups import (
    Groups,
    Link,
    StepModel,
    best_divisions,
    candidate_groups,
    in_order,
    measure_link,
    with_group,
)
from lab.options import parsed
from transformers_falcon_spec.commands.loading import load_drafter
from transformers_falcon_spec.commands.options import PairOptions, ResultOptions, TextOptions, option
from transformers_falcon_spec.core.stats import GenerationStats
from transformers_falcon_spec.drafters.easyspec import LayerParallelDrafter
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.methods import decoding_options
from transformers_falcon_spec.evaluation.prompts import check_lengths
from transformers_falcon_spec.generation.distributed import ProcessGroup
from transformers_falcon_spec.generation.timed import ForwardWatch, timed_generate
from transformers_falcon_spec.records import Records

LEAST_LAYERS = 4  # with fewer there is nothing to group between the first and the last
MAX_GROUP_SIZE = 5
SECONDS_TO_MEET = 120.0
COUNTS = ("num_tokens", "num_steps", "num_accepted", "num_passes")
SECONDS = ("prefill_seconds", "draft_seconds", "total_seconds")


@dataclass(kw_only=True)
class TuneGroupsCommand(PairOptions, TextOptions, ResultOptions):
    """The texts to write, and the link between devices."""

    drafter: str = option("An EasySpec drafter, or `layer-parallel:N:FOLDER` of a language model.")
    max_new_tokens: int = option("Most tokens of a text.", 96, least=2)
    link_latency_us: float | None = option("Microseconds from device to device; with `link_gb_per_second`.", None)
    link_gb_per_second: float | None = option(
        "Gigabytes a second; without both one device is modelled, or links are measured under torchrun.", None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = (self.link_latency_us, self.link_gb_per_second)
        if (given[0] is None) != (given[1] is None) or not all(value is None or value > 0 for value in given):
            raise OptionError(
                "`link_latency_us` and `link_gb_per_second` describe a link together and must be above 0, but they "
                f"are {given}."
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the acceptance of each group and of the best divisions, and print what they would be worth."""
    command = parsed(TuneGroupsCommand, __doc__, argv)
    logging.set_verbosity_error()
    link = _link(command)
    if int(os.environ.get("RANK", "0")):  # only the first process goes on
        return
    target, tokenizer = command.load_target()
    texts = _Texts(command, target, tokenizer)
    alone = texts.written(None)
    rate = alone.num_tokens / alone.total_seconds
    result = {"provenance": command.origin(target), "tokens_per_second_of_target": rate, **_result(texts, link)}
    command.write(result)
    _show(result, command.output)


class _Texts:
    """Writes the prompts' texts with given groups, once for each division."""

    def __init__(
        self, command: TuneGroupsCommand, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        drafter = load_drafter(command.drafter, target)
        if not isinstance(drafter, LayerParallelDrafter) or len(drafter.layered.layers) < LEAST_LAYERS:
            raise OptionError(
                f"`drafter` must be an EasySpec drafter of at least {LEAST_LAYERS} layers, or "
                "`layer-parallel:N:FOLDER` of such a language model, for the first and the last layer stand alone, "
                f"but it is `{command.drafter}`."
            )
        drafter.check_target(target)
        drafter.generation_config.tune = False
        in_order(drafter)  # which needs no new weights for other groups
        prompts = command.read_prompts()
        check_lengths(prompts, tokenizer, target.config, command.max_new_tokens)
        self.target, self.drafter, self.max_new_tokens = target, drafter, command.max_new_tokens
        self.prompts = [prompt.input_ids(tokenizer) for prompt in prompts]
        names = ("prompts", "limit", "max_new_tokens", "dtype")
        settings = command.settings(target, drafter, *names, drafts=drafter.draft_settings)
        self._records = Records(command.records_file, settings)
        self._known = {str(entry["groups"]): entry["stats"] for entry in self._records.entries}

    def written(self, groups: Groups | None) -> GenerationStats:
        """The counts and seconds of all texts; None for the target alone."""
        if str(groups) not in self._known:
            each = [self.write(prompt, groups) for prompt in tqdm(self.prompts, desc=str(groups)[:60], leave=False)]
            total = sum(each, GenerationStats())
            stats = {name: getattr(total, name) for name in (*COUNTS, *SECONDS)}
            self._records.append({"groups": groups, "stats": stats})
            self._known[str(groups)] = stats
        return GenerationStats(**self._known[str(groups)])

    def write(self, prompt: Tensor, groups: Groups | None) -> GenerationStats:
        """Write one text."""
        self.drafter.config.layer_groups = groups
        drafter = None if groups is None else self.drafter
        found = timed_generate(self.target, prompt, self.max_new_tokens, decoding_options("greedy"), 0, drafter)
        if groups is None:
            return GenerationStats(num_tokens=len(found.new_ids), total_seconds=found.seconds)
        stats: GenerationStats = found.output.speculation
        return stats


def _result(texts: _Texts, link: Link | None) -> dict[str, Any]:
    """Return the acceptance of single groups and of divisions, and the modelled speed on each number of devices."""
    num_layers = len(texts.drafter.layered.layers)
    exact = texts.written(with_group(num_layers))
    lengths = {
        each: texts.written(with_group(num_layers, *each)).acceptance_length
        for each in candidate_groups(num_layers, MAX_GROUP_SIZE)
    }
    losses = {each: exact.acceptance_length - length for each, length in lengths.items()}
    model = _model(texts, exact, link)
    rows: list[dict[str, Any]] = []
    for groups in best_divisions(num_layers, losses):
        stats, lost = texts.written(groups), sum(losses.get((group[0], len(group)), 0.0) for group in groups)
        row = {"layer_groups": groups, "acceptance_length": stats.acceptance_length}
        row["predicted_acceptance_length"] = exact.acceptance_length - lost
        rows.append({**row, "devices": model.on_devices(groups, stats)})
    modelled = [[{**device, "layer_groups": row["layer_groups"]} for device in row["devices"]] for row in rows]
    return {
        "acceptance_length_of_model": exact.acceptance_length,
        "groups_alone": [{"start": s, "size": n, "acceptance_length": length} for (s, n), length in lengths.items()],
        "model": asdict(model),
        "divisions": rows,
        "proposed": [max(each, key=itemgetter("tokens_per_second")) for each in zip(*modelled, strict=True)],
    }


def _link(command: TuneGroupsCommand) -> Link | None:
    """Return the link between devices, given or measured by all processes together; None for one device."""
    if command.link_latency_us is not None and command.link_gb_per_second is not None:
        return Link(command.link_latency_us * 1e-6, command.link_gb_per_second * 1e9)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    dist.init_process_group()
    processes, device = ProcessGroup(SECONDS_TO_MEET), torch.device("cpu")
    if command.device != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    link = measure_link(processes, device)
    dist.destroy_process_group()
    return link


def _model(texts: _Texts, exact: GenerationStats, link: Link | None) -> StepModel:
    """Return what parts of a step took with the model as it is; attention is timed in one more text."""
    drafter, last = texts.drafter, len(texts.drafter.layered.layers) - 1
    watch = ForwardWatch()
    with watch.on(drafter.layered.layers[1].self_attn):
        texts.write(texts.prompts[0], [[0], list(range(1, last)), [last]])
    elsewhere = exact.total_seconds - exact.prefill_seconds - exact.draft_seconds
    return StepModel(
        drafter_pass=exact.draft_seconds / max(exact.num_passes, 1),
        attend=median(watch.seconds),
        elsewhere=elsewhere / max(exact.num_steps, 1),
        state_bytes=drafter.generation_config.tree_top_k * drafter.model.config.hidden_size * drafter.dtype.itemsize,
        link=link,
    )


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


if __name__ == "__main__":
    main()
