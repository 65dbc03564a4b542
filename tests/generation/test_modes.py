"""Train and eval mode: whatever a drafter is in, text and random state are as without it, and it finds its mode again."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import LogitsProcessorList

from tests import runs
from tests.doubles import RandomDrafter
from tests.every_drafter import KINDS, every_drafter, informed_of
from tests.interrupts import interrupted_everywhere
from tests.tiny import make_drafter, make_target
from tests.training.runs import make_trainer
from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.drafters.autoregressive import make_draft_model
from transformers_falcon_spec.drafters.dflash import make_dflash
from transformers_falcon_spec.errors import GenerationError
from transformers_falcon_spec.generation import modes as modes_module
from transformers_falcon_spec.generation.adapters import unwrapped
from transformers_falcon_spec.generation.modes import attribute_set, in_eval_mode
from transformers_falcon_spec.generation.probe import probe

SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 0}
DRAWN = ("falcon", "falcon, a state at each token", "eagle-1", "eagle-3", "medusa", "layers in parallel")
MADE: dict[str, Callable[[Any], Any]] = {
    **KINDS,
    "small model": lambda target: make_draft_model(target, num_hidden_layers=1),
    "dflash, stock": lambda target: make_dflash(target, num_hidden_layers=1, block_size=3, target_layer_ids=[0]),
}
del MADE["with an adapter"]  # made of a drafter, and in the mode that this wrapper starts in


CALLS = [  # train mode is where something could go wrong; all other tests draft in eval mode
    pytest.param(SAMPLED, True, id="sampled-train"),
    pytest.param({"do_sample": False}, True, id="greedy-train", marks=pytest.mark.slow),
    pytest.param(SAMPLED, False, id="sampled-eval", marks=pytest.mark.slow),
    pytest.param({"do_sample": False}, False, id="greedy-eval", marks=pytest.mark.slow),
]
RULES = [
    pytest.param(kind, verifier, marks={"falcon": (), "medusa": pytest.mark.families}.get(kind, pytest.mark.slow))
    for verifier in ("gumbel", "recursive_rejection", "traversal")
    for kind in (KINDS if verifier == "gumbel" else DRAWN)
]


@pytest.fixture(scope="module")
def target() -> Any:
    return make_target(num_hidden_layers=3).double()


def modes(drafter: Any) -> list[bool]:
    """The mode of each part."""
    return [part.training for part in drafter.modules()]


@pytest.mark.parametrize("kind", MADE)
def test_a_new_drafter_is_in_eval_mode_whatever_the_target_is_in(kind: str) -> None:
    target = make_target(num_hidden_layers=3).train()

    assert not any(modes(MADE[kind](target)))


def test_making_a_small_model_draws_what_its_weights_need_and_no_more() -> None:
    """A first forward finds out whether the layers fit together; with dropout it would draw in train mode."""
    states = []
    for dropout in (0.0, 0.5):
        torch.manual_seed(0)
        make_draft_model(make_target("gpt2"), num_hidden_layers=1, attn_pdrop=dropout, resid_pdrop=dropout)
        states.append(torch.get_rng_state())

    assert states[0].equal(states[1])


@pytest.mark.parametrize(("mode", "is_training"), CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_text_and_random_state_are_those_of_the_target_whatever_mode_the_drafter_is_in(
    kind: str, mode: dict[str, Any], is_training: bool, target: Any
) -> None:
    drafter = every_drafter(kind, target).train(is_training)
    gold, before = runs.plain(target, **mode).sequences, modes(drafter)

    pair = runs.both(target, informed_of(unwrapped(drafter), gold), **mode)

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1
    assert modes(drafter) == before


@pytest.mark.parametrize(("kind", "verifier"), RULES)
def test_rules_with_draws_of_their_own_write_one_text_in_both_modes(kind: str, verifier: str, target: Any) -> None:
    """`gumbel`: that of seed and target, whoever drafts. The others: that of the drafts, which are the same."""
    drafter = every_drafter(kind, target)
    unwrapped(drafter).generation_config.verifier = verifier
    outcomes = []

    for is_training in (False, True):
        drafter.train(is_training)
        out = runs.drafted(target, drafter, max_new_tokens=80, **SAMPLED)
        outcomes.append((out.sequences.tolist(), torch.get_rng_state().tolist(), out.speculation.num_accepted))

    assert outcomes[0] == outcomes[1]
    if verifier == "gumbel":
        other = RandomDrafter()
        other.generation_config = SpeculationConfig(verifier="gumbel")
        out = runs.drafted(target, other, max_new_tokens=80, **SAMPLED)
        assert outcomes[0][:2] == (out.sequences.tolist(), torch.get_rng_state().tolist())
    else:
        assert outcomes[0][2] > 0


def test_calls_that_overlap_share_a_drafter_that_gets_its_modes_back_after_the_last() -> None:
    drafter = make_drafter(make_target()).train()
    drafter.layers[0].eval()
    before, seen = modes(drafter), []
    entered, left = threading.Barrier(2), threading.Event()

    def first() -> None:
        with in_eval_mode(drafter):
            entered.wait()
            left.wait()
            seen.append(modes(drafter))  # the other call is over

    def second() -> None:
        with in_eval_mode(drafter):
            entered.wait()
            seen.append(modes(drafter))
        seen.append(modes(drafter))  # this call is over, the other is not
        left.set()

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [any(each) for each in seen] == [False, False, False]
    assert modes(drafter) == before
    assert any(before)
    assert not all(before)


def test_a_drafter_that_another_thread_trains_during_a_call_stays_in_train_mode() -> None:
    drafter = make_drafter(make_target()).eval()

    with in_eval_mode(drafter):
        drafter.train()

    assert all(modes(drafter))


def test_a_part_that_a_running_call_holds_stays_in_eval_mode_until_the_last_call_ends() -> None:
    drafter = make_drafter(make_target()).train()
    first, second = in_eval_mode(drafter), in_eval_mode(drafter)

    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)

    assert not any(modes(drafter))
    second.__exit__(None, None, None)
    assert all(modes(drafter))


def test_an_interrupt_before_any_line_leaves_nothing_of_a_call() -> None:
    owner = SimpleNamespace(attention="flash")
    num_lines = 0

    for number in interrupted_everywhere(lambda: attribute_set(owner, "attention", "sdpa")):
        num_lines += 1
        assert (number, owner.attention, modes_module._CHANGES) == (number, "flash", {})
        with attribute_set(owner, "attention", "sdpa"):
            assert owner.attention == "sdpa"
        assert owner.attention == "flash"

    assert num_lines > 25


def test_an_interrupt_before_any_line_leaves_the_calls_beside_it_alone() -> None:
    owner = SimpleNamespace(attention="flash")
    num_lines = 0

    for number in interrupted_everywhere(lambda: attribute_set(owner, "attention", "sdpa")):
        num_lines += 1
        with attribute_set(owner, "attention", "sdpa"):
            assert (number, owner.attention) == (number, "sdpa")
        assert (number, owner.attention, modes_module._CHANGES) == (number, "flash", {})
    with attribute_set(owner, "attention", "sdpa"):
        for number in interrupted_everywhere(lambda: attribute_set(owner, "attention", "sdpa")):
            assert (number, owner.attention) == (number, "sdpa")

    assert num_lines > 25
    assert (owner.attention, modes_module._CHANGES) == ("flash", {})


def test_an_interrupt_before_any_line_leaves_a_drafter_in_the_modes_that_it_had() -> None:
    drafter = nn.Sequential(nn.Dropout(), nn.Linear(2, 2).eval())
    before, num_lines = modes(drafter), 0

    for number in interrupted_everywhere(lambda: in_eval_mode(drafter)):
        num_lines += 1
        assert (number, modes(drafter), modes_module._CHANGES) == (number, before, {})
        assert modes_module._LOCK.acquire(blocking=False)
        modes_module._LOCK.release()

    assert num_lines > 40


def test_a_call_that_fails_gives_the_modes_back() -> None:
    target, drafter = make_target(), make_drafter(make_target()).train()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        runs.drafted(target, drafter, logits_processor=LogitsProcessorList([fail]))

    assert all(modes(drafter))


def test_the_stock_loop_drafts_in_eval_mode_too() -> None:
    target = make_target()
    drafter = make_drafter(target, block_size=2, recurrent_dropout=0.5).train()
    prompt = runs.make_prompt()
    states = target(prompt, output_hidden_states=True)
    state = torch.get_rng_state()
    view = runs.prefilled(target, prompt)
    view.feature_dim = drafter.feature_size
    generator = drafter.candidate_generator(view, 40, torch.Generator())

    generator.get_candidates(prompt, is_first_iteration=True)
    with torch.no_grad():
        ids, _ = generator.get_candidates(torch.cat([prompt, prompt[:, :1]], dim=-1), {}, states)

    assert ids.shape[1] > prompt.shape[1] + 1
    assert torch.get_rng_state().equal(state)
    assert all(modes(drafter))


@pytest.mark.training
def test_an_evaluation_that_decodes_leaves_the_drafter_in_train_mode(tmp_path: Path) -> None:
    seen: list[bool] = []
    trainer = make_trainer(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1, eval_decode_prompts=1)
    learn = trainer.training_step

    def noted(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        loss = learn(model, *args, **kwargs)
        trainer.features.target.generate(
            runs.make_prompt(), assistant_model=trainer.model, max_new_tokens=4, do_sample=False
        )
        seen.append(all(modes(trainer.model)))
        return loss

    trainer.training_step = noted
    trainer.train()

    assert seen == [True, True]


DROPS = {  # targets of families that draw in train mode, each in a way of its own
    "gpt2": {},
    "llama": {"attention_dropout": 0.1},
}


@pytest.mark.parametrize("family", DROPS)
def test_a_target_that_draws_in_train_mode_is_refused_before_anything_is_drawn(family: str) -> None:
    target = make_target(family, **DROPS[family]).train()
    drafter, state = RandomDrafter(), torch.get_rng_state()

    message = (
        rf"`{type(target).__name__}` is in train mode and draws from the random stream \(dropout\).*`target\.eval\(\)`"
    )
    with pytest.raises(GenerationError, match=message):
        target.generate(runs.make_prompt(), assistant_model=drafter, max_new_tokens=8)
    with pytest.raises(GenerationError, match=message):
        probe(target)

    assert torch.get_rng_state().equal(state)
    assert all(modes(target))
    runs.informed(target.eval(), RandomDrafter()).assert_equal()


def test_a_part_of_the_target_in_train_mode_counts() -> None:
    target = peft.get_peft_model(make_target(), peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)).eval()
    runs.informed(target, RandomDrafter()).assert_equal()
    for name, part in target.named_modules():
        part.training = "lora_dropout" in name

    with pytest.raises(GenerationError, match="is in train mode and draws"):
        runs.drafted(target, RandomDrafter())


@pytest.mark.parametrize("mode", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
def test_a_target_that_reads_the_same_in_train_mode_is_served(mode: dict[str, Any]) -> None:
    target = make_target().double().train()
    gold = runs.plain(target, **mode).sequences

    pair = runs.both(target, informed_of(make_drafter(target, block_size=2), gold), **mode)

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1
    assert all(modes(target))


def test_a_target_that_recomputes_its_activations_is_refused_in_train_mode_alone() -> None:
    target = make_target().double()
    target.gradient_checkpointing_enable()

    with pytest.raises(
        GenerationError, match=r"needs the target's cache, but `Llama.*gradient checkpointing.*target\.eval"
    ):
        runs.drafted(target.train(), RandomDrafter())

    runs.informed(target.eval(), RandomDrafter()).assert_equal()
