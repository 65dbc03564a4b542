"""What captured steps keep between calls: it serves later ones, is never stale, bounded, and holds no model."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from tests import runs, tape
from tests.tiny import in_double, make_drafter, make_prompt, make_target
from transformers_falcon_spec.core import sampling
from transformers_falcon_spec.drafters.tree_drafting.text import MOST_DRAFTS
from transformers_falcon_spec.errors import GenerationError
from transformers_falcon_spec.generation.capture import state as states
from transformers_falcon_spec.generation.capture.eligibility import kernels_key
from transformers_falcon_spec.generation.capture.state import StaticState, release, states_of
from transformers_falcon_spec.generation.output import CHANGED
from transformers_falcon_spec.generation.slot_cache import BUCKETS, DEPTH_BUCKETS, EXACT, NODE_BUCKETS, Shapes, bucket

OPTIONS = {"max_new_tokens": 16}
LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def _pair() -> tuple[PreTrainedModel, Any]:
    target = in_double(make_target())
    return target, _static(make_drafter(target, block_size=2))


def _static(drafter: Any) -> Any:
    drafter.generation_config.capture, drafter.generation_config.tune = True, False
    return drafter


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    return tape.install(monkeypatch)


def test_a_later_call_repeats_the_work_of_the_first(tapes: list[object]) -> None:
    target, drafter = _pair()
    runs.both(target, drafter, **OPTIONS).assert_equal(is_kept=False)
    num_tapes = len(tapes)

    for seed in range(3):
        runs.both(target, drafter, make_prompt(9 + seed, seed), **OPTIONS).assert_equal(is_kept=False)

    assert num_tapes > 2
    assert len(tapes) == num_tapes
    assert len(states_of(target)) == 1


def _weights_moved(target: Any, _patch: pytest.MonkeyPatch) -> None:
    for weight in target.parameters():
        weight.data = weight.data * 1.5


def _weights_changed_in_place(target: Any, _patch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        for weight in target.parameters():
            weight.mul_(1.5)


def _another_attention(target: Any, _patch: pytest.MonkeyPatch) -> None:
    target.set_attn_implementation("eager")


def _another_type(target: Any, _patch: pytest.MonkeyPatch) -> None:
    target.float()


def _another_activation(target: Any, _patch: pytest.MonkeyPatch) -> None:
    for layer in target.model.layers:
        layer.mlp.act_fn = nn.Tanh()


def _another_forward_of_a_class(target: Any, patch: pytest.MonkeyPatch) -> None:
    kind = type(target.model.layers[0].mlp)
    usual = kind.forward
    patch.setattr(kind, "forward", lambda part, states: 0.25 * usual(part, states))


def _another_value_in_a_part(target: Any, _patch: pytest.MonkeyPatch) -> None:
    target.model.norm.variance_epsilon = 10.0


CHANGES = (
    _weights_moved,
    _weights_changed_in_place,
    _another_attention,
    _another_type,
    _another_activation,
    _another_forward_of_a_class,
    _another_value_in_a_part,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
def test_nothing_is_stale_after_the_target_changed(
    change: Callable[[Any, pytest.MonkeyPatch], None], tapes: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = _pair()
    runs.drafted(target, drafter, **OPTIONS)
    num_tapes = len(tapes)

    change(target, monkeypatch)
    drafter.to(target.dtype)
    pair = runs.both(target, drafter, **OPTIONS)

    pair.assert_equal(is_kept=False)
    assert (len(tapes) > num_tapes) == (change is not _weights_changed_in_place)


def test_a_forward_that_may_change_at_any_time_is_not_repeated() -> None:
    target, drafter = _pair()
    part = target.model.layers[0].mlp
    usual = part.forward
    part.forward = lambda states: usual(states)  # noqa: PLW0108

    reason = "the target has a forward put on `model.layers.0.mlp`, which a replay would leave out"
    with pytest.raises(GenerationError, match=reason):
        runs.drafted(target, drafter, **OPTIONS)


CUDA = torch.backends.cuda
KERNELS: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Any]] = {
    "cuDNN attention": (CUDA.cudnn_sdp_enabled, CUDA.enable_cudnn_sdp, not CUDA.cudnn_sdp_enabled()),
    "flash attention": (CUDA.flash_sdp_enabled, CUDA.enable_flash_sdp, not CUDA.flash_sdp_enabled()),
    "reductions in attention": (
        CUDA.fp16_bf16_reduction_math_sdp_allowed,
        CUDA.allow_fp16_bf16_reduction_math_sdp,
        not CUDA.fp16_bf16_reduction_math_sdp_allowed(),
    ),
    "reductions in bfloat16": (
        lambda: CUDA.matmul.allow_bf16_reduced_precision_reduction,
        lambda value: setattr(CUDA.matmul, "allow_bf16_reduced_precision_reduction", value),
        False,
    ),
    "TF32": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "TF32, as newer versions of PyTorch set it": (
        lambda: getattr(CUDA.matmul, "fp32_precision", None),
        lambda value: setattr(CUDA.matmul, "fp32_precision", value),
        "tf32",
    ),
    "determinism": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
}


@pytest.mark.parametrize("name", KERNELS)
def test_other_kernels_are_captured_anew(name: str) -> None:
    get, put, value = KERNELS[name]
    before = get()
    put(before)  # which PyTorch may note as chosen
    key = kernels_key()

    put(value)
    try:
        changed = kernels_key()
    finally:
        put(before)

    assert changed != key
    assert kernels_key() == key


class Foreign(LogitsProcessor):
    """Not known to work in fixed shapes."""

    def __call__(self, _ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def test_drafts_by_noise_are_captured_once_though_the_host_chooses(
    tapes: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    noise, held = sampling.multinomial_noise, []  # so that none is where another one was
    monkeypatch.setattr(sampling, "multinomial_noise", lambda *args: held.append(noise(*args)) or held[-1])
    target, drafter = _pair()
    options = {**OPTIONS, "do_sample": True, "logits_processor": LogitsProcessorList([Foreign()])}
    first = runs.both(target, drafter, **options)
    num_tapes = len(tapes)

    second = runs.both(target, drafter, **options)

    for pair in (first, second):
        pair.assert_equal(is_kept=False)
        assert "The host chooses tokens" in pair.stats.notes[0]
    assert len(tapes) == num_tapes


def test_nothing_is_stale_after_adapters_were_switched(tapes: list[object]) -> None:
    target, drafter = _pair()
    model = peft.get_peft_model(target, LORA)
    model.add_adapter("other", LORA)
    texts = []
    for name in ("default", "other", "default"):
        model.set_adapter(name)
        pair = runs.both(target, drafter, **OPTIONS)
        pair.assert_equal(is_kept=False)
        texts.append(pair.plain.sequences.tolist())
    with model.disable_adapter():
        runs.both(target, drafter, **OPTIONS).assert_equal(is_kept=False)
    assert texts[0] == texts[2] != texts[1]


def test_the_drafters_weights_may_change_too(tapes: list[object]) -> None:
    target, drafter = _pair()
    runs.drafted(target, drafter, **OPTIONS)
    for weight in drafter.parameters():
        weight.data = torch.randn_like(weight)

    fresh = _static(make_drafter(target, block_size=2))
    fresh.load_state_dict(drafter.state_dict())

    changed, expected = (runs.drafted(target, each, **OPTIONS).speculation for each in (drafter, fresh))
    assert changed.acceptance_histogram == expected.acceptance_histogram


@pytest.mark.parametrize("change", ["another attention", "an adapter"])
def test_a_drafter_that_changed_is_captured_anew(change: str, tapes: list[object]) -> None:
    target, drafter = _pair()
    runs.drafted(target, drafter, **OPTIONS)
    (before,), num_tapes = states_of(target), len(tapes)
    num_graphs = len(before.all_work)

    if change == "an adapter":
        drafter = _static(peft.get_peft_model(drafter, LORA).get_base_model())
    else:
        drafter.set_attn_implementation("eager")
    runs.drafted(target, drafter, **OPTIONS)

    (after,) = states_of(target)
    assert after is before
    assert len(after.all_work) == num_graphs  # those of before are gone
    assert len(tapes) > num_tapes


def test_a_second_call_at_the_same_time_grows_its_shapes() -> None:
    target, drafter = _pair()
    inner: list[Any] = []

    def other(ids: torch.Tensor, _scores: Any) -> torch.Tensor:
        if ids.shape[1] > 15 and not inner:
            thread = threading.Thread(target=lambda: inner.append(runs.seedless(target, drafter, **OPTIONS)))
            thread.start()
            thread.join()
        return torch.zeros(len(ids), dtype=torch.bool)

    outer = runs.drafted(target, drafter, stopping_criteria=StoppingCriteriaList([other]), **OPTIONS)

    plain = runs.plain(target, **OPTIONS).sequences.tolist()
    assert outer.sequences.tolist() == inner[0].sequences.tolist() == plain
    assert not outer.speculation.notes
    assert inner[0].speculation.notes == ["The step is not captured: another captured call decodes with the target."]
    runs.both(target, drafter, **OPTIONS).assert_equal(is_kept=False)
    assert not runs.drafted(target, drafter, **OPTIONS).speculation.notes


def test_a_hook_that_is_added_between_replays_is_told_of_and_the_next_call_obeys_it(tapes: list[object]) -> None:
    target, drafter = _pair()
    plain = runs.plain(target, **OPTIONS).sequences.tolist()

    def adds(ids: torch.Tensor, _scores: Any) -> torch.Tensor:
        if ids.shape[1] > 15 and not target.model.layers[0]._forward_hooks:
            target.model.layers[0].register_forward_hook(lambda _module, _inputs, output: output * 3)
        return torch.zeros(len(ids), dtype=torch.bool)

    during = runs.drafted(target, drafter, stopping_criteria=StoppingCriteriaList([adds]), **OPTIONS)
    drafter.generation_config.capture = "auto"
    later = runs.both(target, drafter, **OPTIONS)

    assert during.sequences.tolist() == plain  # replays know nothing of it
    assert during.speculation.notes == [CHANGED]
    assert later.plain.sequences.tolist() != plain
    later.assert_equal(is_kept=False)


def test_two_targets_are_captured_in_two_threads(tapes: list[object]) -> None:
    pairs, found = [_pair(), _pair()], {}
    start = threading.Barrier(len(pairs))

    def write(number: int) -> None:
        start.wait()
        found[number] = runs.seedless(*pairs[number], make_prompt(9, seed=number), **OPTIONS)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(len(pairs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for number, (target, _) in enumerate(pairs):
        plain = runs.plain(target, make_prompt(9, seed=number), **OPTIONS).sequences
        assert found[number].sequences.tolist() == plain.tolist()
        assert not found[number].speculation.notes
        (state,) = states_of(target)
        assert any(work.is_captured for work in state.all_work)


def test_a_call_that_ends_with_an_error_leaves_the_target_to_others() -> None:
    target, drafter = _pair()

    def fails(ids: torch.Tensor, _scores: Any) -> torch.Tensor:
        if ids.shape[1] > 15:
            raise KeyboardInterrupt
        return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.raises(KeyboardInterrupt):
        runs.drafted(target, drafter, stopping_criteria=StoppingCriteriaList([fails]), **OPTIONS)

    pair = runs.both(target, drafter, **OPTIONS)
    pair.assert_equal(is_kept=False)
    assert not pair.stats.notes


def test_what_is_kept_is_bounded_over_many_calls() -> None:
    target, drafter = _pair()
    draw = torch.Generator().manual_seed(0)
    for _ in range(24):
        num_rows, length, mode = (int(torch.randint(most, (), generator=draw)) for most in (4, 9, 4))
        prompt = torch.cat([make_prompt(4 + length, row) for row in range(num_rows + 1)])
        options: dict[str, Any] = [
            {},
            {"do_sample": True, "temperature": 0.5 + length / 10},
            {"repetition_penalty": 1.1 + length / 10},
            {"do_sample": True, "top_k": 3 + length},
        ][mode]
        runs.drafted(target, drafter, prompt, max_new_tokens=4, attention_mask=torch.ones_like(prompt), **options)

        assert len(states_of(target)) <= states.MOST_STATES
        for each in states_of(target):
            assert len(each.scorings) <= states.MOST_SCORINGS
            assert len(each.all_work) <= 2 + 2 * states.MOST_SCORINGS + 2 + 2 * MOST_DRAFTS

    release(target)
    assert not states_of(target)


def test_what_is_kept_of_a_target_is_released_through_its_adapter() -> None:
    target, drafter = _pair()
    model = peft.get_peft_model(target, LORA)
    runs.drafted(target, drafter, **OPTIONS)
    assert states_of(target)

    release(model)

    assert not states_of(target)
    runs.both(target, drafter, **OPTIONS).assert_equal(is_kept=False)


def test_memory_is_free_as_soon_as_it_is_released() -> None:
    target, drafter = _pair()
    runs.drafted(target, drafter, **OPTIONS)
    gc.collect()
    caches = [
        cache for each in states_of(target) for cache in (each.cache, *(of.cache for _, of in each._drafts.values()))
    ]
    held = [weakref.ref(layer.held["keys"]) for cache in caches for layer in cache.layers]
    del caches

    gc.disable()
    try:
        release(target)
        left = [ref() for ref in held if ref() is not None]
    finally:
        gc.enable()

    assert len(held) > 1
    assert not left


def test_nothing_names_the_models(tapes: list[object]) -> None:
    target, drafter = _pair()
    runs.drafted(target, drafter, do_sample=True, **OPTIONS)
    references = weakref.ref(target), weakref.ref(drafter)

    tapes.clear()  # they hold the operations' tensors, as graphs do
    del target, drafter
    gc.collect()

    assert [reference() for reference in references] == [None, None]


def test_a_text_that_outgrows_its_slots_goes_on(monkeypatch: pytest.MonkeyPatch, tapes: list[object]) -> None:
    monkeypatch.setattr(states, "BUCKETS", Shapes(is_exact=False, least_slots=16))
    monkeypatch.setattr(states, "MOST_AHEAD", 4)
    target, drafter = _pair()
    grown = []
    grow = StaticState.grow
    monkeypatch.setattr(StaticState, "grow", lambda self, capacity: (grown.append(capacity), grow(self, capacity)))

    runs.both(target, drafter, max_new_tokens=80).assert_equal(is_kept=False)

    assert grown == [64, 128]


def test_sizes_are_buckets() -> None:
    assert [bucket(num, NODE_BUCKETS) for num in (1, 2, 8, 9, 512)] == [1, 8, 8, 16, 512]
    assert [bucket(num, DEPTH_BUCKETS) for num in (0, 1, 5, 512)] == [0, 4, 8, 512]
    with pytest.raises(GenerationError, match="at most 512 nodes, and its tree that depth, but there are 513"):
        bucket(513, NODE_BUCKETS)
    assert [BUCKETS.slots(num) for num in (1, 256, 257, 1025)] == [256, 256, 512, 2048]
    assert [bucket(num, (7, 64)) for num in (1, 7, 8, 64)] == [7, 7, 64, 64]


def test_exact_shapes_round_up_slots_alone() -> None:
    assert [EXACT.slots(num) for num in (1, 64, 65, 257)] == [64, 64, 128, 320]
