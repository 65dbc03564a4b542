"""Features against `output_hidden_states`; hooks that stay in their thread and leave nothing behind."""

import threading

import pytest
import torch
from transformers import PreTrainedModel

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec.errors import TargetError
from transformers_falcon_spec.generation.feature_hooks import FeatureHooks
from transformers_falcon_spec.generation.model_parts import decoder_of


def _hooks(model: PreTrainedModel, *feature_layers: int) -> FeatureHooks:
    return FeatureHooks(decoder_of(model), model.config.num_hidden_layers, feature_layers)


def _num_hooks(model: PreTrainedModel) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


@torch.no_grad()
def _read(model: PreTrainedModel, prompt: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return model(prompt, use_cache=False, output_hidden_states=True).hidden_states


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt", "gpt_neox", "llama4"])
def test_features_are_the_hidden_states_of_those_indices(family: str) -> None:
    model = make_target(family)
    hooks = _hooks(model, 0, 2, -1)

    with hooks.active():
        states = _read(model, make_prompt())
        features = hooks.take(12)

    assert features.equal(torch.cat([states[0], states[2], states[-1]], dim=-1))


def test_readings_since_the_last_take_are_joined() -> None:
    model = make_target()
    hooks = _hooks(model, 1)

    with hooks.active():
        first, second = (_read(model, make_prompt(length))[1] for length in (3, 4))
        features = hooks.take(7)
        third = _read(model, make_prompt(2))[1]
        later = hooks.take(2)

    assert features.equal(torch.cat([first, second], dim=1))
    assert later.equal(third)


def test_hooks_that_are_paused_catch_nothing_and_come_back() -> None:
    model = make_target()
    _read(model, make_prompt(2))  # Transformers has hooks of its own from then on
    hooks, before = _hooks(model, 0, -1), _num_hooks(model)

    with hooks.active():
        num_hooks = _num_hooks(model)
        with hooks.paused():
            assert _num_hooks(model) == before
            _read(model, make_prompt(3))
        assert _num_hooks(model) == num_hooks == before + 2
        states = _read(model, make_prompt(2))
        features = hooks.take(2)
    with hooks.paused():
        pass

    assert features.equal(torch.cat([states[0], states[-1]], dim=-1))
    assert _num_hooks(model) == before


def test_without_layers_nothing_is_hooked_and_nothing_caught() -> None:
    model = make_target()
    hooks = _hooks(model)

    with hooks.active():
        assert _num_hooks(model) == 0
        assert hooks.take(5) is None


def test_hooks_are_gone_after_an_exception() -> None:
    model = make_target()

    def fail() -> None:
        with _hooks(model, 0, 1, -1).active():
            assert _num_hooks(model) == 3
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    assert _num_hooks(model) == 0


def test_two_threads_on_one_model_catch_their_own_features() -> None:
    model, caught = make_target(), {}
    _read(model, make_prompt())  # Transformers leaves hooks of its own for `output_hidden_states`
    num_before = _num_hooks(model)
    meet = threading.Barrier(2, timeout=600)

    def run(seed: int) -> None:
        hooks = _hooks(model, 1, -1)
        with hooks.active():
            meet.wait()
            for _ in range(3):
                states = _read(model, make_prompt(6, seed))
            meet.wait()
            caught[seed] = (hooks.take(18), torch.cat([states[1], states[-1]], dim=-1).repeat(1, 3, 1))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(caught) == [1, 2]
    assert all(features.equal(expected) for features, expected in caught.values())
    assert _num_hooks(model) == num_before


@pytest.mark.parametrize("layer", [3, 7, -2])
def test_layers_that_do_not_exist_are_refused(layer: int) -> None:
    with pytest.raises(TargetError, match=rf"Feature layers must be -1 or lie in 0\.\.2, but they are \({layer},\)\."):
        _hooks(make_target(), layer)


def test_a_decoder_without_a_list_of_layers_has_no_inner_features() -> None:
    with pytest.raises(
        TargetError,
        match=r"Features of layers \[1\] need a list of 3 decoder layers; the target has none\. Read -1 alone",
    ):
        FeatureHooks(torch.nn.Linear(2, 2), 3, (1, -1))


def test_a_layer_whose_output_is_no_row_of_tokens_is_refused() -> None:
    model = make_target("gemma3n")
    hooks = _hooks(model, 1, -1)

    with hooks.active():
        model(make_prompt(5))
        with pytest.raises(TargetError, match=r"Hidden state 1 must be .* but the target gives \(2, 1, 5, 64\)"):
            hooks.take(5)


def test_a_tap_that_stays_silent_is_reported() -> None:
    hooks = _hooks(make_target(), 1)

    with (
        hooks.active(),
        pytest.raises(TargetError, match="The hook at hidden state 1 must see 4 tokens, but it saw nothing"),
    ):
        hooks.take(4)


def test_a_tap_that_misses_tokens_is_reported() -> None:
    model = make_target()
    hooks = _hooks(model, -1)

    with hooks.active():
        _read(model, make_prompt(3))
        with pytest.raises(TargetError, match="The hook at hidden state -1 must see 4 tokens, but it saw 3 tokens"):
            hooks.take(4)


@pytest.mark.parametrize("feature_layers", [(-1,), (1, 3)])
def test_layers_that_share_keys_give_features_of_the_whole_prompt(feature_layers: tuple[int, ...]) -> None:
    target, drafter = make_target("gemma4_shared_kv").double(), RandomDrafter(feature_layers=feature_layers)

    gold = runs.plain(target).sequences

    runs.both(target, InformedDrafter(drafter, gold)).assert_equal()

    with torch.no_grad():
        states = target(make_prompt(), output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer] for layer in feature_layers], dim=-1)
    torch.testing.assert_close(drafter.generators[0].commits[0].features, expected, rtol=0, atol=1e-5)
