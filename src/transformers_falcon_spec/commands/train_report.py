"""What `falcon-spec train` says: the plan before it starts, and what came of it at the end."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel
from transformers.trainer_utils import unwrap_peft_model

from ..drafters.base import DrafterModel
from ..training.run_plan import Choice


def print_plan(choices: Sequence[Choice]) -> None:
    """Print the plan as a table."""
    table = Table(title="The plan", title_justify="left", show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")  # names of folders stay whole
    for choice in choices:
        table.add_row(choice.what, choice.value, choice.reason)
    Console(highlight=False).print(table)


def drafter_choices(drafter: PreTrainedModel, is_fresh: bool) -> list[Choice]:
    """The lines of the plan on the drafter."""
    bare = unwrap_peft_model(drafter)
    config = bare.config.get_text_config()
    num_trained = sum(weight.numel() for weight in drafter.parameters() if weight.requires_grad)
    choices = [Choice("drafter", type(bare).__name__, f"{num_trained / 1e6:.2f} M weights are trained")]
    if not is_fresh:
        return choices
    if isinstance(bare, DrafterModel) and hasattr(config, "hidden_size"):
        reason = "what it drafts goes through the target's head"
        choices.append(Choice("width", str(config.hidden_size), reason))
    if block_size := getattr(config, "block_size", None):
        choices.append(Choice("block", f"{block_size} tokens a pass", "by the recipe, or as asked for"))
    return choices


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
        lines.append(
            f"A step writes {last['eval_acceptance_length']:.2f} tokens on held-out prompts, and text comes "
            f"{last['eval_speedup']:.2f} times as fast as from the target alone, by a few short texts."
        )
    lines += [] if last else [f"Nothing was evaluated: {why_not}."]
    lines.append(f"The drafter lies in `{names['folder']}`. Next:")
    if isinstance(unwrap_peft_model(drafter), DrafterModel):
        pair = f"--target {names['target']} --drafter {names['folder']}"
        lines += [f'  falcon-spec generate {pair} --prompt "..." --compare', f"  falcon-spec doctor {pair}"]
    else:
        lines.append(f"  target.generate(..., assistant_model=...from_pretrained({names['folder']!r}))")
    return "\n".join(lines)
