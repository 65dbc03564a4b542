"""`falcon-spec generate`: stream text from a target with a drafter; `--compare` also runs the target alone."""

from contextlib import nullcontext
from dataclasses import replace

from rich.console import Console
from transformers import TextStreamer

from ..core.stats import GenerationStats
from ..evaluation.methods import repetition_rate
from ..evaluation.parity import GenerateCall, ParityCheck
from ..evaluation.prompts import Prompt, read_prompts
from ..evaluation.steps import StepLog, step_text
from ..generation.output import observe_steps
from ..training.conversations import check_whole
from .loading import load_drafter
from .options import GenerateCommand

WARM_UP_TOKENS = 8


def run(command: GenerateCommand) -> None:
    """Write the text of each prompt; compare or show trees if asked."""
    check_whole(command.prompt)
    target, tokenizer = command.load_target()
    kwargs = command.template_kwargs
    drafter = load_drafter(command.drafter, target, tokenizer, command.draft_tree, command.capture, kwargs)
    prompts = [Prompt("command", str(i), (("user", text),), "", kwargs) for i, text in enumerate(command.prompt)]
    prompts += read_prompts(command.prompts, command.limit, kwargs)
    console = Console(markup=False, highlight=False)
    if command.compare:
        check = ParityCheck(target, tokenizer, drafter, command.max_new_tokens, command.seed)
        _compare(check, command, prompts, console)
        return

    streamer = None if command.show_tree else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    for prompt in prompts:
        console.rule(prompt.title)
        input_ids = prompt.input_ids(tokenizer)
        call = GenerateCall(target, input_ids, command.max_new_tokens, command.options, command.seed)
        log = StepLog(tokenizer)
        with observe_steps(log) if command.show_tree else nullcontext():
            done = call.run(drafter, streamer=streamer)

        if command.show_tree:
            for number, step in enumerate(log.steps, start=1):
                console.print(step_text(number, step))

            console.print(tokenizer.decode(done.new_ids, skip_special_tokens=True))


def _compare(check: ParityCheck, command: GenerateCommand, prompts: list[Prompt], console: Console) -> None:
    """Run the target alone and with the drafter on each prompt, and print times, acceptance and differences."""
    replace(check, max_new_tokens=WARM_UP_TOKENS).run(prompts[0], command.options)
    stats, seconds_alone, seconds = GenerationStats(), 0.0, 0.0
    verdicts: list[str] = []
    speedups: list[float] = []
    for prompt in prompts:
        plain, drafted, result = check.compare(prompt, command.options)
        own = drafted.output.speculation
        plain_seconds = plain.seconds * len(drafted.new_ids) / len(plain.new_ids)
        verdicts.append(result.verdict)
        speedups.append(plain_seconds / drafted.seconds)
        stats += own
        seconds_alone += plain_seconds
        seconds += drafted.seconds
        console.rule(prompt.title)
        console.print(check.tokenizer.decode(drafted.new_ids, skip_special_tokens=True))
        shown = f"[{result.verdict}; {speedups[-1]:.2f}x; acceptance length {own.acceptance_length:.2f}; "
        console.print(f"{shown}{repetition_rate(drafted.new_ids):.0%} repeated]", style="dim")

    console.rule("target alone and with the drafter")
    console.print(f"alone: {seconds_alone:.2f} s, {stats.num_tokens / seconds_alone:.1f} tokens a second")
    console.print(f"with the drafter: {stats}")
    console.print(_conclusion(verdicts, seconds_alone / seconds, speedups), soft_wrap=True)


def _conclusion(verdicts: list[str], speedup: float, speedups: list[float]) -> str:
    """Summarise the comparison in one line."""
    differ, ties = verdicts.count("bug"), verdicts.count("tie")
    text = f"The texts are identical on all {len(verdicts)} prompts"
    if differ:
        text = f"The texts DIFFER on {differ} of {len(verdicts)} prompts (`falcon-spec parity` finds out why)"
    elif ties:
        text = f"The texts are identical but for {ties} proven ties in {len(verdicts)} prompts"

    spread = f" ({min(speedups):.2f} to {max(speedups):.2f} by prompt)" if len(speedups) > 1 else ""
    return f"{text}; with the drafter the target writes {speedup:.2f} times as fast{spread}."
