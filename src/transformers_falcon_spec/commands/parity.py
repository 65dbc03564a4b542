"""`falcon-spec parity`: check over prompt files that the text with the drafter is the target's own; JSON and HTML out.

Every prompt is written twice under every decoding, by the target alone and with the drafter, from the same seed. Two texts are
  identical  if they hold the same tokens;
  a tie      if at the first difference nothing but the target's logits differs, they differ by rounding alone, and the best two
             tokens are at most 4 times that difference apart: reading a tree adds the same numbers in another order;
  a bug      otherwise.
The exit status is 0 if no bug was found, else 1. A check that was interrupted goes on where it stopped.

Example, on the embedded pair:
  falcon-spec parity --target models/reference-target --drafter models/falcon-reference --dtype bfloat16
                     --prompts benchmarks/prompts/gsm8k.jsonl --limit 10 --output parity.json
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import logging

from ..errors import OptionError, ParityError
from ..evaluation.decoding import decoding_options
from ..evaluation.parity import LOW_PRECISION, ParityCheck, ParityResult
from ..evaluation.parity_report import interval, percent, quoted, read_result, render_page, report_of
from ..evaluation.prompts import Prompt, read_prompts
from ..evaluation.records import Records
from ..provenance import provenance, weights_fingerprint
from .loading import TREE_HELP, load_drafter, load_target


@dataclass
class ParityCommand:
    """What to check and where to write it."""

    target: str = field(metadata={"help": "Folder or Hub name of the target."})
    drafter: str = field(metadata={"help": "Folder or Hub name of the drafter."})
    prompts: list[str] = field(metadata={"help": "JSON lines files of prompts; each is a set named after its file."})
    output: str = field(
        metadata={
            "help": "JSON file to write; each result goes to the same name with .jsonl, where a later run goes on."
        }
    )
    html: str | None = field(
        default=None, metadata={"help": "HTML page to write; None takes the name of the JSON file, with .html."}
    )
    decodings: list[str] = field(
        default_factory=lambda: ["greedy"], metadata={"help": "Names of decodings; docs/options.md lists them."}
    )
    max_new_tokens: int = field(default=128, metadata={"help": "Most tokens of a text."})
    limit: int | None = field(default=None, metadata={"help": "Use this many prompts of each file only."})
    seed: int = field(default=0, metadata={"help": "Both arms start from it."})
    dtype: str = field(
        default="float32",
        metadata={"help": "auto, float32, bfloat16 or float16: the type in which target and drafter compute."},
    )
    device: str = field(default="cpu", metadata={"help": "cpu, cuda, or auto to spread over devices."})
    draft_tree: str | None = field(default=None, metadata={"help": TREE_HELP})
    tune: bool = field(
        default=False,
        metadata={
            "help": "Let the tuner choose how much each step drafts, as `generate` does by default. Without it every step drafts."
        },
    )
    reread_in_float32: bool = field(
        default=True,
        metadata={
            "help": "For a bfloat16 or float16 target: at a difference a float32 copy of the target reads the text again and "
            "says which token it prefers, and how far off both readings are. The copy is made at the first difference, on the "
            "target's device, and takes 4 bytes a parameter beside the target's 2."
        },
    )


def run(command: ParityCommand) -> None:
    """Check every prompt under every decoding, write what was found, and say it.

    Raises:
        [`ParityError`]: there is a bug.
    """
    logging.set_verbosity_error()
    output, options = Path(command.output), {name: decoding_options(name) for name in command.decodings}
    if output.suffix != ".json":
        raise OptionError(f"`output` must end in `.json`, but it is `{output}`; other files are named after it.")
    prompts = read_prompts(command.prompts, command.limit)
    if not prompts:
        raise OptionError(f"There must be a prompt to check, but {command.prompts} hold none within `limit`.")
    check = _make_check(command)
    records = Records(output.with_suffix(".jsonl"), _settings(command, check))
    results = [read_result(entry, records.path) for entry in records.entries]
    done = {(result.decoding, result.set_name, result.prompt_id) for result in results}
    todo = [(name, p) for name in options for p in prompts if (name, p.set_name, p.prompt_id) not in done]
    for name, prompt in tqdm(todo, desc="parity", unit="prompt"):
        results.append(check.run(prompt, options[name], name))
        records.append(asdict(results[-1]))
    origin = {**vars(command), "dtype": str(check.target.dtype).removeprefix("torch.")}
    report = report_of(_asked(results, list(options), prompts), list(options), provenance(**origin))
    page = Path(command.html) if command.html else output.with_suffix(".html")
    output.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    page.write_text(render_page(report), encoding="utf-8")
    _show(report, page)


def _make_check(command: ParityCommand) -> ParityCheck:
    """The pair, loaded; says whether differences are read again in float32."""
    target, tokenizer = load_target(command.target, command.dtype, command.device)
    drafter = load_drafter(command.drafter, target, draft_tree=command.draft_tree)
    drafter.generation_config.tune = command.tune
    is_low = target.dtype in LOW_PRECISION
    if is_low and command.reread_in_float32:
        print(
            f"The target computes in {target.dtype}: at a difference a float32 copy of it reads the text again. "
            "`--no_reread_in_float32` leaves that out."
        )
    elif is_low:
        print(f"The target computes in {target.dtype}, and differences are NOT read again in float32.")
    return ParityCheck(target, tokenizer, drafter, command.max_new_tokens, command.seed, command.reread_in_float32)


def _settings(command: ParityCommand, check: ParityCheck) -> dict[str, Any]:
    """What all results of a file have in common."""
    settings: dict[str, Any] = {
        "target": weights_fingerprint(check.target),
        "drafter": [weights_fingerprint(check.drafter), check.drafter.draft_settings],
        "max_new_tokens": command.max_new_tokens,
        "seed": command.seed,
    }
    if command.tune:
        settings["tune"] = True
    if check.target.dtype in LOW_PRECISION:
        settings["reread_in_float32"] = command.reread_in_float32
    return settings


def _asked(results: list[ParityResult], decodings: list[str], prompts: list[Prompt]) -> list[ParityResult]:
    """The results that this command asks for; the file may hold more, from a run with a larger `limit`."""
    wanted = {(name, prompt.set_name, prompt.prompt_id) for name in decodings for prompt in prompts}
    return [result for result in results if (result.decoding, result.set_name, result.prompt_id) in wanted]


def _show(report: dict[str, Any], page: Path) -> None:
    """The counts, each difference in a line, and an error that names the first bug."""
    for row in report["rows"]:
        shares = row["shares"]
        found = [
            f"{row[verdict]} {word} ({percent(shares[verdict]['share'])}, {interval(shares[verdict]['interval'])})"
            for verdict, word in (("identical", "identical"), ("tie", "ties"), ("bug", "bugs"))
        ]
        print(f"{row['decoding']}: {', '.join(found)}; 95 % intervals")
    differences = [difference for row in report["rows"] for difference in row["differences"]]
    for result in differences:
        print(f"{result['verdict']}: {_place(result)}: {result['difference']['reason']}")
    print(f"{page} shows the report.")
    bugs = [result for result in differences if result["verdict"] == "bug"]
    if bugs:
        raise ParityError(
            f"The text with the drafter must be the target's own, but {len(bugs)} texts differ. The first bug: "
            f"{_place(bugs[0])}. {bugs[0]['difference']['reason']} `{page}` shows all of them."
        )


def _place(result: dict[str, Any]) -> str:
    """Where a difference is, and the two tokens."""
    arms = [result["difference"][arm] for arm in ("plain", "drafted")]
    tokens = ["the end" if arm["token_id"] is None else f"{quoted(arm['token'])} ({arm['token_id']})" for arm in arms]
    return (
        f"{result['decoding']}, {result['set_name']} {result['prompt_id']}, new token {result['first_difference']}: "
        f"{tokens[0]} alone, {tokens[1]} with the drafter"
    )
