"""A call that ends early leaves nothing behind; one that goes on from a returned cache writes what plain decoding writes."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from tests import runs
from tests.doubles import RandomDrafter
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec.errors import GenerationError


class UsersError(Exception):
    """What a user's own code raises."""


class After:
    """Counts calls and raises at the fifth."""

    def __init__(self) -> None:
        self.num_calls = 0

    def count(self) -> None:
        self.num_calls += 1
        if self.num_calls == 5:
            raise UsersError


class RaisingCriterion(After, StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.count()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class RaisingProcessor(After, LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.count()
        return scores


class RaisingStreamer(After, BaseStreamer):
    def put(self, value: Any) -> None:
        self.count()

    def end(self) -> None:
        """Nothing."""


def raising(name: str) -> dict[str, Any]:
    return {
        "criterion": lambda: {"stopping_criteria": StoppingCriteriaList([RaisingCriterion()])},
        "processor": lambda: {"logits_processor": LogitsProcessorList([RaisingProcessor()])},
        "streamer": lambda: {"streamer": RaisingStreamer()},
    }[name]()


@pytest.mark.parametrize("name", ["criterion", "processor", "streamer"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_exception_of_the_users_own_code_leaves_the_model_as_it_was(family: str, name: str) -> None:
    target = make_target(family).double()
    drafter = RandomDrafter(feature_layers=(1, -1))
    before = runs.drafted(target, drafter).sequences
    cache = DynamicCache(config=target.config)

    with pytest.raises(UsersError):
        runs.drafted(target, drafter, past_key_values=cache, **raising(name))

    assert not any(module._forward_hooks or module._forward_pre_hooks for module in target.modules())
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    assert runs.drafted(target, drafter).sequences.equal(before)


class Narrow(LogitsProcessor):
    """Returns one score too few."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores[:, 1:]


def test_a_processor_that_returns_another_shape_is_refused() -> None:
    with pytest.raises(GenerationError, match=r"must return scores of shape \(1, 97\), but one returned \(1, 96\)"):
        runs.drafted(make_target(), RandomDrafter(), logits_processor=LogitsProcessorList([Narrow()]))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_conversation_goes_on_from_the_returned_cache(family: str) -> None:
    target, more = make_target(family).double(), make_prompt(5, seed=9)
    texts = []

    for drafter in (None, RandomDrafter(feature_layers=(-1,)), make_drafter(target, block_size=2).double()):
        first = runs.plain(target, assistant_model=drafter)
        prompt = torch.cat([first.sequences, more], dim=1)
        second = runs.plain(target, prompt, assistant_model=drafter, past_key_values=first.past_key_values)
        texts.append(second.sequences.tolist())

    assert texts[1] == texts[2] == texts[0]
