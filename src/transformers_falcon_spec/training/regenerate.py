"""Replacing the answers of training data by the target's own, so that a drafter learns the text that it will draft.

A file of conversations goes in; the same conversations with the target's answers come out. Runs are batched and can be
resumed.
"""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from jinja2 import TemplateError
from torch.nn import functional
from tqdm.auto import tqdm
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import OptionError
from ..provenance import portable
from .conversations import Message

logger = logging.getLogger(__name__)

SORT_WINDOW = 64  # batches whose rows are sorted by length together, for less padding
STRETCH = 16  # tokens after which finished rows leave their batch


@dataclass(frozen=True)
class RegenerateOptions:
    """How answers are generated. The same options and rows give the same file, even if the run is interrupted."""

    max_new_tokens: int = 256
    max_prompt_tokens: int = 512
    batch_size: int = 32
    temperature: float = 0.7  # 0 is greedy
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_prompt_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise OptionError(f"`{name}` must be at least 1, but it is {getattr(self, name)}.")
        if self.temperature < 0:
            raise OptionError(f"`temperature` must be 0 (greedy) or more, but it is {self.temperature}.")


def regenerate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[list[Message]],
    output: str | Path,
    options: RegenerateOptions | None = None,
) -> int:
    """Write conversations to a file, with every assistant turn replaced by an answer of the target.

    A second call with the same arguments continues where the first stopped. Rows with a prompt longer than
    `max_prompt_tokens` are left out, and a conversation ends at an answer that reaches `max_new_tokens`.

    Args:
        target ([`~transformers.PreTrainedModel`]): The model that answers.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer, with a chat template.
        rows (`list[list[dict]]`): Conversations as `read_conversations` returns them.
        output (`str` or `Path`): The JSON lines file to write or continue.
        options ([`RegenerateOptions`], *optional*): How answers are generated.

    Returns:
        `int`: the number of conversations in the file.
    """
    options, output = options or RegenerateOptions(), Path(output)
    batches = _batches(tokenizer, rows, options)
    progress_file = output.with_name(output.name + ".progress.json")
    settings = {**asdict(options), "num_rows": len(rows), "target": portable(target.name_or_path)}
    progress = _begin(output, progress_file, settings)
    with output.open("r+", encoding="utf-8", newline="\n") as file:
        file.seek(progress["num_bytes"])
        file.truncate()
        for number in tqdm(range(progress["num_batches"], len(batches)), desc="regenerate", unit="batch"):
            answered = _answer_batch(target, tokenizer, [rows[index] for index in batches[number]], options, number)
            kept = [{"row": row, "messages": new} for row, new in zip(batches[number], answered, strict=True) if new]
            file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))
            file.flush()
            num_written = progress["num_written"] + len(kept)
            progress |= {"num_batches": number + 1, "num_bytes": file.tell(), "num_written": num_written}
            _write(progress, progress_file)
    return progress["num_written"]


def _begin(output: Path, progress_file: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Read how far an earlier run came, which is stored next to its file, or start anew."""
    progress = {"options": options, "num_batches": 0, "num_bytes": 0, "num_written": 0}
    output.parent.mkdir(parents=True, exist_ok=True)
    if progress_file.is_file():
        progress = json.loads(progress_file.read_text(encoding="utf-8"))
        if portable(progress["options"]) != options:
            raise OptionError(
                f"`{output}` was begun with {progress['options']}, but the options now are {options}. "
                "Go on with the old options, or write to another file."
            )
        logger.info("%s: going on after %d batches.", output, progress["num_batches"])
    elif output.exists():
        raise OptionError(f"`{output}` exists but was not begun by `regenerate`. Delete it or write to another file.")
    _write(progress, progress_file)  # before the file itself, so that a file without progress is not ours
    output.touch()
    return progress


def _write(progress: dict[str, Any], progress_file: Path) -> None:
    fresh = progress_file.with_suffix(".tmp")
    fresh.write_text(json.dumps(progress), encoding="utf-8")
    fresh.replace(progress_file)


def _batches(
    tokenizer: PreTrainedTokenizerBase, rows: list[list[Message]], options: RegenerateOptions
) -> list[list[int]]:
    """Indices of rows in batches of similar prompt length, without rows that are too long."""
    lengths = {index: len(_prompt_ids(tokenizer, _openings(row)[0])) for index, row in enumerate(rows)}
    usable = [index for index, length in lengths.items() if 0 < length <= options.max_prompt_tokens]
    if len(usable) < len(rows):
        num_left_out = len(rows) - len(usable)
        logger.warning("%d prompts exceed `max_prompt_tokens` or do not fit the template: left out.", num_left_out)
    ordered: list[int] = []
    for part in _parts(usable, SORT_WINDOW * options.batch_size):
        ordered += sorted(part, key=lengths.__getitem__)
    return _parts(ordered, options.batch_size)


def _parts(values: list[int], size: int) -> list[list[int]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _openings(row: list[Message]) -> list[list[Message]]:
    """For each assistant turn the messages since the one before."""
    openings: list[list[Message]] = [[]]
    for message in row:
        if message["role"] == "assistant":
            openings.append([])
        else:
            openings[-1].append(message)
    return openings[:-1]


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    """The token ids of a prompt; none if the chat template refuses it."""
    try:
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    except TemplateError:
        return []
    return cast(BatchEncoding, encoded)["input_ids"]


def _answer_batch(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[list[Message]],
    options: RegenerateOptions,
    number: int,
) -> list[list[Message]]:
    """Answer the assistant turns of each conversation in order; a conversation without any answer becomes empty."""
    answered: list[list[Message]] = [[] for _ in rows]
    openings = [_openings(row) for row in rows]
    unfinished = list(range(len(rows)))
    for turn in range(max(map(len, openings))):
        prompts = {}
        for index in unfinished:
            if turn < len(openings[index]):
                prompt = _prompt_ids(tokenizer, answered[index] + openings[index][turn])
                if 0 < len(prompt) <= options.max_prompt_tokens:
                    prompts[index] = prompt
        if not prompts:
            break
        texts = _generate(target, tokenizer, list(prompts.values()), options, seed=options.seed + 1000 * number + turn)
        for index, (text, _) in zip(prompts, texts, strict=True):
            answered[index] += [*openings[index][turn], {"role": "assistant", "content": text}]
        unfinished = [index for index, (_, is_complete) in zip(prompts, texts, strict=True) if is_complete]
    return answered


@torch.inference_mode()
def _generate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    options: RegenerateOptions,
    seed: int,
) -> list[tuple[str, bool]]:
    """Generate an answer to each prompt; returns its text and whether it ended before `max_new_tokens`.

    Tokens are generated in stretches, and finished rows leave the batch after each of them.
    """
    inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(target.device)
    ids, mask, cache = inputs["input_ids"], inputs["attention_mask"], None
    sampling = {"do_sample": True, "temperature": options.temperature} if options.temperature else {"do_sample": False}
    stops = target.generation_config.eos_token_id
    stop_ids = set(stops if isinstance(stops, list) else [stops])
    answers: list[list[int]] = [[] for _ in prompts]
    unfinished = list(range(len(prompts)))
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # `generate` draws from the global stream, which is restored afterwards
        for start in range(0, options.max_new_tokens, STRETCH):
            output = target.generate(  # type: ignore[operator]  # `PreTrainedModel` does not declare it
                input_ids=ids,
                attention_mask=mask,
                past_key_values=cache,
                **sampling,
                max_new_tokens=min(STRETCH, options.max_new_tokens - start),
                top_k=0,
                return_dict_in_generate=True,
            )
            written = output.sequences[:, ids.shape[1] :].tolist()
            for index, row in zip(unfinished, written, strict=True):
                answers[index] += _until_stop(row, stop_ids)
            kept = [number for number, row in enumerate(written) if not stop_ids & set(row)]
            unfinished = [unfinished[number] for number in kept]
            if not unfinished:
                break
            ids, cache = output.sequences[kept], output.past_key_values
            mask = functional.pad(mask[kept], (0, len(written[0])), value=1)
            if cache is not None:  # a target without a cache reads the whole text again
                cache.reorder_cache(torch.tensor(kept, device=target.device))
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return [(text, index not in unfinished) for index, text in enumerate(texts)]


def _until_stop(ids: list[int], stop_ids: set[int | None]) -> list[int]:
    """The ids up to the first stop token, which is included; padding follows it."""
    end = next((number for number, token in enumerate(ids, start=1) if token in stop_ids), None)
    return ids[:end]
