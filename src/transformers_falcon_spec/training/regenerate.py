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
    options = options or RegenerateOptions()
    batches = _batches(tokenizer, rows, options)
    settings = {**asdict(options), "num_rows": len(rows), "target": portable(target.name_or_path)}
    progress = _Progress.start(Path(output), settings)
    with progress.output.open("r+", encoding="utf-8", newline="\n") as file:
        file.seek(progress.num_bytes)
        file.truncate()
        for batch in tqdm(batches[progress.num_batches :], desc="regenerate", unit="batch"):
            answered = _answer_batch(
                target, tokenizer, [rows[index] for index in batch], options, progress.num_batches
            )
            kept = [{"row": index, "messages": new} for index, new in zip(batch, answered, strict=True) if new]
            file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))
            file.flush()
            progress.save(num_bytes=file.tell(), num_rows=len(kept))
    return progress.num_written


@dataclass
class _Progress:
    """The progress of a run, stored next to its file, so that it can continue after its last complete batch."""

    output: Path
    options: dict[str, Any]
    num_batches: int = 0
    num_bytes: int = 0
    num_written: int = 0

    @classmethod
    def start(cls, output: Path, options: dict[str, Any]) -> "_Progress":
        """Read the progress stored next to `output`, or start anew."""
        progress = cls(output, options)
        output.parent.mkdir(parents=True, exist_ok=True)
        if progress.path.is_file():
            stored = json.loads(progress.path.read_text(encoding="utf-8"))
            if portable(stored["options"]) != options:
                raise OptionError(
                    f"`{output}` was begun with {stored['options']}, but the options now are {options}. "
                    "Go on with the old options, or write to another file."
                )
            progress = cls(output, **stored)
            logger.info("%s: going on after %d batches.", output, progress.num_batches)
        elif output.exists():
            raise OptionError(
                f"`{output}` exists but was not begun by `regenerate`. Delete it or write to another file."
            )
        progress._write()  # before the file itself, so that a file without progress is not ours
        output.touch()
        return progress

    @property
    def path(self) -> Path:
        return self.output.with_name(self.output.name + ".progress.json")

    def save(self, num_bytes: int, num_rows: int) -> None:
        """Record that one more batch is in the file."""
        self.num_batches, self.num_bytes = self.num_batches + 1, num_bytes
        self.num_written += num_rows
        self._write()

    def _write(self) -> None:
        state = {key: value for key, value in vars(self).items() if key != "output"}
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text(json.dumps(state), encoding="utf-8")
        fresh.replace(self.path)


def _batches(
    tokenizer: PreTrainedTokenizerBase, rows: list[list[Message]], options: RegenerateOptions
) -> list[list[int]]:
    """Indices of rows in batches of similar prompt length, without rows that are too long."""
    lengths = {index: len(_prompt_ids(tokenizer, _opening(row))) for index, row in enumerate(rows)}
    usable = [index for index, length in lengths.items() if 0 < length <= options.max_prompt_tokens]
    if len(usable) < len(rows):
        num_left_out = len(rows) - len(usable)
        logger.warning("%d prompts exceed `max_prompt_tokens` or do not fit the template: left out.", num_left_out)
    window = SORT_WINDOW * options.batch_size
    ordered = [
        index
        for start in range(0, len(usable), window)
        for index in sorted(usable[start : start + window], key=lengths.__getitem__)
    ]
    return [ordered[start : start + options.batch_size] for start in range(0, len(ordered), options.batch_size)]


def _opening(row: list[Message]) -> list[Message]:
    """The messages before the first assistant turn."""
    first = next(index for index, message in enumerate(row) if message["role"] == "assistant")
    return row[:first]


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
    pending = {index: list(row) for index, row in enumerate(rows)}  # the messages that are left, by index in the batch
    for turn in range(max(len(row) for row in rows)):
        prompts = {}
        for index, rest in list(pending.items()):
            while rest and rest[0]["role"] != "assistant":
                answered[index].append(rest.pop(0))
            prompt = _prompt_ids(tokenizer, answered[index]) if rest else []
            if 0 < len(prompt) <= options.max_prompt_tokens:
                prompts[index] = prompt
                rest.pop(0)
            else:
                del pending[index]
        if not prompts:
            break
        texts = _generate(target, tokenizer, list(prompts.values()), options, seed=options.seed + 1000 * number + turn)
        for index, (text, is_complete) in zip(prompts, texts, strict=True):
            answered[index].append({"role": "assistant", "content": text})
            if not is_complete:
                del pending[index]
    return [_until_last_answer(messages) for messages in answered]


def _until_last_answer(messages: list[Message]) -> list[Message]:
    """The messages up to the last answer."""
    while messages and messages[-1]["role"] != "assistant":
        messages = messages[:-1]
    return messages


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
