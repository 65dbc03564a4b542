"""Answers of a target in this process: batches of prompts of like length, from which finished rows leave."""

import copy
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..errors import FalconSpecError, OptionError
from ..provenance import weights_fingerprint
from ..transformers_versions import CACHE
from .answers import Prompt, RefusedPromptError, RegenerateOptions, Reply
from .chat_template import ChatTemplate

logger = logging.getLogger(__name__)

SORT_WINDOW = 64  # batches whose rows are sorted by length together, for less padding
STRETCH = 16  # tokens after which finished rows leave their batch

# What a generation config may ask for, and what holds instead: one text for each prompt, token by token.
ONE_TEXT = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "cache_implementation": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "use_mtp": None,
    "penalty_alpha": None,
    "dola_layers": None,
}
# What counts the new tokens, or keeps a state from token to token: such answers are written in one stretch.
FROM_THE_START = (
    "min_new_tokens",
    "max_time",
    "exponential_decay_length_penalty",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "watermarking_config",
    "stop_strings",
)


class TargetAnswerer:
    """Answers as the target writes them.

    Args:
        target ([`~transformers.PreTrainedModel`]): The model that answers.
        template ([`ChatTemplate`]): The chat template of its tokenizer.

    Raises:
        [`OptionError`]: thoughts are parted from answers by special tokens.
    """

    num_at_once = 1

    def __init__(self, target: PreTrainedModel, template: ChatTemplate) -> None:
        if template.hides_thoughts:
            raise OptionError(
                f"Answers of `{target.name_or_path}` part thoughts from words by special tokens, which are not in a "
                "text. Take them from a server that parts them: `--endpoint URL`."
            )
        self.target, self.tokenizer = target, template.tokenizer
        self.num_retried = 0  # batches
        self.config = copy.deepcopy(target.generation_config)
        changed = []
        for name, value in ONE_TEXT.items():
            asked = getattr(self.config, name, None)
            if asked not in (None, value):
                changed.append(f"`{name}` of {asked}")
                setattr(self.config, name, value)
        if changed:
            logger.warning("Each prompt gets one answer, token by token: nothing comes of %s.", ", ".join(changed))

        stops = self.config.eos_token_id
        self.stop_ids = set(stops if isinstance(stops, list) else [stops])
        if self.config.pad_token_id is None:
            known = (self.tokenizer.pad_token_id, *self.stop_ids, 0)
            self.config.pad_token_id = next(token for token in known if token is not None)
        if self.config.stop_strings:
            self.stop_ids.add(self.config.pad_token_id)  # all that shows that a string ended a row
        is_counted = any(getattr(self.config, name, None) for name in FROM_THE_START)
        self.stretch = None if is_counted else STRETCH

    @property
    def settings(self) -> dict[str, Any]:
        """The target, with hashes of its weights and of its generation config."""
        generation = self.target.generation_config.to_json_string(ignore_metadata=True)
        return {
            "target": self.target.name_or_path,
            "weights": weights_fingerprint(self.target),
            "generation_config": hashlib.blake2b(generation.encode(), digest_size=8).hexdigest(),
        }

    def batches(self, lengths: Mapping[int, int], options: RegenerateOptions) -> dict[int, list[int]]:
        """Batches of rows with prompts of like length."""
        rows: list[int] = []
        for window in _parts(list(lengths), SORT_WINDOW * options.batch_size):
            rows += sorted(window, key=lengths.__getitem__)
        return dict(enumerate(_parts(rows, options.batch_size)))

    def answer(
        self, prompts: Sequence[Prompt], options: RegenerateOptions, seed: int
    ) -> Sequence[Reply | FalconSpecError]:
        """The answers to a batch; one for which there is too little memory is read row by row."""
        config = self.target.generation_config
        try:
            self.target.generation_config = self.config
            with torch.random.fork_rng():
                torch.manual_seed(seed)  # `generate` draws from the global stream, which is restored afterwards
                return self._replies(prompts, options)
        finally:
            self.target.generation_config = config

    def close(self) -> None:
        """Nothing runs on."""

    def _replies(self, prompts: Sequence[Prompt], options: RegenerateOptions) -> Sequence[Reply | FalconSpecError]:
        embeddings: Any = self.target.get_input_embeddings()
        num_known = embeddings.weight.shape[0]
        if max(max(prompt.ids) for prompt in prompts) >= num_known:  # a GPU would give up all later work, too
            fault = f"token ids must be below {num_known}, the number of the target's embeddings"
        else:
            try:
                return self._generate(prompts, options)
            except (MemoryError, RuntimeError) as error:
                is_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
                if not is_of_memory and "DefaultCPUAllocator" not in str(error):
                    raise
            fault = "it needs more memory than there is, so lower `max_prompt_tokens` or `max_new_tokens`"

        if len(prompts) == 1:  # outside of the block, for its error keeps what was computed
            return [RefusedPromptError(f"A prompt of {len(prompts[0].ids)} tokens cannot be answered: {fault}.")]
        self.num_retried += 1
        logger.warning(
            "%d prompts cannot be answered at once, so each is answered alone, as in %d batches so far: %s.",
            len(prompts),
            self.num_retried,
            fault,
        )
        return [self._replies([prompt], options)[0] for prompt in prompts]

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[Prompt], options: RegenerateOptions) -> list[Reply]:
        """Generate an answer to each prompt, in stretches; finished rows leave the batch after each of them."""
        target, device = self.target, self.target.device
        rows = [torch.tensor(prompt.ids) for prompt in prompts]
        ids = pad_sequence(rows, True, float(self.config.pad_token_id), "left").to(device)
        mask = pad_sequence([torch.ones_like(row) for row in rows], True, 0, "left").to(device)
        sampling: dict[str, Any] = {"do_sample": False}
        if options.temperature:
            sampling = {"do_sample": True, "temperature": options.temperature, "top_k": 0}

        texts = {"tokenizer": self.tokenizer} if self.config.stop_strings else {}

        answers: list[list[int]] = [[] for _ in prompts]
        unfinished = list(range(len(prompts)))
        stretch, cache = self.stretch or options.num_tokens, None
        for start in range(0, options.num_tokens, stretch):
            output = target.generate(  # type: ignore[operator]  # `PreTrainedModel` does not declare it
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=min(stretch, options.num_tokens - start),
                return_dict_in_generate=True,
                **{CACHE: cache},
                **sampling,
                **texts,
            )
            written = output.sequences[:, ids.shape[1] :].tolist()
            for index, row in zip(unfinished, written, strict=True):
                answers[index] += _until_stop(row, self.stop_ids)

            kept = [number for number, row in enumerate(written) if not self.stop_ids & set(row)]
            unfinished = [unfinished[number] for number in kept]
            if not unfinished:
                break
            ids, cache = output.sequences[kept], getattr(output, CACHE)
            mask = functional.pad(mask[kept], (0, len(written[0])), value=1)
            if cache is not None:  # a target without a cache reads the whole text again
                cache.reorder_cache(torch.tensor(kept, device=device))

        decoded = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return [Reply(text, index not in unfinished) for index, text in enumerate(decoded)]


def _parts(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _until_stop(ids: list[int], stop_ids: set[int | None]) -> list[int]:
    """The ids up to the first stop token, which is included; padding follows it."""
    end = next((number for number, token in enumerate(ids, start=1) if token in stop_ids), None)
    return ids[:end]
