"""`falcon-spec parity`: check on prompt files that the text with the drafter is the target's own.

For each prompt and decoding the target writes a text alone and one with the drafter, from the same seed. Results are
written as JSON and HTML. Two texts are
  identical  if they have the same tokens;
  a tie      if at the first difference nothing but the target's logits differs, they differ by rounding alone, and
             the best two tokens are at most 4 times that difference apart: reading a tree adds the same numbers in
             another order;
  a bug      otherwise.
The exit status is 0 if no bug was found, else 1. An interrupted check continues where it stopped.

Example, on the embedded pair:
  falcon-spec parity --target models/reference-target --drafter models/falcon-reference --dtype bfloat16
                     --prompts benchmarks/prompts/gsm8k.jsonl --limit 10 --output parity.json
"""

from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from transformers import logging

from ..errors import ParityError
from ..evaluation.decoding import decoding_options
from ..evaluation.pages import interval, percent, quoted, render
from ..evaluation.parity import LOW_PRECISION, ParityCheck, Result, report_of
from ..evaluation.prompts import Prompt
from ..evaluation.records import Records
from ..provenance import weights_fingerprint
from .loading import load_drafter
from .options import DraftingOptions, PairOptions, ResultOptions, TextOptions, option


@dataclass(kw_only=True)
class ParityCommand(PairOptions, TextOptions, DraftingOptions, ResultOptions):
    """The decodings to check, and what is done at differences."""

    html: str | None = option("HTML page to write; None uses the name of the JSON file with .html.", None)
    decodings: list[str] = option("Names of decodings; docs/options.md lists them.", ["greedy"])
    tune: bool = option(
        "Let the tuner choose how much each step drafts, as `generate` does by default. Without it every step drafts.",
        False,
    )
    reread_in_float32: bool = option(
        "For a bfloat16 or float16 target: at a difference a float32 copy, which takes 4 bytes a parameter beside the "
        "target's 2, reads the text again and says which token it prefers, and how far off both readings are.",
        True,
    )


def run(command: ParityCommand) -> None:
    """Check every prompt with every decoding, write the results, and print the differences."""
    logging.set_verbosity_error()
    options = {name: decoding_options(name) for name in command.decodings}
    prompts = command.read_prompts("check")
    target, tokenizer = command.load_target()
    drafter = load_drafter(command.drafter, target, draft_tree=command.draft_tree, step=command.step)
    drafter.generation_config.tune = command.tune
    if target.dtype in LOW_PRECISION:
        what = "differences are NOT read again in float32."
        if command.reread_in_float32:
            what = (
                "at a difference a float32 copy of it reads the text again. `--no_reread_in_float32` leaves that out."
            )
        print(f"The target computes in {target.dtype}: {what}")

    shared = ("max_new_tokens", "seed", "tune", "step", "reread_in_float32")
    settings = command.settings(target, drafter, *shared, draft=drafter.draft_settings)
    records = Records(command.records_file, settings)
    check = ParityCheck(target, tokenizer, drafter, command.max_new_tokens, command.seed, command.reread_in_float32)
    texts = {(name, p.set_name, p.prompt_id): (name, p) for name in options for p in prompts}

    def compared(text: tuple[str, Prompt]) -> Result:
        return asdict(check.run(text[1], options[text[0]], text[0]))

    results = records.measured(texts, compared, itemgetter("decoding", "set_name", "prompt_id"), "parity")
    report = report_of(results, list(options), command.origin(target, drafter_weights=weights_fingerprint(drafter)))
    page = Path(command.html or command.records_file.with_suffix(".html"))
    command.write(report)
    page.write_text(render("parity.html", report), encoding="utf-8")
    _show(report, page)


def _show(report: dict[str, Any], page: Path) -> None:
    """Print the counts and each difference; raise an error that names the first bug."""
    for row in report["rows"]:
        shares = row["shares"]
        found = [
            f"{row[verdict]} {word} ({percent(shares[verdict]['share'])}, {interval(shares[verdict]['interval'])})"
            for verdict, word in (("identical", "identical"), ("tie", "ties"), ("bug", "bugs"))
        ]
        print(f"{row['decoding']}: {', '.join(found)}; 95 % intervals")
    differences = [difference for row in report["rows"] for difference in row["differences"]]
    for result in differences:
        print(f"{result['verdict']}: {_describe(result)}: {result['difference']['reason']}")
    print(f"{page} shows the report.")
    bugs = [result for result in differences if result["verdict"] == "bug"]
    if bugs:
        raise ParityError(
            f"The text with the drafter must be the target's own, but {len(bugs)} texts differ. The first bug: "
            f"{_describe(bugs[0])}. {bugs[0]['difference']['reason']} `{page}` shows all of them."
        )


def _describe(result: dict[str, Any]) -> str:
    """Describe where two texts differ, and by which tokens."""
    texts = [result["difference"][text] for text in ("plain", "drafted")]
    tokens = [
        "the end" if each["token_id"] is None else f"{quoted(each['token'])} ({each['token_id']})" for each in texts
    ]
    return (
        f"{result['decoding']}, {result['set_name']} {result['prompt_id']}, new token {result['first_difference']}: "
        f"{tokens[0]} alone, {tokens[1]} with the drafter"
    )
