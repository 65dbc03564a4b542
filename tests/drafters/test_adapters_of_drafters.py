"""Drafters with LoRA adapters: the text stays the target's own, the adapter drafts, and what cannot be heard is refused."""

import inspect
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers.integrations.peft import PeftAdapterMixin

from tests import runs
from tests.adapters import EVERY, KINDS, adapted, saved_drafter
from tests.chat import save_target
from tests.doubles import InformedDrafter
from tests.tiny import make_target
from transformers_falcon_spec import DraftTree, LayerParallelDrafter, LookaheadDrafter, SpeculationConfig
from transformers_falcon_spec.commands.loading import load_drafter, load_target, load_trainable, read_config
from transformers_falcon_spec.drafters.base import DrafterModel
from transformers_falcon_spec.drafters.registry import drafter_classes
from transformers_falcon_spec.errors import CheckpointError, GenerationError, OptionError


def drafts_of(target: Any, assistant: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of every draft of a greedy text, which must be the target's own; no tuner makes a draft smaller than the next one."""
    kind = type(peft_free(assistant))
    peft_free(assistant).generation_config.tune = False
    make, drafts = kind.candidate_generator, []

    def watched(self: Any, *args: Any) -> Any:
        generator = make(self, *args)
        propose = generator.propose

        def kept(budget: Any) -> Any:
            draft = propose(budget)
            drafts.append(draft.token_ids[0].tolist())
            return draft

        generator.propose = kept
        return generator

    with monkeypatch.context() as patch:
        patch.setattr(kind, "candidate_generator", watched)
        runs.both(target, assistant, max_new_tokens=8).assert_equal(is_kept=False)
    return drafts


def peft_free(assistant: Any) -> Any:
    return assistant.get_base_model() if isinstance(assistant, peft.PeftModel) else assistant


@pytest.mark.parametrize("kind", EVERY)
def test_the_adapter_drafts_and_the_text_stays_the_targets_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target().double()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = adapted(EVERY[kind](target))

    drafts = drafts_of(target, model, monkeypatch)
    with model.disable_adapter():
        without = drafts_of(target, model, monkeypatch)
    merged = drafts_of(target, model.merge_and_unload(), monkeypatch)

    assert drafts == merged != without


@pytest.mark.parametrize("mode", [{}, runs.SAMPLING], ids=["greedy", "sampling"])
def test_an_informed_drafter_with_an_adapter_keeps_its_promise(mode: dict[str, Any]) -> None:
    target = make_target().double()
    model = adapted(KINDS["falcon, as shipped"](target))
    gold = runs.plain(target, **mode).sequences

    pair = runs.both(target, InformedDrafter(model.get_base_model(), gold), **mode)

    pair.assert_equal()
    assert pair.stats.num_accepted > 0


def outputs(drafter: Any, kind: str) -> Tensor:
    """What a drafter says of random features of a tiny target."""
    generator = torch.Generator().manual_seed(0)
    size, width = drafter.feature_size, make_target().config.hidden_size
    if kind.startswith("medusa"):
        return drafter(torch.randn(2, 5, 2, size, generator=generator))
    if kind == "diffusion":
        seen = torch.ones(2, 5, 5, dtype=torch.bool).tril()
        position_ids = torch.arange(5).expand(2, -1)
        return drafter(token_ids=position_ids, positions=position_ids, allowed=seen, kept=seen[:, -1])
    inputs = (torch.randn(2, 5, width, generator=generator), torch.randn(2, 5, size, generator=generator))
    if kind.startswith(("eagle", "dflash")):
        found = drafter(*inputs)
        return found.last_hidden_state if kind == "dflash" else found.states
    return drafter(*inputs, torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize("kind", EVERY)
@torch.no_grad()
def test_an_adapter_loads_in_every_way(kind: str, tmp_path: Path) -> None:
    base = saved_drafter(kind, tmp_path / "base")
    target = make_target()
    saved = adapted(load_drafter(str(base), target))
    saved.save_pretrained(tmp_path / "adapter")
    wanted, bare = outputs(saved, kind), outputs(load_drafter(str(base), target), kind)
    kind_of_drafter = type(saved.get_base_model())

    into = load_drafter(str(base), target)
    into.load_adapter(str(tmp_path / "adapter"))
    found = {
        "PeftModel": peft.PeftModel.from_pretrained(load_drafter(str(base), target), str(tmp_path / "adapter")),
        "load_adapter": into,
        "from_pretrained": kind_of_drafter.from_pretrained(tmp_path / "adapter"),
        "load_drafter": load_drafter(str(tmp_path / "adapter"), target),
    }

    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert not torch.allclose(wanted, bare)
    for drafter in found.values():
        torch.testing.assert_close(outputs(drafter, kind), wanted)


def test_the_lstm_beside_an_adapter_is_loaded_too(tmp_path: Path) -> None:
    base = saved_drafter("falcon, as shipped", tmp_path / "base")
    target = make_target()
    saved = adapted(load_drafter(str(base), target), modules_to_save=["recurrence"])
    saved.save_pretrained(tmp_path / "adapter")

    if "AuxiliaryTrainingWrapper" not in inspect.getsource(PeftAdapterMixin.load_adapter):  # Transformers 5.17
        with pytest.raises(CheckpointError, match=r"must fit the drafter"):
            load_drafter(str(tmp_path / "adapter"), target)
        found = peft.PeftModel.from_pretrained(
            load_drafter(str(base), target), str(tmp_path / "adapter")
        ).get_base_model()
    else:
        found = load_drafter(str(tmp_path / "adapter"), target)

    with torch.no_grad():
        torch.testing.assert_close(outputs(found, "falcon"), outputs(saved, "falcon"))
    assert not torch.equal(found.recurrence.weight_ih_l0, load_drafter(str(base), target).recurrence.weight_ih_l0)


def test_options_beside_an_adapter_win_over_those_of_its_drafter(tmp_path: Path) -> None:
    base = saved_drafter("falcon", tmp_path / "base")
    adapted(load_drafter(str(base), make_target())).save_pretrained(tmp_path / "adapter")
    SpeculationConfig(tune=False).save_pretrained(base)
    first = load_drafter(str(tmp_path / "adapter"), make_target())
    SpeculationConfig(draft_tree=DraftTree.chain(2).to_json()).save_pretrained(tmp_path / "adapter")

    second = load_drafter(str(tmp_path / "adapter"), make_target())

    assert (first.generation_config.tune, second.generation_config.tune) == (False, True)
    assert len(second.draft_tree) == 3


def test_options_set_on_the_wrapper_are_refused() -> None:
    target = make_target().double()
    model = adapted(KINDS["falcon"](target))
    model.generation_config = SpeculationConfig(tune=False)

    with pytest.raises(GenerationError, match=r"Set `model\.get_base_model\(\)\.generation_config`"):
        runs.drafted(target, model)

    del model.generation_config
    model.get_base_model().generation_config = SpeculationConfig(verifier="gumbel")
    runs.both(target, model).assert_equal(is_kept=False)


def test_an_adapter_that_changes_no_weights_is_refused() -> None:
    target = make_target().double()
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="FEATURE_EXTRACTION")
    model = peft.get_peft_model(KINDS["falcon, as shipped"](target), config)

    with pytest.raises(GenerationError, match="must change its weights, as LoRA does, but this one is PROMPT_TUNING"):
        runs.drafted(target, model)


def test_an_adapter_that_names_no_drafter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')

    with pytest.raises(
        CheckpointError, match="must name the model that the adapter changes as `base_model_name_or_path`"
    ):
        load_drafter(str(tmp_path), make_target())


def edited(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes",
    [{"r": 2}, {"target_modules": ["q_proj"]}, {"target_modules": ["nowhere"]}],
    ids=["another rank", "weights left over", "no such layer"],
)
def test_an_adapter_that_does_not_fit_its_drafter_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    base = saved_drafter("falcon", tmp_path / "base")
    adapted(load_drafter(str(base), make_target())).save_pretrained(tmp_path / "adapter")
    edited(tmp_path / "adapter", **changes)

    with pytest.raises(CheckpointError, match=r"must fit the drafter `.*base`, a `FalconSpecDrafter`, but: "):
        load_drafter(str(tmp_path / "adapter"), make_target())


def test_an_adapter_whose_whole_parts_are_missing_is_refused(tmp_path: Path) -> None:
    base = saved_drafter("falcon", tmp_path / "base")
    adapted(load_drafter(str(base), make_target())).save_pretrained(tmp_path / "adapter")
    edited(tmp_path / "adapter", modules_to_save=["recurrence"])

    with pytest.raises(CheckpointError, match="must fit the drafter"):
        load_drafter(str(tmp_path / "adapter"), make_target())


def test_an_adapter_of_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    make_target().save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(target_modules=["q_proj"])
    peft.get_peft_model(make_target(), config).save_pretrained(tmp_path / "adapter")
    edited(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "base"))

    with pytest.raises(CheckpointError, match=r"`model_type` of `.*adapter` must be one of"):
        load_drafter(str(tmp_path / "adapter"), make_target())


def test_an_adapter_is_not_trained_as_if_it_were_a_drafter(tmp_path: Path) -> None:
    base = saved_drafter("falcon", tmp_path / "base")
    adapted(load_drafter(str(base), make_target())).save_pretrained(tmp_path / "adapter")

    with pytest.raises(OptionError, match=r"is an adapter of `.*base`\. Train from that one"):
        load_trainable(str(tmp_path / "adapter"), make_target())


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_a_target_is_loaded_by_its_adapter(has_tokenizer: bool, tmp_path: Path) -> None:
    base = save_target(tmp_path / "base")
    with_adapter = adapted(load_target(str(base), "auto", "cpu")[0], target_modules=["q_proj", "v_proj"])
    with_adapter.save_pretrained(tmp_path / "adapter")
    if has_tokenizer:
        tokenizer = load_target(str(base), "auto", "cpu")[1]
        tokenizer.add_tokens(["zzz"])
        tokenizer.save_pretrained(tmp_path / "adapter")

    target, tokenizer = load_target(str(tmp_path / "adapter"), "auto", "cpu")

    with torch.no_grad():
        logits = [model(runs.make_prompt()).logits for model in (target, with_adapter)]
    torch.testing.assert_close(*logits)
    assert ("zzz" in tokenizer.get_vocab()) == has_tokenizer
    assert read_config(str(tmp_path / "adapter"))[0].vocab_size == target.config.vocab_size


def test_every_kind_of_drafter_with_weights_is_tried() -> None:
    tried = {type(make(make_target())) for make in EVERY.values()}

    assert tried == set(drafter_classes().values()) - {
        LookaheadDrafter,
        LayerParallelDrafter,
    }  # an adapter of that is its language model's
    assert all(issubclass(kind, DrafterModel) for kind in tried)
