"""How acceptance holds when a text outgrows those that a drafter learned from, with and without a sliding window.

Command: python -m benchmarks.long_texts --drafters embedded=models/falcon-reference NAME=FOLDER ...
Hardware and time: one CPU core, about a minute and a half for each text with four drafters; resumes. Long conversations are made of held-out prompts
and of the target's own answers, drawn at temperature 0.7. The target reads each once, within its own context and, for longer texts, with
rotary positions scaled by YaRN (arXiv 2309.00071). Then every drafter drafts its way through the same answers: a step writes the
tokens of the draft that the text has, and one more. Nothing is timed, so that a busy machine changes nothing.
Writes `benchmarks/results/long_texts.json`, which `python -m benchmarks.report` renders into docs/results.md.
"""

import argparse
import copy
import json
import random
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, logging

from benchmarks.batches import padded, texts
from benchmarks.report import Report, Result, distinct, source_line, table, total, where
from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.drafters.base import DrafterModel
from transformers_falcon_spec.evaluation.prompts import Prompt, read_prompts
from transformers_falcon_spec.evaluation.summary import bootstrap
from transformers_falcon_spec.generation.drafting import Committed, Draft, DraftBudget
from transformers_falcon_spec.generation.target import Target
from transformers_falcon_spec.provenance import provenance
from transformers_falcon_spec.records import Records

HERE = Path(__file__).parent
MULTIPLES = (0.5, 1, 2, 4, 8)  # of the trained length, up to which a bin of positions reaches
WHOLE = "whole text"
Turn = dict[str, Any]  # an answer: where it starts, its tokens, and the steps of each way to draft


@dataclass(frozen=True)
class LongText:
    """One conversation, and which of its tokens are the assistant's."""

    ids: Tensor  # [1, tokens]
    is_answer: list[bool]


def answered(target: PreTrainedModel, tokenizer: Any, prompts: list[Prompt], seed: int) -> list[tuple[str, str]]:
    """Prompts in random order, each with the target's own answer, drawn in batches of twenty."""
    torch.manual_seed(seed)
    prompts, found = random.Random(seed).sample(prompts, len(prompts)), list[str]()
    for start in range(0, len(prompts), 20):
        asked = [prompt.input_ids(tokenizer) for prompt in prompts[start : start + 20]]
        ids, mask = padded(asked, tokenizer.pad_token_id)
        drawn = target.generate(ids, attention_mask=mask, do_sample=True, temperature=0.7, max_new_tokens=192)
        found += tokenizer.batch_decode(texts(drawn, ids.shape[1], [tokenizer.eos_token_id]), skip_special_tokens=True)

    return [(prompt.text, reply) for prompt, reply in zip(prompts, found, strict=True)]


def conversation(tokenizer: Any, turns: list[tuple[str, str]], length: int) -> LongText:
    """As many of the turns as make `length` tokens."""
    roles = [dict(zip(("user", "assistant"), turn, strict=True)) for turn in turns]
    messages = [{"role": role, "content": content} for turn in roles for role, content in turn.items()]
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    marks = [bool(mark) for mark in encoded["assistant_masks"][:length]]
    assert len(marks) == length  # else there are too few prompts
    return LongText(torch.tensor([encoded["input_ids"][:length]]), marks)


def scaled(name: str, length: int) -> PreTrainedModel:
    """The target with a context of at least `length` tokens, its rotary positions scaled by YaRN."""
    config = AutoConfig.from_pretrained(name)
    context = config.max_position_embeddings
    factor = float(-(-length // context))
    config.rope_parameters |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}
    config.max_position_embeddings = int(factor * context)
    return AutoModelForCausalLM.from_pretrained(name, config=config, dtype=torch.float32).eval()


def kept(draft: Draft | None, tokens: list[int]) -> int:
    """How many of the coming `tokens` stand in the draft, one below the other."""
    node, num_kept = 0, 0
    children = {} if draft is None else dict(
        zip(zip(draft.parents[0].tolist(), draft.token_ids[0].tolist(), strict=True), range(draft.token_ids.shape[1]), strict=True)
    )  # fmt: skip
    while num_kept < len(tokens) and (node, tokens[num_kept]) in children:
        node, num_kept = children[node, tokens[num_kept]], num_kept + 1
    return num_kept


def steps_of(drafter: DrafterModel, target: PreTrainedModel, text: LongText, features: Tensor) -> list[Turn]:
    """Draft the answers of a text with what the target gave at its tokens; the steps of each answer."""
    view = Target(target, drafter.feature_layers)
    length, ids = text.ids.shape[1], text.ids[0].tolist()
    generator = drafter.candidate_generator(view, length + drafter.max_depth + 1, torch.Generator().manual_seed(0))

    turns: list[Turn] = []
    position = 0  # the first token that is not committed
    while position < length:
        start = text.is_answer.index(True, position) if True in text.is_answer[position:] else length
        end = text.is_answer.index(False, start) if False in text.is_answer[start:] else length
        turn = {"start": start, "num_tokens": end - start, "num_steps": 0}
        new = start - position

        while start < end:
            features_of_new = features[:, max(start - new - 1, 0) : start - 1]
            generator.commit(Committed(text.ids, (start,), (features_of_new.shape[1],), features_of_new))
            depth = min(drafter.max_depth, end - start - 1)  # as `generate` drafts no further than a text goes
            draft = generator.propose(DraftBudget((depth,), drafter.num_nodes)) if depth else None
            new = kept(draft, ids[start:end]) + 1
            start += new
            turn["num_steps"] += 1

        if end < length:  # the newest tokens of the answer, which the next prompt goes on from
            generator.commit(Committed(text.ids, (end,), (new,), features[:, end - new - 1 : end - 1]))
        if turn["num_steps"]:
            turns.append(turn)
        position = end

    return turns


@torch.no_grad()
def replayed(target: PreTrainedModel, text: LongText, ways: dict[str, DrafterModel]) -> dict[str, Any]:
    """The answers of a text, with the steps of each way to draft them and how well the target itself expects them."""
    read = target(text.ids, output_hidden_states=True, use_cache=False)
    log_probs = read.logits[0, :-1].log_softmax(-1).gather(1, text.ids[0, 1:, None])[:, 0]

    found: dict[int, Turn] = {}
    for name, drafter in ways.items():
        features = torch.cat([read.hidden_states[layer] for layer in drafter.feature_layers], dim=-1)
        for turn in steps_of(drafter, target, text, features):
            start, end = turn["start"], turn["start"] + turn["num_tokens"]
            known = {
                "start": start,
                "num_tokens": turn["num_tokens"],
                "nats": -float(log_probs[start - 1 : end - 1].sum()),
            }
            found.setdefault(start, known | {"num_steps": {}})["num_steps"][name] = turn["num_steps"]

    return {"turns": list(found.values())}


def ways_to_draft(drafters: dict[str, DrafterModel], windows: list[int]) -> dict[str, DrafterModel]:
    """Each drafter over the whole text, and with each window."""
    found = {}
    for name, drafter in drafters.items():
        for window in (None, *windows):
            way = copy.copy(drafter)
            way.config = copy.copy(drafter.config)
            way.config.sliding_window = window
            found[f"{name}, {WHOLE if window is None else window}"] = way

    return found


def length_of(turns: list[Turn], way: str) -> float:
    """Tokens that a step writes."""
    num_steps = sum(turn["num_steps"][way] for turn in turns)
    return float(total(turns, "num_tokens") / num_steps)


def rows_of(
    records: list[dict[str, Any]], names: list[str], windows: list[int], edges: list[int]
) -> list[dict[str, Any]]:
    """A row for each reading of the target, drafter, and bin of positions in which answers start."""
    rows = []
    for reading in distinct(records, "reading"):
        bins: list[list[Turn]] = [[] for _ in edges]
        for record in where(records, reading=reading):
            for turn in record["turns"]:
                index = bisect_right(edges, turn["start"] - 1)
                if index < len(edges):
                    bins[index].append(turn)

        for first, edge, inside in zip([0, *edges[:-1]], edges, bins, strict=True):
            if not inside:
                continue
            num_tokens = total(inside, "num_tokens")
            for name in names:
                row = {
                    "reading": reading,
                    "drafter": name,
                    "from": first,
                    "to": edge,
                    "num_turns": len(inside),
                    "num_tokens": num_tokens,
                    "nats": total(inside, "nats") / num_tokens,
                    "whole": length_of(inside, f"{name}, {WHOLE}"),
                }
                for window in windows:
                    row[f"window {window}"] = _beside_whole(inside, name, window)
                rows.append(row)

    return rows


def _beside_whole(turns: list[Turn], name: str, window: int) -> dict[str, Any]:
    def gain(chosen: list[Turn]) -> float:
        return length_of(chosen, f"{name}, {window}") / length_of(chosen, f"{name}, {WHOLE}") - 1

    return {
        "length": length_of(turns, f"{name}, {window}"),
        "gain": gain(turns),
        "interval": bootstrap(turns, gain, 0),
    }


def main() -> None:
    """Replay every text with every drafter and window."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--drafters", nargs="+", default=["embedded=models/falcon-reference"], metavar="NAME=FOLDER")
    parser.add_argument(
        "--trained_length", type=int, default=320, help="tokens that 95 of 100 of their examples keep to"
    )
    parser.add_argument("--windows", type=int, nargs="+", default=[320, 128])
    parser.add_argument("--prompts", default=str(HERE / "prompts" / "held_out.jsonl"))
    parser.add_argument("--limit", type=int, default=4, help="texts")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "long_texts.json")
    args = parser.parse_args()

    logging.set_verbosity_error()
    target, tokenizer = load_target(args.target, "float32", "cpu")
    context = target.config.max_position_embeddings
    edges = [int(each * args.trained_length) for each in MULTIPLES]
    readings = {"own context": (target, min(context, edges[-1]))}
    if edges[-1] > context:
        longer = scaled(args.target, edges[-1])
        readings[f"YaRN, factor {longer.config.rope_parameters['factor']:.0f}"] = (longer, edges[-1])

    drafters = {}
    for each in args.drafters:
        name, folder = each.split("=", 1)
        drafters[name] = load_drafter(folder, target)

    ways = ways_to_draft(drafters, args.windows)

    settings = {name: value for name, value in vars(args).items() if name != "output"}
    records = Records(args.output.with_suffix(".jsonl"), settings)
    places = {f"{number} {reading}": (number, reading) for number in range(args.limit) for reading in readings}
    turns = answered(target, tokenizer, read_prompts([args.prompts]), 0) if len(records.entries) < len(places) else []

    def measure(place: tuple[int, str]) -> dict[str, Any]:
        number, reading = place
        model, length = readings[reading]
        first = len(turns) * number // args.limit
        text = conversation(tokenizer, turns[first:] + turns[:first], edges[-1])
        part = LongText(text.ids[:, :length], text.is_answer[:length])
        return {"text": number, "reading": reading, **replayed(model, part, ways)}

    found = records.measured(places, measure, "read")
    rows = rows_of(found, list(drafters), args.windows, edges)
    origin = provenance(seed=0, context=context, **settings)
    args.output.write_text(json.dumps({"provenance": origin, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(row)


def tables(result: Result, path: str) -> list[str]:
    """Acceptance by position, in the target's own context and with its widest window; the results file has the others."""
    reading = result["rows"][0]["reading"]
    window = result["provenance"]["windows"][0]
    shown = (
        f"{{window {window}/length:.2f}} ({{window {window}/gain:100*+.0f}} %, {{window {window}/interval:100*~+.0f}})"
    )
    columns = {
        "drafter": "{drafter}",
        "answers that start at": "{from} to {to}",
        "whole text": "{whole:.2f}",
        f"window of {window}": shown,
        "target, nats a token": "{nats:.2f}",
    }
    rows = where(result["rows"], reading=reading)
    return [table(columns, rows), source_line(result, path)]


REPORT = Report("docs/results.md#long_texts", ["long_texts.json"], tables)


if __name__ == "__main__":
    main()
