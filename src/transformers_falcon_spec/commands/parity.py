"""`falcon-spec parity`: check on prompt files that the text with the drafter is the target's own."""

from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

from transformers import logging

from ..errors import ParityError
from ..evaluation.methods import decoding_options
from ..evaluation.pages import interval, percent, quoted, render
from ..evaluation.parity import LOW_PRECISION, ParityCheck, Result, report_of
from ..evaluation.prompts import Prompt
from ..evaluation.records import Records
from ..provenance import weights_fingerprint
from .loading import load_drafter
from .options import ParityCommand


def run(command: ParityCommand) -> None:
    """Check every prompt with every decoding, write the results, and print the differences."""
    logging.set_verbosity_error()
    options = {name: decoding_options(name) for name in command.decodings}
    prompts = command.read_prompts()
    target, tokenizer = command.load_target()
    drafter = load_drafter(command.drafter, target, draft_tree=command.draft_tree, capture=command.capture)
    drafter.generation_config.tune = command.tune
    if target.dtype in LOW_PRECISION:
        what = "differences are NOT read again in float32."
        if command.reread_in_float32:
            what = (
                "at a difference a float32 copy of it reads the text again. `--no_reread_in_float32` leaves that out."
            )
        print(f"The target computes in {target.dtype}: {what}")

    shared = ("max_new_tokens", "seed", "tune", "capture", "reread_in_float32")
    settings = command.settings(target, drafter, *shared, draft=drafter.draft_settings)
    records = Records(command.records_file, settings)
    check = ParityCheck(target, tokenizer, drafter, command.max_new_tokens, command.seed, command.reread_in_float32)
    texts = {(name, p.set_name, p.prompt_id): (name, p) for name in options for p in prompts}

    def compared(text: tuple[str, Prompt]) -> Result:
        return asdict(check.run(text[1], options[text[0]], text[0]))

    results = records.measured(texts, compared, itemgetter("decoding", "set_name", "prompt_id"), "parity")
    report = report_of(results, list(options), command.origin(target, drafter_weights=weights_fingerprint(drafter)))
    page = command.records_file.with_suffix(".html")
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
