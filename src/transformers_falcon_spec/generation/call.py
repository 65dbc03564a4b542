"""Checks a call of `generate` that has a drafter, and starts the decoding loop for it."""

import logging
from collections.abc import Iterator
from math import ceil
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from ..errors import GenerationError, OptionError
from ..transformers_versions import CACHE, warn_if_untested
from .adapters import row_adapters_gone_on_error
from .drafting import Drafter
from .inputs import text_length
from .loop import SpeculativeDecoding
from .modes import in_eval_mode
from .output import SpeculativeOutput
from .processors import check_memoryless, of_batches
from .sequence_batch import SequenceBatch
from .stock_cache import growing
from .text_limits import check_prompt
from .verifier import Verifier, verifier_of

logger = logging.getLogger(__name__)


@torch.no_grad()
def speculative_decoding(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafter: Drafter,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """Decode with a drafter, with the arguments of `_assisted_decoding` of Transformers, which this replaces."""
    warn_if_untested()

    with row_adapters_gone_on_error(model):
        for name in ("inputs_tensor", "tokenizer", "assistant_tokenizer", "synced_gpus"):
            model_kwargs.pop(name, None)
        ends = [each.max_length for each in stopping_criteria if type(each) is MaxLengthCriteria]
        if ends:  # a criterion of the caller's takes the place of that of the config
            generation_config.max_length = ceil(min(ends))  # one out of JSON may be 64.0
        _check_call(model, input_ids, model_kwargs, generation_config)
        cache = model_kwargs[CACHE]
        model_kwargs[CACHE] = growing(cache, model.config.get_text_config(decoder=True))
        if model_kwargs[CACHE] is not cache and getattr(cache, "_is_user_defined", False):
            logger.warning(
                "The `StaticCache` that was passed stays as it is: beside a drafter the text goes on in a "
                "`DynamicCache`, which the output holds where `return_dict_in_generate` is True."
            )
        verifier = verifier_of(drafter, generation_config)
        if not verifier.asks_in_order:
            check_memoryless(logits_processor, f'verifier="{verifier.name}"')
        if len(input_ids) > 1:
            _check_lockstep(logits_processor, stopping_criteria, generation_config, verifier)
        batch = SequenceBatch(
            input_ids.to(torch.promote_types(input_ids.dtype, torch.long)),  # floats are left for the target to refuse
            model_kwargs.get("attention_mask"),
            logits_processor,
            stopping_criteria,
            generation_config,
            verifier=verifier,
            streamer=streamer,
        )
        with in_eval_mode(drafter):
            return SpeculativeDecoding(model, drafter, batch, generation_config, model_kwargs).run()


def _check_call(
    model: PreTrainedModel, input_ids: Tensor, model_kwargs: dict[str, Any], config: GenerationConfig
) -> None:
    if input_ids.shape[1] == 0 or model_kwargs.get("inputs_embeds") is not None:
        raise GenerationError(
            "The drafter needs the prompt's token ids, but there are none, or `inputs_embeds` in their place. "
            "Pass `input_ids` with at least one token, and no `inputs_embeds`."
        )

    if not model_kwargs.get("use_cache", True):
        raise GenerationError(
            "Speculative decoding needs the target's cache, so `use_cache` must be True, but it is False, by the call "
            "or by `target.generation_config`. Set it to True."
        )

    if model_kwargs.get(CACHE) is None:
        raise GenerationError(
            "Speculative decoding needs a cache from which rejected drafts can be dropped, but this call has none: "
            f"`{type(model).__name__}` keeps none, or one of its own kind. Generate without `assistant_model`."
        )

    for name, value in model_kwargs.items():
        if isinstance(value, Iterator):
            raise GenerationError(
                f"`{name}` must be the same at every step, but it is a {type(value).__name__}, which gives every step "
                "something else. Generate without `assistant_model`."
            )

    check_prompt(model, text_length(input_ids, model_kwargs, config))


def _check_lockstep(
    processors: LogitsProcessorList, criteria: StoppingCriteriaList, config: GenerationConfig, verifier: Verifier
) -> None:
    shown = [type(each).__qualname__ for each in of_batches(processors, criteria)]
    if not shown:
        return

    if not verifier.is_token_matching:
        raise OptionError(
            f"In a batch `{shown[0]}` must be shown all rows at one length, so rows must be verified token by token, "
            f"but `verifier={verifier.name!r}` verifies each row by itself. Set `drafter.generation_config.verifier` "
            'to "token_matching", or call `generate` once for each sequence.'
        )

    is_shown_scores = (
        config.output_scores and config.return_dict_in_generate and of_batches(LogitsProcessorList(), criteria)
    )
    if is_shown_scores and any(hasattr(criterion, "eos_token_id") for criterion in criteria):
        raise GenerationError(
            f"In a batch `{shown[-1]}` would be shown the scores of rows that have ended, which are not computed with "
            "a drafter. Leave out `output_scores`, or call `generate` once for each sequence."
        )
