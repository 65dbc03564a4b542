"""Replacing the answers of training data by the target's own, so that a drafter learns the text that it will draft.

A file of conversations goes in; the same conversations with the target's answers come out. Runs are batched and can be
resumed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import OptionError
from .answer_file import (
    NUM_BEGINNING,
    Answered,
    Reply,
    begin,
    log_cuts,
    log_left_out,
    openings_of,
    prompt_ids,
    settings_of,
    write_progress,
)
from .chat_template import ChatTemplate, Message

SORT_WINDOW = 64  # batches whose rows are sorted by length together, for less padding
STRETCH = 16  # tokens after which finished rows leave their batch
PLAIN_TOKENS, THINKING_TOKENS = 256, 4096  # lengths of answers, without and with a thought before them
LENGTH_HELP = (
    f"Most tokens of an answer; None is {PLAIN_TOKENS}, or {THINKING_TOKENS} where the chat template shows that "
    "answers begin with a thought."
)


@dataclass(frozen=True)
class RegenerateOptions:
    """How answers are generated. The same options and rows give the same file, even if the run is interrupted."""

    max_new_tokens: int | None = field(default=None, metadata={"help": LENGTH_HELP})
    max_prompt_tokens: int = 512
    batch_size: int = 32
    temperature: float = 0.7  # 0 is greedy
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_prompt_tokens", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"`{name}` must be at least 1, but it is {value}.")
        if self.temperature < 0:
            raise OptionError(f"`temperature` must be 0 (greedy) or more, but it is {self.temperature}.")

    def for_template(self, template: ChatTemplate) -> "RegenerateOptions":
        """The options with a length of answers that fits the chat template, unless one was given."""
        fitting = THINKING_TOKENS if template.thinks else PLAIN_TOKENS
        return self if self.max_new_tokens is not None else replace(self, max_new_tokens=fitting)

    @property
    def num_tokens(self) -> int:
        """The most tokens of an answer."""
        return self.max_new_tokens or PLAIN_TOKENS


def regenerate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[list[Message]],
    output: str | Path,
    options: RegenerateOptions | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> int:
    """Write conversations to a file, with every assistant turn replaced by an answer of the target.

    A second call with the same arguments continues where the first stopped. Rows with a prompt longer than
    `max_prompt_tokens` are left out, and a conversation ends at an answer that reaches `max_new_tokens`, or before it
    if that is within a thought. The log says how many were cut.

    Args:
        target ([`~transformers.PreTrainedModel`]): The model that answers.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer, with a chat template.
        rows (`list[list[dict]]`): Conversations as `read_conversations` returns them.
        output (`str` or `Path`): The JSON lines file to write or continue.
        options ([`RegenerateOptions`], *optional*): How answers are generated.
        template_kwargs (`dict`, *optional*): Arguments for the chat template.

    Returns:
        `int`: the number of conversations in the file.

    Raises:
        [`OptionError`]: an option or a file is not as it must be.
    """
    template, output = ChatTemplate(tokenizer, template_kwargs or {}), Path(output)
    if template.hides_thoughts:
        raise OptionError(
            f"Answers of `{target.name_or_path}` part thoughts from words by special tokens, which are not in a text. "
            "Take them from a server that parts them: `--endpoint URL`."
        )
    options = (options or RegenerateOptions()).for_template(template)
    batches = _batches(template, rows, options)
    progress = begin(output, settings_of(options, template, num_rows=len(rows), target=target.name_or_path))
    progress = {"num_batches": 0, "num_bytes": 0, "num_written": 0, "num_without": 0, **progress}
    with output.open("r+", encoding="utf-8", newline="\n") as file:
        file.seek(progress["num_bytes"])
        file.truncate()
        for number in tqdm(range(progress["num_batches"], len(batches)), desc="regenerate", unit="batch"):
            answered = _answer_batch(target, template, [rows[index] for index in batches[number]], options, number)
            kept = [each.line(row) for row, each in zip(batches[number], answered, strict=True) if each.messages]
            file.write("".join(kept))
            file.flush()
            counts = {"num_written": len(kept), "num_without": len(answered) - len(kept)}
            progress |= {name: progress[name] + number for name, number in counts.items()}
            progress |= {"num_batches": number + 1, "num_bytes": file.tell()}
            write_progress(progress, output)
    log_cuts(output, options.num_tokens, progress["num_without"])
    return progress["num_written"]


def _batches(template: ChatTemplate, rows: list[list[Message]], options: RegenerateOptions) -> list[list[int]]:
    """Indices of rows in batches of similar prompt length, without rows that are too long."""
    lengths = {index: len(prompt_ids(template, openings_of(row)[0])) for index, row in enumerate(rows)}
    usable = [index for index, length in lengths.items() if 0 < length <= options.max_prompt_tokens]
    log_left_out(len(rows) - len(usable))
    ordered: list[int] = []
    for part in _parts(usable, SORT_WINDOW * options.batch_size):
        ordered += sorted(part, key=lengths.__getitem__)
    return _parts(ordered, options.batch_size)


def _parts(values: list[int], size: int) -> list[list[int]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _answer_batch(
    target: PreTrainedModel,
    template: ChatTemplate,
    rows: list[list[Message]],
    options: RegenerateOptions,
    number: int,
) -> list[Answered]:
    """Answer the assistant turns of each conversation in order; a conversation may get no answer at all."""
    answered = [Answered() for _ in rows]
    openings = [openings_of(row) for row in rows]
    unfinished = list(range(len(rows)))
    for turn in range(max(map(len, openings))):
        prompts = {}
        for index in unfinished:
            if turn < len(openings[index]):
                prompt = prompt_ids(template, answered[index].messages + openings[index][turn])
                if 0 < len(prompt) <= options.max_prompt_tokens:
                    prompts[index] = prompt
        if not prompts:
            break
        seed = options.seed + 1000 * number + turn
        texts = _generate(target, template.tokenizer, list(prompts.values()), options, seed)
        for index, (text, is_complete) in zip(prompts, texts, strict=True):
            begun = str(template.tokenizer.decode(prompts[index][-NUM_BEGINNING:]))
            answered[index].add(openings[index][turn], Reply(text, is_complete), begun)
        unfinished = [index for index in prompts if not answered[index].is_cut]
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
    sampling: dict[str, Any] = {"do_sample": False}
    if options.temperature:
        sampling = {"do_sample": True, "temperature": options.temperature, "top_k": 0}
    stops = target.generation_config.eos_token_id
    stop_ids = set(stops if isinstance(stops, list) else [stops])
    answers: list[list[int]] = [[] for _ in prompts]
    unfinished = list(range(len(prompts)))
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # `generate` draws from the global stream, which is restored afterwards
        for start in range(0, options.num_tokens, STRETCH):
            output = target.generate(  # type: ignore[operator]  # `PreTrainedModel` does not declare it
                input_ids=ids,
                attention_mask=mask,
                past_key_values=cache,
                **sampling,
                max_new_tokens=min(STRETCH, options.num_tokens - start),
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
