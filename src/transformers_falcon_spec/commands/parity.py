"""`falcon-spec parity`: check on prompt files that the text with the drafter is the target's own."""

import json
from dataclasses import asdict
from typing import Any

from ..errors import ParityError
from ..evaluation.methods import decoding_options
from ..evaluation.parity import ParityCheck, report_of
from ..evaluation.prompts import Prompt
from ..provenance import configs_digest, current_commit, weights_fingerprint
from ..records import Records, texts_of
from .loading import load_drafter
from .options import ParityCommand


def run(command: ParityCommand) -> None:
    """Check every prompt with every decoding, write the results, and print the differences."""
    options = {name: decoding_options(name) for name in command.decodings}
    prompts = command.read_prompts()
    target, tokenizer = command.load_target()
    drafter = load_drafter(command.drafter, target, draft_tree=command.draft_tree, capture=command.capture)
    drafter.generation_config.tune = command.tune
    shared = ("max_new_tokens", "seed", "tune", "capture")
    origin = {"commit": current_commit(), "device": target.device.type, "configs": configs_digest(drafter)}
    settings = command.settings(target, drafter, *shared, draft=drafter.draft_settings, **origin)
    records = Records(command.records_file, settings)
    check = ParityCheck(target, tokenizer, drafter, command.max_new_tokens, command.seed)

    def compared(text: tuple[str, Prompt]) -> dict[str, Any]:
        name, prompt = text
        return asdict(check.run(prompt, options[name], name))

    results = records.measured(texts_of(prompts, options), compared, "parity")
    report = report_of(results, list(options), command.origin(target, drafter_weights=weights_fingerprint(drafter)))
    command.write(report)
    _show(report, command.output)


def _show(report: dict[str, Any], output: str) -> None:
    """Print the counts and each difference; raise an error that names the first bug."""
    differences = []
    for row in report["rows"]:
        found = []
        for verdict, word in (("identical", "identical"), ("tie", "ties"), ("bug", "bugs")):
            low, high = row["shares"][verdict]["interval"]
            share = row["shares"][verdict]["share"]
            found.append(f"{row[verdict]} {word} ({share:.1%}, {low:.1%} to {high:.1%})")

        print(f"{row['decoding']}: {', '.join(found)}; 95 % intervals")
        differences += row["differences"]

    for result in differences:
        print(f"{result['verdict']}: {_describe(result)}: {result['difference']['reason']}")

    bugs = [result for result in differences if result["verdict"] == "bug"]
    if bugs:
        raise ParityError(
            f"The text with the drafter must be the target's own, but {len(bugs)} texts differ. The first bug: "
            f"{_describe(bugs[0])}. {bugs[0]['difference']['reason']} `{output}` holds all of them."
        )


def _describe(result: dict[str, Any]) -> str:
    """Describe where two texts differ, and by which tokens."""
    tokens = []
    for text in ("plain", "drafted"):
        choice = result["difference"][text]
        shown = f"{json.dumps(choice['token'], ensure_ascii=False)} ({choice['token_id']})"
        tokens.append("the end" if choice["token_id"] is None else shown)

    return (
        f"{result['decoding']}, {result['set_name']} {result['prompt_id']}, new token {result['first_difference']}: "
        f"{tokens[0]} alone, {tokens[1]} with the drafter"
    )
