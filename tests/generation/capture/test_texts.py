"""Texts of captured steps: those of the target alone, for every family whose steps can be captured."""

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXJapaneseConfig, GPTQConfig, PreTrainedModel

from tests import runs, tape
from tests.batches import batch_and_drafted
from tests.doubles import InformedDrafter, RandomDrafter
from tests.every_drafter import KINDS, every_drafter
from tests.families import CHAINS, DRAFTED, FAMILIES
from tests.pairs import in_turn
from tests.tiny import in_double, make_prompt, make_target, peaked
from transformers_falcon_spec.errors import GenerationError
from transformers_falcon_spec.generation.capture import acceptor
from transformers_falcon_spec.generation.capture.state import release
from transformers_falcon_spec.generation.slot_cache import NODE_BUCKETS, bucket
from transformers_falcon_spec.generation.target import Target

# Families that cannot, and what the error says of them; all others can.
TREELESS = "the target cannot read trees"
INELIGIBLE = {
    **dict.fromkeys(("bloom", "gpt_neo", "mpt", "falcon_alibi", *CHAINS), TREELESS),
    "deepseek_v32_sparse": "the target chooses tokens by an index, which empty slots may turn",
    "longcat_flash": "the target asks the host which of its experts have tokens",
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "temperature 1": {"do_sample": True},
    "penalty": {"do_sample": True, "top_p": 0.9, "repetition_penalty": 1.2, "min_new_tokens": 4},
}
FIXED = [kind for kind in KINDS if not kind.startswith(("lookahead", "diffusion"))]


@lru_cache(maxsize=1)  # the tests of one family come one after the other
def _target(family: str) -> PreTrainedModel:
    return in_double(make_target(family, seed=7))


def _static(drafter: Any) -> Any:
    drafter.generation_config.capture = True
    return drafter


@pytest.fixture
def device_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The nodes of each draft that was accepted on the device."""
    steps: list[int] = []
    accept = acceptor.DeviceAcceptor.accept

    def counted(self: Any, draft: Any, *rest: Any) -> Any:
        steps.append(draft.token_ids.shape[1])
        return accept(self, draft, *rest)

    monkeypatch.setattr(acceptor.DeviceAcceptor, "accept", counted)
    return steps


# What the target reads is the same in both modes, so that one will do by default.
@pytest.mark.parametrize("mode", [pytest.param("greedy", marks=pytest.mark.slow), "sampling"])
@pytest.mark.parametrize("family", [family for family in DRAFTED if family not in INELIGIBLE])
def test_the_text_is_the_targets_own(family: str, mode: str, device_steps: list[int]) -> None:
    options = {"max_new_tokens": 16, **MODES[mode]}
    target = _target(family)

    pair = runs.informed(target, _static(RandomDrafter(num_nodes=12)), **options)

    pair.assert_equal()
    assert max(device_steps) > 1
    assert pair.stats.num_accepted > 0


@pytest.mark.parametrize("family", INELIGIBLE)
def test_other_families_are_named_with_the_reason(family: str) -> None:
    with pytest.raises(GenerationError, match=f"`capture=True`.*{INELIGIBLE[family]}"):
        runs.drafted(_target(family), _static(RandomDrafter()))


WHOLE_MODELS = ("layers in parallel",)


@pytest.mark.families
@pytest.mark.parametrize(
    ("kind", "mode", "num_rows"),
    [
        *((kind, mode, 1) for kind, mode in in_turn(FIXED, ("greedy", "penalty"))),
        *((kind, "temperature 1", 3) for kind in WHOLE_MODELS),
        *(pytest.param(kind, "greedy", 3, marks=pytest.mark.slow) for kind in WHOLE_MODELS),
    ],
)
def test_drafts_in_fixed_shapes_are_those_in_growing_ones(
    kind: str, mode: str, num_rows: int, device_steps: list[int]
) -> None:
    target, prompt = _target("llama"), torch.cat([make_prompt(seed=row) for row in range(num_rows)])
    mask = torch.ones_like(prompt)
    mask[-1, : 5 * (num_rows > 1)] = 0
    drafter, options = every_drafter(kind, target), {"max_new_tokens": 32, "attention_mask": mask, **MODES[mode]}
    options_of = getattr(drafter, "get_base_model", lambda: drafter)().generation_config
    options_of.tune, options_of.capture = False, False
    growing = runs.drafted(target, drafter, prompt, **options)
    options_of.capture = True

    fixed = runs.drafted(target, drafter, prompt, **options)

    assert fixed.sequences.tolist() == growing.sequences.tolist()
    if num_rows == 1 or not options.get("do_sample"):  # plain decoding draws for all rows at once
        assert fixed.sequences.tolist() == runs.plain(target, prompt, **options).sequences.tolist()
    stats, expected = fixed.speculation, growing.speculation
    assert not stats.notes
    assert stats.num_drafted == expected.num_drafted > 0
    assert stats.acceptance_histogram == expected.acceptance_histogram
    assert max(device_steps) > 1


@pytest.mark.families
@pytest.mark.parametrize("num_rows", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind == "layers in parallel" else kind for kind in FIXED]
)
def test_a_replay_repeats_the_step(kind: str, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = _target("llama")
    drafter, options = every_drafter(kind, target), {"max_new_tokens": 24, **MODES["penalty"]}
    prompt = torch.cat([make_prompt(seed=row) for row in range(num_rows)])
    mask = torch.ones_like(prompt)
    mask[-1, : 5 * (num_rows > 1)] = 0
    inner = getattr(drafter, "get_base_model", lambda: drafter)()
    inner.generation_config.tune, inner.generation_config.capture = False, True
    eager = runs.drafted(target, drafter, prompt, attention_mask=mask, **options)
    release(target)  # so that everything is captured
    tapes = tape.install(monkeypatch)

    replayed = runs.drafted(target, drafter, prompt, attention_mask=mask, **options)

    assert len(tapes) > 2  # reading, accepting and drafting
    assert replayed.sequences.tolist() == eager.sequences.tolist()
    assert replayed.speculation.acceptance_histogram == eager.speculation.acceptance_histogram
    assert replayed.speculation.num_drafted == eager.speculation.num_drafted > 0
    release(target)  # the tapes are of this test


def test_what_rejected_nodes_leave_spoils_no_later_read(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = Target.keep

    def overflowing(self: Target, num_nodes: int, paths: Any) -> None:
        keep(self, num_nodes, paths)
        if self.fixed is None:
            return
        cache, num_kept = self.fixed.state.cache, torch.tensor(list(map(len, paths)))[:, None]
        behind = torch.arange(cache.capacity) - cache.lengths
        is_rejected = (behind >= 0) & (behind < bucket(num_nodes, NODE_BUCKETS) - num_kept)
        for layer in cache.layers:
            for states in layer.held.values():
                states.masked_fill_(is_rejected[:, None, :, None], torch.nan)

    monkeypatch.setattr(Target, "keep", overflowing)
    target, prompt = _target("llama"), torch.cat([make_prompt(seed=row) for row in range(2)])
    plain = runs.plain(target, prompt).sequences
    sizes = RandomDrafter(num_nodes=12, proposals=0.5, tune=False)  # plain steps between those of trees

    pair = runs.both(target, _static(InformedDrafter(sizes, plain)), prompt)

    pair.assert_equal()
    assert 0 < len(sizes.generators[-1].drafts) < len(sizes.generators[-1].commits) - 1


def test_rows_of_a_target_that_takes_their_keys_in_one_piece_are_not_captured() -> None:
    fields = {**FAMILIES["rembert"].fields, "num_hidden_layers": 3, "intermediate_multiple_size": 2}
    target = peaked(AutoModelForCausalLM.from_config(GPTNeoXJapaneseConfig(**fields)))
    drafter = _static(every_drafter("falcon", target))

    runs.informed(target, drafter).assert_equal()
    with pytest.raises(GenerationError, match="takes keys of several rows in one piece alone"):
        batch_and_drafted(target, drafter)
    drafter.generation_config.capture = False
    batch_and_drafted(target, drafter).assert_equal()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a hook", "`layers.0` of the drafter has a hook, which a replay would leave out"),
        ("a quantizer", "the drafter's weights are quantised by GPTQConfig, whose forwards were never captured"),
    ],
)
def test_drafts_of_a_drafter_that_a_replay_would_change_grow(name: str, reason: str) -> None:
    target, calls = _target("llama"), []
    drafter = _static(every_drafter("falcon", target))
    drafter.generation_config.tune = False
    if name == "a hook":
        drafter.layers[0].register_forward_hook(lambda *_: calls.append(1))
    else:
        drafter.hf_quantizer = SimpleNamespace(quantization_config=GPTQConfig(bits=4))

    pair = runs.both(target, drafter)

    pair.assert_equal(is_kept=False)
    assert pair.stats.notes == [f"Drafts are not captured: {reason}."]
    assert name != "a hook" or len(calls) >= pair.stats.num_passes > 0
