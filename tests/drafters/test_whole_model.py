"""Which tokens a draft model and its target share, by their strings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.drafters.easyspec.kinds import make_model
from tests.drafters.tokenizers import make_tokenizer, saved
from tests.tiny import VOCAB_SIZE, make_prompt
from transformers_falcon_spec import LayerParallelDrafter
from transformers_falcon_spec.drafters.whole_model import shared_vocabulary
from transformers_falcon_spec.errors import CheckpointError, DrafterMismatchError


@pytest.mark.parametrize(
    ("sizes", "draft", "target", "num_shared"),
    [
        ((100, 120), make_tokenizer(90), make_tokenizer(90), 90),  # both padded, to different sizes
        ((120, 100), make_tokenizer(90), make_tokenizer(90), 90),
        ((100, 100), make_tokenizer(90), make_tokenizer(95), 90),  # the target has further tokens at its end
        ((100, 100), make_tokenizer(95, tool=97), make_tokenizer(90), 90),
        ((80, 100), make_tokenizer(90), make_tokenizer(90), 80),  # no rows for what the tokenizer knows
        ((100, 100), None, make_tokenizer(90), 100),  # nothing to compare
        ((100, 100), None, None, 100),
    ],
)
def test_shared_are_the_ids_that_both_know(sizes: tuple[int, int], draft: Any, target: Any, num_shared: int) -> None:
    assert shared_vocabulary(sizes, (draft, target)) == num_shared


@pytest.mark.parametrize(
    ("sizes", "draft", "target", "message"),
    [
        (
            (100, 100),
            make_tokenizer(90, tool=33),
            make_tokenizer(90),
            "id 33 is 'tool' in the draft model and 'word33'",
        ),
        (
            (100, 120),
            None,
            make_tokenizer(90),
            "has 100 tokens and the target 120, .* but the draft model brings no tok",
        ),
        ((100, 120), make_tokenizer(90), None, "but the target brings no tokenizer. Pass both"),
        ((100, 120), make_tokenizer(0, tool=7), make_tokenizer(5), "no id is a token of both"),
    ],
)
def test_other_tokens_are_refused(sizes: tuple[int, int], draft: Any, target: Any, message: str) -> None:
    with pytest.raises(DrafterMismatchError, match=message):
        shared_vocabulary(sizes, (draft, target))


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., tuple[str, Any]]:
    """The folder of a draft model and a target loaded from one, each with a tokenizer or without."""

    def make(draft: Any, target: Any, own_size: int = 110) -> tuple[str, Any]:
        name = saved(make_model("llama", seed=1, vocab_size=own_size), tmp_path / "draft", draft)
        folder = saved(make_model("llama"), tmp_path / "target", target)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        loaded.generation_config.eos_token_id = None
        return name, loaded

    return make


def test_a_model_with_other_padding_is_wrapped_and_drafts_shared_tokens_alone(
    pair: Callable[..., tuple[str, Any]],
) -> None:
    name, target = pair(make_tokenizer(90), make_tokenizer(90))

    drafter = LayerParallelDrafter.from_pretrained(name, target=target, group_size=3)
    out = target.generate(make_prompt(), assistant_model=drafter, max_new_tokens=12, return_dict_in_generate=True)

    assert (drafter.config.vocab_size, drafter.config.draft_vocab_size) == (VOCAB_SIZE, 90)
    assert drafter.model.config.vocab_size == 110
    assert drafter.config.layer_groups == [[0], [1, 2], [3, 4, 5], [6]]
    assert drafter.dtype == target.dtype
    assert drafter.training is drafter.model.training is False
    assert out.sequences.equal(target.generate(make_prompt(), max_new_tokens=12))
    assert out.speculation.num_drafted > 0


def test_a_model_of_another_size_without_tokenizers_is_refused(pair: Callable[..., tuple[str, Any]]) -> None:
    name, target = pair(None, None)

    with pytest.raises(DrafterMismatchError, match="the draft model brings no tokenizer"):
        LayerParallelDrafter.from_pretrained(name, target=target)

    given = {"tokenizer": make_tokenizer(50), "target_tokenizer": make_tokenizer(60)}
    assert LayerParallelDrafter.from_pretrained(name, target=target, **given).config.draft_vocab_size == 50
    fewer = LayerParallelDrafter.from_pretrained(name, target=target, **given, draft_vocab_size=30)
    assert fewer.config.draft_vocab_size == 30


def test_other_tokens_beside_the_weights_are_refused(pair: Callable[..., tuple[str, Any]]) -> None:
    name, target = pair(make_tokenizer(90), make_tokenizer(90, other=5), own_size=VOCAB_SIZE)

    with pytest.raises(DrafterMismatchError, match="id 5 is 'word5' in the draft model and 'other' in the target"):
        LayerParallelDrafter.from_pretrained(name, target=target)


def test_a_model_with_weights_missing_is_refused(pair: Callable[..., tuple[str, Any]]) -> None:
    name, target = pair(None, None, own_size=VOCAB_SIZE)
    file = Path(name) / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})

    with pytest.raises(
        CheckpointError, match=r"all weights of `LlamaForCausalLM`, but it lacks .*layers.3.mlp.up_proj"
    ):
        LayerParallelDrafter.from_pretrained(name, target=target)
