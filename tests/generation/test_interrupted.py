"""A call that ends early leaves nothing behind; one that goes on from a returned cache writes what plain decoding writes."""

from itertools import product
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerationMixin

from tests import runs
from tests.doubles import RandomDrafter
from tests.interrupts import interrupted_everywhere
from tests.pairs import in_turn
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec.generation import output, packed_linear, sequence_batch
from transformers_falcon_spec.generation.packed_linear import PackedReads
from transformers_falcon_spec.generation.patch import without_patch


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


class RaisingDrafter(After, RandomDrafter):
    """Its generators raise at their fifth proposal."""

    def __init__(self) -> None:
        RandomDrafter.__init__(self, feature_layers=(1, -1))
        After.__init__(self)

    def candidate_generator(self, *args: Any) -> Any:
        generator = super().candidate_generator(*args)
        propose = generator.propose
        generator.propose = lambda budget: (self.count(), propose(budget))[1]
        return generator


RAISING = {
    "criterion": lambda: {"stopping_criteria": StoppingCriteriaList([RaisingCriterion()])},
    "processor": lambda: {"logits_processor": LogitsProcessorList([RaisingProcessor()])},
    "streamer": lambda: {"streamer": RaisingStreamer()},
    "drafter": lambda: {"assistant_model": RaisingDrafter()},
}


@pytest.mark.parametrize(
    ("name", "num_rows", "family", "attention"),
    [
        *((name, num_rows, "llama", "sdpa") for name, num_rows in product(RAISING, (1, 3))),
        *(
            pytest.param(name, num_rows, "gemma3", "eager", marks=pytest.mark.families)
            for name, num_rows in in_turn(RAISING, (1, 3))
        ),
        *(pytest.param(name, 1, "qwen3_5", "sdpa", marks=pytest.mark.families) for name in RAISING),
    ],
)
def test_an_exception_of_the_users_own_code_leaves_the_model_as_it_was(
    name: str, num_rows: int, family: str, attention: str
) -> None:
    prompts = torch.cat([make_prompt(6, seed) for seed in range(num_rows)])
    target = make_target(family, attn_implementation=attention).double()
    drafter = RandomDrafter(feature_layers=(1, -1))
    before, cache = runs.drafted(target, drafter, prompts).sequences, DynamicCache(config=target.config)
    untouched = runs.traces(target, DynamicCache(config=target.config))

    with pytest.raises(UsersError):
        runs.plain(target, prompts, past_key_values=cache, **{"assistant_model": drafter, **RAISING[name]()})

    assert cache.get_seq_length() > 0  # the call had begun
    assert runs.traces(target, cache) == untouched
    assert runs.drafted(target, drafter, prompts).sequences.equal(before)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "qwen3_5"])
def test_a_conversation_goes_on_from_the_returned_cache(family: str) -> None:
    target, more = make_target(family).double(), make_prompt(5, seed=9)
    texts = []

    for drafter in (None, RandomDrafter(feature_layers=(-1,)), make_drafter(target, block_size=2)):
        first = runs.plain(target, assistant_model=drafter)
        prompt = torch.cat([first.sequences, more], dim=1)
        second = runs.plain(target, prompt, assistant_model=drafter, past_key_values=first.past_key_values)
        texts.append(second.sequences.tolist())

    assert texts[1] == texts[2] == texts[0]


def test_an_interrupt_before_any_line_leaves_the_thread_as_it_was() -> None:
    target = make_target()
    packed = PackedReads([target], pack_weights=True)

    def state() -> tuple[Any, ...]:
        is_patched = hasattr(GenerationMixin._assisted_decoding, "_is_falcon_spec_patch")
        reads = getattr(packed_linear._ACTIVE, "reads", None)
        return output._COLLECTORS.get(), sequence_batch._SEEDS.get(), reads, is_patched

    before = state()
    blocks = {
        "collector": (output.collect_speculation, True),
        "seeds": (lambda: sequence_batch.seeded_rows([1, 2]), True),
        "packed": (packed.reading, False),
        "patch": (lambda: without_patch(target), False),
    }
    for name, (block, is_left) in blocks.items():
        num_lines = 0
        for number in interrupted_everywhere(block, is_left):
            num_lines += 1
            assert (name, number, state()) == (name, number, before)

        assert num_lines > 10, name
        assert state() == before
