"""What the probe says of targets that can and cannot verify trees."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests import runs
from tests.batches import Prompts, batch_and_drafted
from tests.doubles import RandomDrafter
from tests.families import BESIDE, FAMILIES
from tests.thresholds import thresholds
from tests.tiny import CHAIN_FAMILIES, TREE_FAMILIES, in_double, make_drafter, make_prompt, make_target, peaked
from tests.trials.changes import CHANGES
from transformers_falcon_spec.errors import TargetError
from transformers_falcon_spec.generation import probe as probe_file
from transformers_falcon_spec.generation.probe import probe


@pytest.mark.parametrize("family", TREE_FAMILIES)
def test_targets_that_read_trees_right_are_known(family: str) -> None:
    capability = probe(make_target(family))

    assert capability.form == "tree"
    assert capability.tree_error <= 1e-3 * capability.control_error


@pytest.mark.parametrize("family", CHAIN_FAMILIES)
def test_targets_that_count_slots_get_chains(family: str) -> None:
    capability = probe(make_target(family))

    assert capability.form != "tree"
    assert capability.reason.startswith(("a tree's logits are off by", "reading a tree failed"))


DRAFTED = {"tree", "paths", "chain"}  # forms


@pytest.mark.parametrize("family", [name for name, row in BESIDE.items() if row.form != "refused"])
def test_targets_that_read_in_ways_of_their_own_write_their_own_text(family: str) -> None:
    model = make_target(family, seed=7)
    assert probe(model).form == BESIDE[family].form
    target = model if family == "prophetnet" else in_double(model)  # whose mask overflows in double precision

    drafters = RandomDrafter(num_nodes=12), RandomDrafter(num_nodes=12, proposals=0.5), make_drafter(target)
    for drafter in drafters:  # a root alone is read without a mask
        pair = runs.informed(target, drafter, do_sample=True)
        pair.assert_equal(is_kept=BESIDE[family].form != "plain")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mistral", "sliding_window"),
        ("gemma3", "sliding_window"),
        ("llama4", "attention_chunk_size"),
        ("zaya", "sliding_window"),
        ("inkling", "sliding_window_size"),
        ("moshi", "sliding_window"),
    ],
)
def test_a_window_that_the_probe_does_not_reach_is_kept_to(family: str, name: str) -> None:
    target = in_double(make_target(family, seed=7, **{name: 40}))

    pair = runs.informed(target, RandomDrafter(num_nodes=12, proposals=0.3), make_prompt(34), max_new_tokens=40)

    pair.assert_equal()


def test_a_padded_row_that_is_scaled_by_its_columns_keeps_them() -> None:
    target = in_double(
        make_target("inkling", attn_implementation="sdpa", log_scaling_n_floor=16, log_scaling_alpha=4.0)
    )
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[0, :4] = 0

    for seed in range(3):
        runs.informed(target, RandomDrafter(num_nodes=12), seed=seed, attention_mask=mask).assert_equal()


def test_a_target_is_probed_once_for_each_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    model, probed = make_target("llama"), probe_file._probe
    calls: list[float] = []
    monkeypatch.setattr(probe_file, "_probe", lambda *args: [calls.append(1), probed(*args)][1])

    first = probe(model)
    again = probe(model)

    assert again is first
    assert len(calls) == 1
    probe(model.double())
    assert len(calls) == 2


def test_two_targets_are_probed_apart() -> None:
    assert probe(make_target("llama")).form == "tree"
    assert probe(make_target("bloom")).form != "tree"


def test_probing_draws_nothing() -> None:
    model, before = make_target("llama"), torch.get_rng_state()

    probe(model)

    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("scaling", ["longrope", "dynamic"])
def test_probing_leaves_no_frequencies_behind(scaling: str) -> None:
    model = make_target("llama", **thresholds("llama", 8)[scaling])  # fewer tokens than the probe reads

    def kept() -> dict[str, list[str]]:
        return {name: sorted(vars(part)) for name, part in model.named_modules()}

    before, frequencies = kept(), model.model.rotary_emb.inv_freq.clone()

    probe(model)

    assert kept() == before
    assert model.model.rotary_emb.inv_freq.equal(frequencies)


def test_a_slip_in_code_of_the_target_that_the_probe_meets_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_target("llama")
    forward, longest = model.model.forward, 10

    def slipping(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[-1] > longest:
            raise UnboundLocalError("a local variable")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", slipping)

    capability = probe(model)
    assert capability.form == "plain"
    assert "reading a chain failed: a local variable" in capability.reason

    longest = 4
    model.double()  # which is probed anew
    with pytest.raises(TargetError, match=r"generate without `assistant_model`.* fails: a local variable"):
        probe(model)


def test_a_head_that_cannot_be_used_alone_is_a_fault_that_drafts_do_not_need_to_mind() -> None:
    model = make_target("llama")
    model.register_forward_hook(lambda _module, _inputs, output: replace(output, logits=output.logits * 3))

    capability = probe(model)

    assert capability.form == "tree"
    assert capability.head_fault.startswith("what its last hidden state gives is off by")


def test_a_target_that_cannot_even_read_chains_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = SimpleNamespace(read=lambda *_a, **_k: SimpleNamespace(logits=torch.zeros(1, 5, 97)), keep=lambda *_: None)
    monkeypatch.setattr(probe_file, "_prefilled", lambda *_: wrong)

    with pytest.raises(
        TargetError, match=r"`LlamaForCausalLM` cannot verify drafts: generate without `assistant_model`\."
    ):
        probe(make_target("llama"))


@pytest.mark.skipif(not hasattr(transformers, "DoryConfig"), reason="Dory is of Transformers 5.24")
def test_a_target_that_reads_its_cache_by_itself_is_left_to_write_alone() -> None:
    layers = {"num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1}
    fields = FAMILIES["qwen3"].fields | layers | {"recurrent_kv_cache_mode": "last_loop"}
    target = peaked(AutoModelForCausalLM.from_config(transformers.DoryConfig(**fields)))

    assert probe(target).form == "plain"
    runs.informed(target, RandomDrafter()).assert_equal(is_kept=False)


@pytest.mark.skipif(not hasattr(transformers, "GraniteSWAConfig"), reason="GraniteSWA is of Transformers 5.24")
def test_where_padding_makes_no_numbers_the_answer_is_that_of_other_texts() -> None:
    fields = FAMILIES["qwen3"].fields | {"sliding_window": 8}
    target = in_double(peaked(AutoModelForCausalLM.from_config(transformers.GraniteSWAConfig(**fields))))

    assert probe(target, is_padded=True).form == "tree"
    batch_and_drafted(target).assert_equal(is_kept=False)


@pytest.mark.parametrize("family", [name for name in ("marian", "roformer", "git") if BESIDE[name].form in DRAFTED])
def test_a_target_that_counts_or_reads_padding_is_drafted_for_without_it_alone(family: str) -> None:
    target = in_double(make_target(family, seed=7, attn_implementation="eager"))
    padded = Prompts.of((12, 5))

    alone = runs.informed(target, RandomDrafter(12), padded.ids[1:], attention_mask=padded.mask[1:])
    batch = batch_and_drafted(target)
    whole = batch_and_drafted(target, lengths=(9, 9, 9))

    alone.assert_equal(is_kept=False)
    batch.assert_equal(is_kept=False)
    assert "nothing is drafted: even a chain's logits are off" in batch.stats.notes[0]
    whole.assert_equal()


@pytest.mark.parametrize("num_positions", [5, 8, 10, 24])
@pytest.mark.parametrize("family", ["gpt2", "gpt_bigcode", "opt", "gptj", "codegen", "rembert", "gpt_neo", "mpt"])
def test_a_target_of_few_positions_is_read_within_them(family: str, num_positions: int) -> None:
    usual = probe(make_target(family))

    few = probe(make_target(family, **thresholds(family, num_positions)["positions"]))

    assert (few.form, few.batch_form) == (usual.form, usual.batch_form)


@pytest.mark.parametrize("family", ["gpt2", "mpt"])
def test_a_target_of_hardly_any_positions_is_refused_in_words(family: str) -> None:
    target = make_target(family, **thresholds(family, 4)["positions"])

    with pytest.raises(TargetError, match=r"It has positions for 4 tokens, and trying it takes 5\."):
        probe(target)


def test_a_target_whose_batches_are_shorter_than_the_probes_text_is_asked_all_the_same() -> None:
    model = make_target("deepseek_v32_sparse", index_topk=24)

    with CHANGES["a head quantised as it reads"](model):
        assert probe(model).batch_form == "plain"
