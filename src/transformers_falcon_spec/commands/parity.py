"""`falcon-spec parity`: check over prompt files that the text with the drafter is the target's own; JSON out."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tqdm.auto import tqdm
from transformers import logging

from ..evaluation.decoding import decoding_options
from ..evaluation.parity import ParityResult, check_parity
from ..evaluation.prompts import read_prompts
from ..evaluation.records import Records
from ..provenance import provenance, weights_fingerprint
from .loading import load_drafter, load_target


@dataclass
class ParityCommand:
    """What to check and where to write it."""

    target: str = field(metadata={"help": "Folder or Hub name of the target."})
    drafter: str = field(metadata={"help": "Folder or Hub name of the drafter."})
    prompts: list[str] = field(metadata={"help": "JSON lines files of prompts."})
    output: str = field(metadata={"help": "JSON file to write; an interrupted check goes on from it."})
    decodings: list[str] = field(default_factory=lambda: ["greedy"], metadata={"help": "Names of decodings."})
    max_new_tokens: int = field(default=128, metadata={"help": "Most tokens of a text."})
    limit: int | None = field(default=None, metadata={"help": "Use this many prompts of each file only."})
    seed: int = field(default=0, metadata={"help": "Both arms start from it."})
    dtype: str = field(default="float32", metadata={"help": "auto, float32, bfloat16 or float16."})
    device: str = field(default="cpu", metadata={"help": "cpu, cuda, or auto to spread over devices."})


def run(command: ParityCommand) -> None:
    """Check every prompt under every decoding, and say what was found."""
    logging.set_verbosity_error()
    target, tokenizer = load_target(command.target, command.dtype, command.device)
    drafter = load_drafter(command.drafter, target)
    prompts = read_prompts(command.prompts, command.limit)
    settings = {
        "target": weights_fingerprint(target),
        "drafter": [weights_fingerprint(drafter), drafter.stored_tree],
        "max_new_tokens": command.max_new_tokens,
        "seed": command.seed,
    }
    records = Records(Path(command.output).with_suffix(".jsonl"), settings)
    results = [ParityResult(**entry) for entry in records.entries]
    done = {(result.decoding, result.set_name, result.prompt_id) for result in results}
    todo = [(d, p) for d in command.decodings for p in prompts if (d, p.set_name, p.prompt_id) not in done]
    for name, prompt in tqdm(todo, desc="parity", unit="prompt"):
        options = decoding_options(name)
        result = check_parity(target, tokenizer, drafter, prompt, options, command.max_new_tokens, command.seed)
        results.append(replace(result, decoding=name))
        records.append(asdict(results[-1]))
    rows = [{"decoding": name, **_totals([r for r in results if r.decoding == name])} for name in command.decodings]
    text = json.dumps({"provenance": provenance(**vars(command)), "rows": rows}, indent=1)
    Path(command.output).write_text(text + "\n", encoding="utf-8")
    for row in rows:
        print(f"{row['decoding']}: {row['identical']} identical, {row['tie']} ties, {row['different']} different")


def _totals(results: list[ParityResult]) -> dict[str, object]:
    counts = Counter(result.verdict for result in results)
    verdicts = {verdict: counts[verdict] for verdict in ("identical", "tie", "different")}
    by_set = Counter(f"{result.set_name}: {result.verdict}" for result in results)
    differences = [asdict(result) for result in results if result.verdict != "identical"]
    tokens = sum(result.num_tokens for result in results)
    return {
        **verdicts,
        "num_prompts": len(results),
        "num_tokens": tokens,
        "by_set": by_set,
        "differences": differences,
    }
