"""Targets that are changed before or between calls, in ways that the package knows nothing of: the text stays theirs."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama import modeling_llama

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec.errors import TargetError
from transformers_falcon_spec.generation import probe as probe_file
from transformers_falcon_spec.generation.output import CHANGED
from transformers_falcon_spec.generation.probe import probe
from transformers_falcon_spec.generation.target_look import look_at

OWN = "own_attention"
PLAIN = "The target reads one token at a time, and nothing is drafted"
CHAINS, PATHS = "The target verifies chains only", "The target verifies one row for each path of a draft"
VECTOR = torch.randn(64, generator=torch.Generator().manual_seed(3)) * 3

Change = Callable[[PreTrainedModel, pytest.MonkeyPatch], Any]


def _steered(model: PreTrainedModel, steer: Callable[[Tensor], Tensor]) -> None:
    """Put a hook on the first layer."""
    model.model.layers[0].register_forward_hook(lambda _module, _inputs, output: steer(output))


def _newest_token_steered(model: PreTrainedModel, _monkeypatch: pytest.MonkeyPatch) -> None:
    _steered(model, lambda states: torch.cat([states[:, :-1], states[:, -1:] + VECTOR], dim=1))


def _single_tokens_steered(model: PreTrainedModel, _monkeypatch: pytest.MonkeyPatch) -> None:
    _steered(model, lambda states: states + VECTOR * (states.shape[1] == 1))


def _short_reads_steered(model: PreTrainedModel, _monkeypatch: pytest.MonkeyPatch) -> None:
    _steered(model, lambda states: states + VECTOR * (states.shape[1] < 6))


def _forward_put_on_a_layer(model: PreTrainedModel, _monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = model.model.layers[0].mlp
    stock = mlp.forward
    mlp.forward = lambda states: stock(states) - states.mean(dim=1, keepdim=True)


def _forward_of_a_class_replaced(_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(
        modeling_llama.LlamaMLP, "forward", lambda self, states: stock(self, states - states.mean(dim=1, keepdim=True))
    )


def _function_of_a_file_replaced(_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_llama,
        "apply_rotary_pos_emb",
        lambda query, *args: stock(query - query.mean(dim=2, keepdim=True), *args),
    )


def _part_replaced(model: PreTrainedModel, _monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixing(nn.Module):
        def forward(self, states: Tensor) -> Tensor:
            return states - states.mean(dim=1, keepdim=True)

    model.model.layers[1].mlp = Mixing()


def _attention_registered_anew(_model: PreTrainedModel, _monkeypatch: pytest.MonkeyPatch) -> None:
    def without_masks(
        module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, scaling: float | None = None, **kwargs: Any
    ) -> Any:
        num_nodes, num_slots = query.shape[2], key.shape[2]
        mask = torch.ones(num_nodes, num_slots, dtype=torch.bool).tril(
            num_slots - num_nodes
        )  # as a flash kernel has it
        return sdpa_attention_forward(module, query, key, value, mask[None, None], scaling=scaling, **kwargs)

    AttentionInterface.register(OWN, without_masks)


def _activations_quantised(model: PreTrainedModel, _monkeypatch: pytest.MonkeyPatch) -> None:
    class Rounded(nn.Linear):
        def forward(self, states: Tensor) -> Tensor:
            step = states.abs().max() / 7  # of all tokens that are read together
            return super().forward((states / step).round() * step)

    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = Rounded


def _lily_added(model: PreTrainedModel, _monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LilyConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(2)
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(0.4 * torch.randn(weight.shape))
    adapted.eval()


CHANGES: dict[str, Change] = {
    change.__name__.strip("_").replace("_", " "): change
    for change in (
        _newest_token_steered,
        _single_tokens_steered,
        _short_reads_steered,
        _forward_put_on_a_layer,
        _forward_of_a_class_replaced,
        _function_of_a_file_replaced,
        _part_replaced,
        _attention_registered_anew,
        _activations_quantised,
        _lily_added,
    )
}


def _target() -> PreTrainedModel:
    AttentionInterface.register(OWN, sdpa_attention_forward)
    AttentionMaskInterface.register(OWN, sdpa_mask)
    return make_target("llama", attn_implementation=OWN)


@pytest.mark.parametrize(
    ("num_rows", "is_known"), [(1, True), (3, False)]
)  # changed after the first call, and before it
@pytest.mark.parametrize("name", CHANGES)
def test_the_text_is_that_of_the_changed_target_and_a_note_says_how_it_reads(
    name: str, is_known: bool, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompt = _target(), torch.cat([make_prompt(9, seed) for seed in range(num_rows)])
    if is_known:
        runs.drafted(target, RandomDrafter(), prompt, max_new_tokens=4)
    CHANGES[name](target, monkeypatch)
    gold = runs.plain(target, prompt)

    pair = runs.both(target, InformedDrafter(RandomDrafter(tune=False), gold.sequences), prompt)

    pair.assert_equal(is_kept=False)
    (note,) = pair.stats.notes
    assert note.split(":")[0] in {PLAIN, CHAINS, PATHS}


def test_a_hook_that_reads_each_token_by_itself_leaves_trees() -> None:
    target = make_target("llama")
    _steered(target, lambda states: states + VECTOR)
    gold = runs.plain(target)

    pair = runs.both(target, InformedDrafter(make_drafter(target), gold.sequences))

    pair.assert_equal()
    assert pair.stats.notes == []


@pytest.mark.parametrize("length", [2, 5, 12])
def test_a_hook_that_tells_the_prompt_by_its_length_is_shown_no_draft_of_that_length(length: int) -> None:
    target, prompt = make_target("llama"), make_prompt(length)
    _steered(target, lambda states: states + VECTOR * (states.shape[1] < length))
    gold = runs.plain(target, prompt)

    pair = runs.both(target, InformedDrafter(RandomDrafter(num_nodes=16, tune=False), gold.sequences), prompt)

    pair.assert_equal(is_kept=False)


def test_a_target_that_reads_a_text_otherwise_each_time_is_refused() -> None:
    target = make_target("llama")
    _steered(target, lambda states: states + torch.randn(states.shape))

    with pytest.raises(
        TargetError, match=r"cannot verify drafts.*Read twice one token at a time, its logits differ by"
    ):
        runs.drafted(target, RandomDrafter())


def test_what_a_hook_does_from_now_on_is_seen_at_the_next_call() -> None:
    target, strength = make_target("llama"), [0.0]
    _steered(target, lambda states: states + VECTOR * strength[0] * (states.shape[1] == 1))
    runs.drafted(target, RandomDrafter())
    strength[0] = 1.0
    gold = runs.plain(target)

    pair = runs.both(target, InformedDrafter(RandomDrafter(tune=False), gold.sequences))

    pair.assert_equal(is_kept=False)
    assert pair.stats.notes[0].startswith(PLAIN)


class _Fed(LogitsProcessor):
    """Adds to the scores what a hook has kept of the newest forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.kept: Tensor | None = None
        model.model.norm.register_forward_hook(self._keep)

    def _keep(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        self.kept = output[:, -1].mean(-1, keepdim=True)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert self.kept is not None
        return scores + 40 * self.kept * torch.arange(scores.shape[-1]).sin()


@pytest.mark.parametrize(("num_rows", "is_known"), [(1, True), (3, False)])
def test_a_processor_that_reads_what_a_hook_keeps_is_shown_each_token_alone(num_rows: int, is_known: bool) -> None:
    target, prompt = make_target("llama"), torch.cat([make_prompt(9, seed) for seed in range(num_rows)])
    drafter = make_drafter(target)
    if is_known:
        runs.drafted(target, drafter, prompt, max_new_tokens=4)
    stock = runs.plain(target, prompt).sequences
    fed = LogitsProcessorList([_Fed(target)])
    gold = runs.plain(target, prompt, logits_processor=fed)

    pair = runs.both(target, InformedDrafter(drafter, gold.sequences), prompt, logits_processor=fed)

    pair.assert_equal(is_kept=False)
    assert not gold.sequences.equal(stock)
    assert pair.stats.notes == [f"{PLAIN}: `_Fed` may look at what a hook on `model.norm` keeps of each token."]


def test_nothing_is_probed_anew_of_a_target_that_writes_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = make_target("llama"), RandomDrafter(feature_layers=(1, -1))
    runs.plain(target, output_hidden_states=True)  # for which Transformers sets the model up once
    runs.drafted(target, drafter)
    monkeypatch.setattr(probe_file, "_probe", None)

    for options in ({}, runs.SAMPLING, {"output_hidden_states": True}):
        runs.plain(target, **options)
        runs.drafted(target, drafter, **options)


def test_asking_for_the_annotations_of_a_class_changes_nothing() -> None:
    """Python then adds them to a class that has none, so that the class holds something new."""
    target = make_target()
    before = look_at(target).key

    bases = type(target).__mro__[:-1]
    held = [len(vars(base)) for base in bases]
    assert all(base.__annotations__ is not None for base in bases)

    assert [len(vars(base)) for base in bases] != held or all("__annotations__" in vars(base) for base in bases)
    assert look_at(target).key == before


def test_an_adapter_that_is_switched_merged_or_scaled_makes_another_target() -> None:
    peft = pytest.importorskip("peft")
    target = make_target("llama")
    looks = [look_at(target).key]
    adapted = peft.get_peft_model(target, peft.LoraConfig(target_modules=["q_proj"]))
    looks.append(look_at(target).key)
    adapted.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"]))
    looks.append(look_at(target).key)
    adapted.set_adapter("other")
    looks.append(look_at(target).key)
    layer = next(part for part in target.modules() if hasattr(part, "merged_adapters"))
    layer.set_scale("other", 0.5)
    looks.append(look_at(target).key)
    adapted.merge_adapter()
    looks.append(look_at(target).key)

    assert len(set(looks)) == len(looks)
    assert look_at(target).key == looks[-1]


def test_a_look_at_thirty_layers_calls_few_functions() -> None:
    target, calls = make_target("llama", num_hidden_layers=30), [0]
    num_parts = len(list(target.modules()))

    def count(_frame: Any, event: str, _arg: Any) -> None:
        calls[0] += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        look_at(target)
    finally:
        sys.setprofile(None)

    assert calls[0] < 25 * num_parts


def test_a_probe_is_asked_about_hooks_of_others_alone() -> None:
    target = make_target("llama")
    target.register_forward_hook(lambda *_: None)

    assert look_at(target).foreign == "a hook on `LlamaForCausalLM`"
    assert probe(target) is not probe(target)


class _Switches(BaseStreamer):
    """Turns an adapter off after some tokens."""

    def __init__(self, adapted: Any) -> None:
        self.adapted, self.num_chunks = adapted, 0

    def put(self, value: Tensor) -> None:
        self.num_chunks += 1
        if self.num_chunks == 4:
            self.adapted.base_model.disable_adapter_layers()

    def end(self) -> None:
        """Nothing is left to do."""


def test_an_adapter_that_is_switched_in_the_middle_of_a_call_is_told_of() -> None:
    peft = pytest.importorskip("peft")
    target = make_target("llama")
    adapted = peft.get_peft_model(target, peft.LoraConfig(target_modules=["q_proj"])).eval()

    usual = runs.drafted(target, RandomDrafter()).speculation.notes
    switched = runs.drafted(target, RandomDrafter(), streamer=_Switches(adapted)).speculation.notes

    assert usual == []
    assert switched == [CHANGED]
