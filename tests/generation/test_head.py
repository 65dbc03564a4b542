"""The head makes the model's own logits of the decoder's last hidden state, whatever stands between the two."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.families import DRAFTED
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import LookaheadDrafter
from transformers_falcon_spec.errors import TargetError
from transformers_falcon_spec.generation.head import apply_head, apply_matrix, head_rows, head_width
from transformers_falcon_spec.generation.model_parts import decoder_of

# scales, caps, projections, layers before the matrix
ODD: dict[str, dict[str, Any]] = {
    "cohere": {},
    "granite": {},
    "gemma2": {"final_logit_softcapping": 3.0},
    "minicpm3": {"dim_model_base": 16},
    "opt": {"word_embed_proj_dim": 32},
    "modernbert_decoder": {},
    "rembert": {},
}


def _states_and_logits(target: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    seen = []
    hook = decoder_of(target).register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
    with torch.no_grad():
        logits = target(input_ids=make_prompt()).logits
    hook.remove()
    return seen[0], logits


@pytest.mark.parametrize("family", ["llama", *ODD])
def test_logits_are_those_of_the_models_own_forward(family: str) -> None:
    target = make_target(family, **ODD.get(family, {}))
    states, logits = _states_and_logits(target)

    assert states.shape[-1] == head_width(target)
    assert torch.equal(apply_head(target, states), logits)
    torch.testing.assert_close(apply_head(target, states[0, 3:4]), logits[0, 3:4])
    is_bare = torch.equal(target.get_output_embeddings()(states), logits) if family != "rembert" else False
    assert is_bare == (family in ("llama", "opt"))


@pytest.mark.parametrize("family", ["llama", *ODD])
def test_rows_of_the_head_give_the_logits_of_their_tokens(family: str) -> None:
    target = make_target(family, **ODD.get(family, {}))
    states, logits = _states_and_logits(target)
    token_ids = torch.tensor([3, 40, 41, 90])

    rows = head_rows(target, token_ids)

    torch.testing.assert_close(apply_head(target, states, rows), logits[..., token_ids])
    torch.testing.assert_close(apply_head(target, states), logits)  # the model itself is as it was


class _Packed(torch.nn.Module):
    """An output matrix whose weights cannot be read."""

    def __init__(self, matrix: torch.nn.Linear) -> None:
        super().__init__()
        self._matrix = [matrix]
        self.in_features = matrix.in_features

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self._matrix[0](states) + 0.5


def test_rows_of_weights_that_cannot_be_read_are_found_by_applying_the_matrix() -> None:
    target = make_target()
    target.set_output_embeddings(_Packed(target.lm_head))
    states, logits = _states_and_logits(target)
    token_ids = torch.tensor([3, 40, 41, 90])

    rows = head_rows(target, token_ids)

    torch.testing.assert_close(apply_head(target, states, rows), logits[..., token_ids])


@pytest.mark.parametrize("family", DRAFTED)
def test_the_decoder_holds_the_embeddings_and_not_the_head(family: str) -> None:
    target = make_target(family)
    parts = list(decoder_of(target).modules())

    assert any(part is target.get_input_embeddings() for part in parts)
    assert not any(part is target.get_output_embeddings() for part in parts)


def test_gradients_reach_what_the_head_reads() -> None:
    target = make_target("cohere")
    states = torch.randn(2, 3, 64, requires_grad=True)

    apply_head(target, states).sum().backward()

    assert states.grad is not None
    assert states.grad.abs().max() > 0


def test_the_matrix_alone_is_refused_where_other_layers_stand_before_it() -> None:
    target = make_target("rembert")

    with pytest.raises(TargetError, match="must read the last hidden state, of width 64, but it reads 48 values"):
        apply_matrix(target, torch.zeros(1, 1, 64))


def _with_odd_logits() -> PreTrainedModel:
    target = make_target("llama")
    target.register_forward_hook(lambda _module, _inputs, output: replace(output, logits=output.logits.flip(-1)))
    return target


def test_drafters_that_need_a_head_that_cannot_be_used_alone_are_refused_in_words() -> None:
    target = _with_odd_logits()

    with pytest.raises(TargetError, match=r"that of `LlamaForCausalLM` cannot be used alone: .* `LookaheadDrafter`"):
        runs.drafted(target, make_drafter(target))


@pytest.mark.parametrize("kind", ["told", "lookahead"])
def test_drafters_that_need_no_head_take_any_target_that_reads_drafts(kind: str) -> None:
    target = _with_odd_logits()
    plain = runs.plain(target, max_new_tokens=60)
    drafter: Any = LookaheadDrafter.from_target(target, window_size=3, ngram_len=3, num_guesses=3)
    if kind == "told":
        drafter = InformedDrafter(RandomDrafter(), plain.sequences)

    drafted = runs.drafted(target, drafter, max_new_tokens=60)

    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert drafted.speculation.num_drafted > 0
