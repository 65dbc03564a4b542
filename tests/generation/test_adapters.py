"""Adapters of PEFT by row: every forward of a call takes those that plain decoding takes, and none stay behind."""

from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from tests import runs
from tests.adapters import make_eagle, make_medusa
from tests.doubles import InformedDrafter, RandomDrafter
from tests.generation.model_kwargs import prompts
from tests.tiny import in_double, make_drafter, make_prompt, make_target
from transformers_falcon_spec.errors import GenerationError
from transformers_falcon_spec.generation import audit

BY_ROW = {1: ["b"], 3: ["a", "__base__", "b"]}
EVERYWHERE = ("q_proj", "v_proj", "lm_head", "embed_tokens")
DRAFTERS = {
    "random": lambda target: RandomDrafter(num_nodes=12),
    "falcon": make_drafter,
    "eagle": make_eagle,
    "medusa": lambda target: make_medusa(target, num_heads=2, has_lm_heads=False),
}


def adapted(
    family: str = "llama", names: str = "ab", modules: tuple[str, ...] = ("q_proj", "v_proj"), **options: Any
) -> Any:
    """A fresh target inside a `PeftModel` with adapters of these names; no call has probed it."""
    target = in_double(make_target(family, seed=7))
    config = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": list(modules), "init_lora_weights": False, **options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = peft.get_peft_model(target, peft.LoraConfig(**config), adapter_name=names[0])
        for name in names[1:]:
            model.add_adapter(name, peft.LoraConfig(**config))
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.data.normal_(std=0.3)
    return model.double().eval()


def write(model: Any, prompt: Tensor, **options: Any) -> Any:
    defaults = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "do_sample": False}
    return model.generate(input_ids=prompt, return_dict_in_generate=True, **{**defaults, **options})


def assert_own_text(model: Any, prompt: Tensor, kind: str = "random", **options: Any) -> None:
    gold = write(model, prompt, **options).sequences
    drafter = InformedDrafter(DRAFTERS[kind](model.get_base_model()), gold)
    before = runs.traces(model)

    drafted = write(model, prompt, assistant_model=drafter, **options)

    assert drafted.sequences.tolist() == gold.tolist()
    assert drafted.speculation.acceptance_length > 1.3
    assert runs.traces(model) == before


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "kind", ["random", "falcon", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("eagle", "medusa"))]
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_each_row_takes_its_own_adapter(kind: str, rows: int) -> None:
    model, names = adapted(modules=EVERYWHERE), BY_ROW[rows]

    assert_own_text(model, prompts(rows), kind, adapter_names=names)

    with_names, without = (write(model, prompts(rows), **each).sequences for each in ({"adapter_names": names}, {}))
    assert with_names.tolist() != without.tolist()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_each_row_takes_its_own_adapter_where_some_are_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "FLOOR", 16)  # behind it drafts are read again as plain decoding reads

    assert_own_text(adapted(modules=EVERYWHERE), prompts(3), adapter_names=BY_ROW[3], max_new_tokens=80)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_paths_of_a_row_take_its_adapter() -> None:
    assert_own_text(adapted("bloom", modules=("query_key_value",)), prompts(1), adapter_names=["b"])


@pytest.mark.parametrize("kind", ["random", "falcon"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_an_adapter_that_begins_at_its_invocation_holds_for_every_node(kind: str, rows: int) -> None:
    invocation = make_prompt()[0, 8:10].tolist()  # of the first prompt alone
    model = adapted(names="a", modules=EVERYWHERE[:3], alora_invocation_tokens=invocation)

    assert_own_text(model, prompts(rows), kind)

    found = write(model, prompts(rows)).sequences
    with model.disable_adapter():
        assert write(model, prompts(rows)).sequences[0].tolist() != found[0].tolist()


class Interrupted(BaseException):
    """What no handler of errors catches."""


@pytest.mark.parametrize("raised", [Interrupted, ValueError, None], ids=["interrupt", "error", "refusal"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_after_an_exception_the_next_call_is_as_if_there_had_been_none(raised: type[BaseException] | None) -> None:
    model = adapted()
    gold = write(model, prompts(1)).sequences

    def fail(_ids: Tensor, _scores: Tensor) -> Tensor:
        assert raised is not None
        raise raised

    options: dict[str, Any] = {"num_beams": 2} if raised is None else {"logits_processor": LogitsProcessorList([fail])}
    drafter = make_drafter(model.get_base_model())
    with pytest.raises(GenerationError if raised is None else raised):
        write(model, prompts(3), assistant_model=drafter, adapter_names=BY_ROW[3], **options)

    assert runs.traces(model)["hooks"] == 0
    assert write(model, prompts(1)).sequences.tolist() == gold.tolist()
    assert_own_text(model, prompts(3), adapter_names=BY_ROW[3])
