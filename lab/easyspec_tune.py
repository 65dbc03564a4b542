"""Find which layers of an EasySpec drafter should compute their attention at once.

Texts are written with each possible group alone, then with the divisions of all layers that lose least acceptance. Drafts are as the
drafter's generation config says, one in every step. An interrupted run continues where it stopped.

Command: python -m lab.easyspec_tune --target BIG --drafter layer-parallel:4:SMALL --prompts benchmarks/prompts/held_out.jsonl
    --output runs/groups.json
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase, logging

from lab.layer_groups import Groups, best_divisions, candidate_groups, in_order, with_group
from lab.options import parsed
from transformers_falcon_spec.commands.loading import load_drafter
from transformers_falcon_spec.commands.options import PairOptions, ResultOptions, TextOptions, option
from transformers_falcon_spec.core.stats import GenerationStats
from transformers_falcon_spec.drafters.easyspec import LayerParallelDrafter
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.methods import decoding_options
from transformers_falcon_spec.evaluation.prompts import check_lengths
from transformers_falcon_spec.generation.timed import timed_generate
from transformers_falcon_spec.records import Records

LEAST_LAYERS = 4  # with fewer there is nothing to group between the first and the last
MAX_GROUP_SIZE = 5


@dataclass(kw_only=True)
class TuneGroupsCommand(PairOptions, TextOptions, ResultOptions):
    """The pair, and the texts to write."""

    drafter: str = option("An EasySpec drafter, or `layer-parallel:N:FOLDER` of a language model.")
    max_new_tokens: int = option("Most tokens of a text.", 96, least=2)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the acceptance of each group and of the best divisions, and print it."""
    command = parsed(TuneGroupsCommand, __doc__, argv)
    logging.set_verbosity_error()
    target, tokenizer = command.load_target()

    measured = _measured(_Texts(command, target, tokenizer))
    result = {"provenance": command.origin(target), **measured}
    command.write(result)
    _show(result)


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
        self.target = target
        self.drafter = drafter
        self.num_layers = len(drafter.layered.layers)
        self.max_new_tokens = command.max_new_tokens
        self.prompts = [prompt.input_ids(tokenizer) for prompt in prompts]

        names = ("prompts", "limit", "max_new_tokens", "dtype")
        settings = command.settings(target, drafter, *names, drafts=drafter.draft_settings)
        self._records = Records(command.records_file, settings)

    def acceptance_length(self, groups: Groups) -> float:
        """Tokens a step over all texts, written now if the file does not hold these groups."""
        for entry in self._records.entries:
            if entry["groups"] == groups:
                return float(entry["acceptance_length"])

        self.drafter.config.layer_groups = groups
        total = GenerationStats()
        for prompt in self.prompts:
            run = timed_generate(self.target, prompt, self.max_new_tokens, decoding_options("greedy"), 0, self.drafter)
            total += run.output.speculation

        self._records.append({"groups": groups, "acceptance_length": total.acceptance_length})
        return total.acceptance_length


def _measured(texts: _Texts) -> dict[str, Any]:
    """The acceptance of single groups and of the best divisions."""
    of_model = texts.acceptance_length(with_group(texts.num_layers))
    alone = []
    losses = {}
    for start, size in candidate_groups(texts.num_layers, MAX_GROUP_SIZE):
        length = texts.acceptance_length(with_group(texts.num_layers, start, size))
        alone.append({"start": start, "size": size, "acceptance_length": length})
        losses[start, size] = of_model - length

    divisions = []
    for groups in best_divisions(texts.num_layers, losses):
        lost = sum(losses[group[0], len(group)] for group in groups if len(group) > 1)
        divisions.append(
            {
                "layer_groups": groups,
                "acceptance_length": texts.acceptance_length(groups),
                "predicted_acceptance_length": of_model - lost,
            }
        )

    return {"acceptance_length_of_model": of_model, "groups_alone": alone, "divisions": divisions}


def _show(result: dict[str, Any]) -> None:
    """Print the divisions."""
    table = Table("groups", "acceptance length", "expected", "layer_groups")
    for row in result["divisions"]:
        groups = row["layer_groups"]
        expected = row["predicted_acceptance_length"]
        table.add_row(str(len(groups)), f"{row['acceptance_length']:.2f}", f"{expected:.2f}", str(groups))

    Console().print(table)


if __name__ == "__main__":
    main()
