"""Wrapping three functions of Transformers: once, reversibly, and only where their signatures are known."""

from collections.abc import Iterator
from typing import Any

import pytest
from transformers.generation.utils import GenerationMixin

from tests import runs
from tests.doubles import RandomDrafter
from tests.tiny import make_target
from transformers_falcon_spec import attach, disable, enable
from transformers_falcon_spec.errors import PatchError
from transformers_falcon_spec.generation.patch import without_patch
from transformers_falcon_spec.generation.target_look import look_at

NAMES = ("_assisted_decoding", "_validate_generation_mode", "_extract_generation_mode_kwargs")


def _functions(owner: Any = GenerationMixin) -> list[Any]:
    return [getattr(owner, name) for name in NAMES]


def _other_function(_self: Any) -> None:
    """What a later version of Transformers may have in its place."""


@pytest.fixture(autouse=True)
def _enabled_again() -> Iterator[None]:
    """Whatever a test does, the next one finds the patch in place."""
    yield
    enable()


@pytest.fixture
def stock() -> list[Any]:
    """Transformers' own functions, which are in place when the test starts."""
    disable()
    return _functions()


def test_importing_the_package_enables_it() -> None:
    assert all(hasattr(function, "__wrapped__") for function in _functions())


def test_enabling_twice_is_enabling_once(stock: list[Any]) -> None:
    enable()
    enable()

    assert [function.__wrapped__ for function in _functions()] == stock


def test_disabling_gives_the_original_functions_back(stock: list[Any]) -> None:
    enable()
    disable()
    disable()

    assert _functions() == stock


def test_wrapped_functions_keep_name_and_documentation(stock: list[Any]) -> None:
    enable()

    for function, original in zip(_functions(), stock, strict=True):
        assert (function.__name__, function.__doc__) == (original.__name__, original.__doc__)


@pytest.mark.usefixtures("stock")
def test_stock_assistants_write_what_they_write_without_the_package() -> None:
    target, assistant = make_target(), make_target(seed=5, num_hidden_layers=1)

    without = runs.plain(target, assistant_model=assistant)
    enable()
    patched = runs.plain(target, assistant_model=assistant)

    assert patched.sequences.equal(without.sequences)
    assert type(patched) is type(without)


def test_prompt_lookup_is_left_to_transformers() -> None:
    out = runs.plain(make_target(), prompt_lookup_num_tokens=2)

    assert out.sequences.equal(runs.plain(make_target()).sequences)
    assert not hasattr(out, "speculation")


def test_a_target_is_what_it_was_once_the_patch_is_back() -> None:
    target = make_target()
    key = look_at(target).key

    with without_patch(target):
        pass

    assert look_at(target).key == key  # else it would be probed anew


@pytest.mark.parametrize("name", NAMES)
def test_another_signature_is_refused(name: str, stock: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GenerationMixin, name, _other_function)

    with pytest.raises(
        PatchError, match=rf"`GenerationMixin\.{name}` must take .*, but this version of Transformers lacks"
    ):
        enable()

    other = next(other for other in NAMES if other != name)
    assert getattr(GenerationMixin, other) in stock  # neither function is wrapped alone
    monkeypatch.undo()


@pytest.mark.usefixtures("stock")
def test_a_missing_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(GenerationMixin, "_assisted_decoding")

    with pytest.raises(PatchError, match=r"has no such function\. Use a tested version \(see the README\)"):
        enable()

    monkeypatch.undo()


def test_attached_model_takes_drafters_without_a_global_patch(stock: list[Any]) -> None:
    target = attach(make_target())

    out = runs.drafted(target, RandomDrafter())

    assert out.sequences.equal(runs.plain(target).sequences)
    assert out.speculation.num_steps > 0
    assert _functions() == stock
    assert _functions(type(make_target())) == stock


def test_attaching_changes_the_model_in_place_and_once(stock: list[Any]) -> None:
    model = make_target()

    attached = attach(model)
    kind = type(model)
    attach(model)

    assert attached is model
    assert type(model) is kind
    assert (kind.__name__, kind.__mro__[1]) == ("LlamaForCausalLM", type(make_target()))
    assert [function.__wrapped__ for function in _functions(kind)] == stock


def test_a_model_attached_while_enabled_stays_attached_after_disabling() -> None:
    target = attach(make_target())
    disable()

    out = runs.drafted(target, RandomDrafter())

    assert out.speculation.num_steps > 0


def test_attached_model_serves_stock_assistants_too() -> None:
    target = attach(make_target())

    out = runs.plain(target, assistant_model=make_target(seed=5))

    assert out.sequences.equal(runs.plain(target).sequences)


@pytest.mark.usefixtures("stock")
def test_attaching_checks_the_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", _other_function)

    with pytest.raises(PatchError, match="must take input_ids"):
        attach(make_target())

    monkeypatch.undo()
