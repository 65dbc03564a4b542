"""Exported drafters in the real package speculators: it loads them whole, and computes the same numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.tiny import make_target
from transformers_falcon_spec.convert import export_drafter
from transformers_falcon_spec.convert.formats import TRAINING_COPIES
from transformers_falcon_spec.convert.rules import EMBEDDINGS

from .exports import SIZES, VARIANTS, eagle

pytestmark = pytest.mark.speculators

LENGTH, STEPS = 128, 3  # a whole block of its attention, which takes no part of one


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A target that lies where the drafter says; speculators reads its config and its embeddings."""
    target = make_target("llama", num_hidden_layers=9)
    target.save_pretrained(tmp_path / SIZES["target_name_or_path"])
    monkeypatch.chdir(tmp_path)
    return target


def theirs(dest: Path) -> Any:
    """The exported drafter as speculators loads it."""
    from speculators import SpeculatorModel  # noqa: PLC0415  this lane alone has it

    return SpeculatorModel.from_pretrained(dest).eval()


@torch.no_grad()
def logits_of(model: Any, features: Tensor, token_ids: Tensor) -> list[Tensor]:
    """Its logits over tokens that can be drafted, for each step; row p reads feature p and token p."""
    found: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: found.append(output[0]))
    model(features, token_ids, document_ids=torch.zeros_like(token_ids), ttt_steps=STEPS)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_speculators_computes_the_same_logits_step_after_step(variant: str, target: Any, tmp_path: Path) -> None:
    drafter = eagle(**VARIANTS[variant])
    export_drafter(drafter, tmp_path / "dest", "speculators")
    model, config = theirs(tmp_path / "dest"), drafter.config
    # speculators takes the target's embeddings where it finds NaN, but Transformers leaves what was in the memory there.
    model.embed_tokens.load_state_dict({"weight": target.get_input_embeddings().weight})
    features, token_ids = torch.randn(1, LENGTH, config.feature_size), torch.randint(0, config.vocab_size, (1, LENGTH))

    found = logits_of(model, features, token_ids)

    with torch.no_grad():
        output = drafter(target.get_input_embeddings()(token_ids), features, num_steps=STEPS)
    expected = output.logits.unflatten(0, (STEPS, LENGTH))
    whole = LENGTH - STEPS  # later rows have no next token to read, and both fill in something else
    for step in range(STEPS):
        torch.testing.assert_close(found[step][:whole], expected[step, :whole], atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("variant", VARIANTS)
def test_speculators_holds_every_weight_and_the_layers_that_are_read(variant: str, tmp_path: Path) -> None:
    drafter = eagle(**VARIANTS[variant])
    export_drafter(drafter, tmp_path / "dest", "speculators")

    model = theirs(tmp_path / "dest")

    loaded, stored = model.state_dict(), load_file(tmp_path / "dest" / "model.safetensors")
    assert set(loaded) - set(stored) == {EMBEDDINGS, *TRAINING_COPIES}  # all that it takes from the target
    for name, weight in stored.items():
        assert torch.equal(loaded[name], weight), name
    assert tuple(model.target_layer_ids) == tuple(drafter.feature_layers)
    layer = model.config.transformer_layer_config
    assert layer.rope_parameters == drafter.config.rope_parameters
    assert model.config.speculators_config.proposal_methods[0].speculative_tokens == drafter.tree_depth
