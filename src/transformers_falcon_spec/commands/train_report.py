"""What `falcon-spec train` says: the plan before it starts, what counts in the loss, and what came of it."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import unwrap_peft_model

from ..drafters.base import DrafterModel
from ..training.dataset import ConversationDataset
from ..training.features import bytes_per_token
from ..training.objectives import Objective
from ..training.recipes import Choice, bytes_of_row, said_in

BYTES_PER_TRAINED_WEIGHT = 16  # in float32: itself, its gradient, and the two moments of AdamW


def print_plan(choices: Sequence[Choice]) -> None:
    """Print the plan as a table."""
    table = Table(title="The plan", title_justify="left", show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")  # names of folders stay whole

    for choice in choices:
        table.add_row(choice.what, choice.value, choice.reason)

    Console(highlight=False).print(table)


def chance(objective: Objective) -> Choice:
    """The line of the plan that says which cross-entropy guesses at random have."""
    num_tokens = objective.num_draftable_tokens
    value = f"{math.log(num_tokens):.1f} is chance"
    return Choice("cross-entropy", value, f"of guesses at random among {num_tokens} tokens; it falls far below")


def vocabulary_choice(drafter: PreTrainedModel, data: Any) -> list[Choice]:
    """The line of the plan on the tokens that can be drafted, where those are a short list."""
    ids = getattr(unwrap_peft_model(drafter), "draft_token_ids", None)
    if ids is None:
        return []

    counts = said_in(data, drafter.config.vocab_size)
    share = counts[ids.cpu()].sum() / counts.sum()
    value = f"{len(ids)} of {len(counts)} tokens"
    return [Choice("draft vocabulary", value, f"the most frequent ones, {share:.1%} of what the answers say")]


def drafter_choice(drafter: PreTrainedModel) -> Choice:
    """The line of the plan on the drafter."""
    bare = unwrap_peft_model(drafter)
    name = type(bare).__name__ if bare is drafter else f"{type(bare).__name__} with an adapter"
    num_trained = drafter.num_parameters(only_trainable=True)
    reason = f"{drafter.num_parameters() / 1e6:.2f} M weights, of which {num_trained / 1e6:.2f} M are trained"
    return Choice("drafter", name, reason)


def costs(objective: Objective, drafter: PreTrainedModel, lengths: Sequence[int]) -> list[Choice]:
    """The lines of a dry run on memory and disk, by arithmetic; rows have these `lengths` in tokens."""
    target = sum(weight.nbytes for weight in objective.features.target.parameters())
    trained = BYTES_PER_TRAINED_WEIGHT * drafter.num_parameters(only_trainable=True)
    rows = objective.args.per_device_train_batch_size * bytes_of_row(objective, max(lengths))
    parts = f"{_gigabytes(target)} the target, {_gigabytes(trained)} what is trained, {_gigabytes(rows)} a batch"
    on_disk = _gigabytes(bytes_per_token(objective.features) * sum(lengths))
    return [
        Choice("memory", f"about {_gigabytes(target + trained + rows)}", parts),
        Choice("features", f"{on_disk} on disk", "with `--cache_features`"),
    ]


def print_masks(data: ConversationDataset, tokenizer: PreTrainedTokenizerBase, num_examples: int) -> None:
    """Print the first examples with what counts in the loss in `⟦ ⟧`, and totals of what was encoded."""
    for number in range(min(num_examples, len(data))):
        example = data[number]
        ids, mask = example["input_ids"], example["assistant_mask"]
        print(f"{data.origins[number]}: {len(ids)} tokens, {sum(mask)} count")
        for is_counted, run in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]):
            words = _printable(str(tokenizer.decode([token for token, _ in run])))
            print(f"⟦{words}⟧" if is_counted else words, end="")

        print("\n")

    print("⟦counts in the loss⟧  is read, but not learned")
    print(f"{data.coverage}.")


def summary(
    curve: Sequence[Mapping[str, Any]], drafter: Any, names: Mapping[str, str], seconds: float, why_not: str
) -> str:
    """What was learned, what is accepted of it, where it lies, and what to do next.

    `names` are those of the `target` and of the `folder`; `why_not` says why nothing was evaluated.
    """
    losses = [row["loss"] for row in curve if "loss" in row]
    learned = f"loss {losses[0]:.3g} -> {losses[-1]:.3g}" if losses else "no loss was logged"
    lines = [f"Trained for {seconds:.0f} s: {learned}."]

    last: Mapping[str, Any] = next((row for row in reversed(curve) if "eval_loss" in row), {})
    shares = [f"{value:.2f}" for name, value in last.items() if name.startswith("eval_accuracy_at_")]
    if shares:
        lines.append(f"On held-out text its best token is the target's, by position of the block: {' '.join(shares)}.")
    if "eval_acceptance_length" in last:
        lines.append(f"A step writes {last['eval_acceptance_length']:.2f} tokens on held-out prompts.")
    if not last:
        lines.append(f"Nothing was evaluated: {why_not}.")

    lines.append(f"The drafter lies in `{names['folder']}`. Next:")
    if isinstance(unwrap_peft_model(drafter), DrafterModel):
        pair = f"--target {names['target']} --drafter {names['folder']}"
        lines += [f'  falcon-spec generate {pair} --prompt "..." --compare', f"  falcon-spec doctor {pair}"]
    else:
        lines.append(f"  target.generate(..., assistant_model=...from_pretrained({names['folder']!r}))")

    return "\n".join(lines)


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"


def _printable(text: str) -> str:
    """A text whose characters do not control the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)
