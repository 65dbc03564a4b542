"""The drafter as a model: exact and rough reading, its backends, what is saved, and which models, targets and options it takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from lab.layer_groups import in_order
from tests.drafters.easyspec.kinds import GROUPS, KINDS, make_drafter, make_model
from tests.drafters.easyspec.twin import IN_ORDER, with_backend
from tests.drafters.tokenizers import saved
from tests.reference_easyspec import NaiveLayerParallel
from tests.tiny import VOCAB_SIZE, make_prompt, make_target
from transformers_falcon_spec import DraftTree, LayerParallelConfig, LayerParallelDrafter, SpeculationConfig
from transformers_falcon_spec.commands.loading import load_drafter, load_method
from transformers_falcon_spec.drafters.registry import drafter_classes
from transformers_falcon_spec.errors import CheckpointError, DrafterMismatchError, OptionError
from transformers_falcon_spec.generation.slot_cache import SlotCache

EACH_ALONE = [[number] for number in range(7)]


@pytest.fixture(scope="module")
def target() -> Any:
    return make_model("llama")


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_exact_reading_and_groups_of_one_are_the_model_itself(target: Any, kind: str) -> None:
    drafter = make_drafter(target, kind)
    ids = torch.cat([make_prompt(11), make_prompt(11, seed=1)])
    gold = drafter.model(ids).logits

    exact = drafter(ids, is_exact=True)
    rough = drafter(ids)
    drafter.config.layer_groups = EACH_ALONE
    alone = drafter(ids)

    torch.testing.assert_close(exact.double(), gold, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(alone.double(), gold, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(rough.double(), gold, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_rough_reading_is_that_of_the_twin(target: Any, kind: str) -> None:
    drafter, ids = make_drafter(target, kind, draft_vocab_size=80), make_prompt(9)
    twin = NaiveLayerParallel(drafter.model, GROUPS, num_tokens=80)

    found = drafter(ids)

    for length in (1, 9):
        expected = twin.logits(tuple(ids[0, :length].tolist()))
        torch.testing.assert_close(found[0, length - 1].double(), expected, atol=1e-4, rtol=1e-4)


def show(cache: SlotCache, num_held: int, num_new: int) -> None:
    """The next forward writes new tokens behind those that are held, and sees both."""
    cache.view.write_from(num_held)
    cache.see(num_held + num_new)


def states_of(drafter: LayerParallelDrafter, backend: str) -> list[Tensor]:
    """What a text read exactly, then a tree read roughly, and one more token give; double precision throughout."""
    computes, found = with_backend(drafter, backend).backend(), []
    cache = SlotCache(len(computes.groups), 2, 13, torch.device("cpu"))
    ids = torch.cat([make_prompt(12), make_prompt(12, seed=1)])
    ancestors = DraftTree.from_lists([-1, 0, 0, 1]).ancestor_mask.expand(2, -1, -1)
    depths, positions = torch.tensor([0, 1, 1, 2]), torch.arange(12)
    allowed = (positions <= positions[:8, None]).expand(2, -1, -1)[..., :8]
    show(cache, 0, 8)
    found.append(
        drafter.read(
            ids[:, :8], allowed, positions[:8].expand(2, -1), positions[:8].expand(2, -1), cache, computes, True
        )
    )
    slot_positions = torch.cat([positions[:8], 8 + depths]).expand(2, -1)
    allowed = torch.cat([torch.ones(2, 4, 8, dtype=torch.bool), ancestors], dim=-1)
    show(cache, 8, 4)
    found.append(drafter.read(ids[:, 8:], allowed, slot_positions[:, 8:], slot_positions, cache, computes, False))
    allowed, slot_positions = (
        torch.cat([allowed[:, -1:], torch.ones(2, 1, 1, dtype=torch.bool)], -1),
        torch.cat([slot_positions, torch.full((2, 1), 11)], dim=-1),
    )
    show(cache, 12, 1)
    found.append(drafter.read(ids[:, :1], allowed, slot_positions[:, -1:], slot_positions, cache, computes, False))
    return found


@pytest.mark.parametrize("groups", [GROUPS, [[0], [1, 2, 3, 4, 5], [6]]])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_fused_attention_is_attention_layer_by_layer_to_rounding(
    target: Any, kind: str, groups: list[list[int]]
) -> None:
    drafter = make_drafter(target, kind, layer_groups=groups)

    for fused, naive in zip(states_of(drafter, "fused"), states_of(drafter, IN_ORDER), strict=True):
        torch.testing.assert_close(fused, naive, atol=1e-11, rtol=1e-11)


@torch.no_grad()
def test_eager_attention_stays_eager_and_means_the_same(target: Any) -> None:
    drafter, model = make_drafter(target), make_model("llama", seed=1)
    model.set_attn_implementation("eager")

    eager = LayerParallelDrafter.wrap(model, target, layer_groups=GROUPS)

    assert eager.model.config._attn_implementation == eager.config._attn_implementation == "eager"
    for backend in ("fused", IN_ORDER):
        for one, other in zip(states_of(eager, backend), states_of(drafter, "fused"), strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)  # its softmax is in float32


@torch.no_grad()
def test_fused_weights_follow_the_models(target: Any) -> None:
    drafter, ids = make_drafter(target), make_prompt(9)
    first, made = drafter(ids), drafter.backend()
    assert drafter.backend() is made

    drafter.model.model.layers[2].self_attn.q_proj.weight.data.mul_(1.5)  # as PEFT merges
    merged = drafter(ids)
    drafter.model.model.layers[2].self_attn.q_proj.weight.mul_(1.5)
    changed = drafter(ids)
    drafter.float()
    narrow = drafter(ids)
    in_order(drafter)

    assert not torch.allclose(first, merged, atol=1e-3)
    assert not torch.allclose(merged, changed, atol=1e-3)
    torch.testing.assert_close(narrow, drafter(ids), atol=1e-3, rtol=1e-3)
    assert drafter.dtype == torch.float32


class _Quantised(nn.Linear):
    """Stands for a projection that is no plain matrix."""


@torch.no_grad()
def test_projections_that_cannot_be_fused_are_refused_and_draft_each_alone(target: Any) -> None:
    drafter, ids = make_drafter(target, layer_groups=EACH_ALONE), make_prompt(5)
    gold = drafter(ids)
    drafter.model.model.layers[2].self_attn.k_proj.__class__ = _Quantised

    torch.testing.assert_close(drafter(ids), gold)

    drafter.config.layer_groups = GROUPS
    with pytest.raises(OptionError, match=r'"fused"` needs projections .* has a `_Quantised`. Let .*`group_size=1`'):
        drafter(ids)


def test_wrapping_leaves_the_model_as_it_is(target: Any) -> None:
    model = make_model("qwen2", seed=1)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}

    drafter = LayerParallelDrafter.wrap(model, target)

    assert drafter.model is model
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())
    assert drafter.config.layer_groups == [[0], [1], [2, 3], [4, 5], [6]]
    assert drafter.feature_layers == ()
    assert drafter.device == model.device
    drafter.check_target(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "changes"), [("qwen2", {"tie_word_embeddings": True}), ("qwen3", {})])
def test_a_drafter_comes_back_from_disk_as_it_was_saved(
    tmp_path: Path, target: Any, kind: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    drafter = make_drafter(target, kind, changes=changes, draft_vocab_size=80).to(dtype)
    drafter.generation_config = SpeculationConfig(draft_tree=DraftTree.chain(2).to_json())

    drafter.save_pretrained(tmp_path)
    loaded = LayerParallelDrafter.from_pretrained(tmp_path, dtype="auto")

    assert loaded.dtype == dtype
    assert type(loaded.model) is type(drafter.model)
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    assert all(torch.equal(value, drafter.state_dict()[name]) for name, value in loaded.state_dict().items())
    for name in ("layer_groups", "backend", "vocab_size", "draft_vocab_size"):
        assert getattr(loaded.config, name) == getattr(drafter.config, name)
    assert loaded.draft_settings == drafter.draft_settings
    assert loaded.draft_settings["draft_tree"] == DraftTree.chain(2).to_json()
    if dtype == torch.float32:  # in 16 bit a cast rounds the rotary frequencies, which loading does not
        with torch.no_grad():
            assert in_order(loaded)(make_prompt(7)).equal(in_order(drafter)(make_prompt(7)))


def test_auto_classes_and_commands_know_the_drafter(tmp_path: Path, target: Any) -> None:
    make_drafter(target, "qwen3").save_pretrained(tmp_path)

    assert isinstance(AutoConfig.from_pretrained(tmp_path), LayerParallelConfig)
    assert isinstance(AutoModel.from_pretrained(tmp_path), LayerParallelDrafter)
    assert isinstance(load_drafter(str(tmp_path), target), LayerParallelDrafter)
    again = LayerParallelDrafter.from_pretrained(tmp_path, target=target, backend="distributed")
    assert again.config.backend == "distributed"
    assert LayerParallelConfig.model_type in drafter_classes()


def test_commands_wrap_a_language_model_under_a_name_of_its_own(tmp_path: Path, target: Any) -> None:
    name = saved(make_model("llama", seed=1), tmp_path / "model")

    drafter = load_drafter(f"layer-parallel:3:{name}", target)
    method = load_method(f"layer-parallel:2:{name}", target)

    assert drafter.config.layer_groups == GROUPS
    assert method.name == "model"
    assert method.assistant.config.layer_groups == [[0], [1], [2, 3], [4, 5], [6]]
    for wrong in ("layer-parallel", "layer-parallel:0:x", "layer-parallel:3:", f"layer-parallel:{name}"):
        with pytest.raises(OptionError, match="needs a whole number above 0 and the folder of a language model"):
            load_drafter(wrong, target)


def test_a_language_model_without_a_target_and_a_drafter_with_group_size_are_refused(
    tmp_path: Path, target: Any
) -> None:
    name = saved(make_model("llama", seed=1), tmp_path / "model")
    make_drafter(target).save_pretrained(tmp_path / "drafter")

    with pytest.raises(CheckpointError, match=r"LayerParallelDrafter.from_pretrained\(NAME, target=target\)"):
        LayerParallelDrafter.from_pretrained(name)
    with pytest.raises(OptionError, match="`group_size` must be left out unless a model is wrapped"):
        LayerParallelDrafter.from_pretrained(name, group_size=3)
    with pytest.raises(OptionError, match="`group_size` must be left out unless a model is wrapped"):
        LayerParallelDrafter.from_pretrained(tmp_path / "drafter", target=target, group_size=3)
    with pytest.raises(DrafterMismatchError, match=r"a vocabulary of size 97, but the target .* gives 50"):
        LayerParallelDrafter.from_pretrained(tmp_path / "drafter", target=make_target(vocab_size=50))


def test_code_beside_a_language_model_does_not_run_unless_it_is_trusted(
    tmp_path: Path, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nraise ZeroDivisionError")

    with pytest.raises(ValueError, match="trust_remote_code=True"):
        LayerParallelDrafter.from_pretrained(tmp_path, target=target)

    assert not (tmp_path / "ran").exists()
    with pytest.raises(ZeroDivisionError):
        LayerParallelDrafter.from_pretrained(tmp_path, target=target, trust_remote_code=True)
    assert (tmp_path / "ran").exists()


def test_models_of_other_families_are_refused_by_name(target: Any) -> None:
    with pytest.raises(
        OptionError, match=r"wraps models of \['llama', 'mistral', 'qwen2', 'qwen3'\].*but this one is a `gemma2`\."
    ):
        LayerParallelDrafter.wrap(make_target("gemma2"), target)


def test_positions_that_change_with_the_length_of_the_text_are_refused(target: Any) -> None:
    ropes = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}

    with pytest.raises(
        OptionError, match="must not change with the length of the text, but its `rope_type` is 'dynamic'"
    ):
        LayerParallelDrafter.wrap(make_model("llama", rope_parameters=ropes), target)


def test_attention_that_takes_no_trees_is_refused(target: Any) -> None:
    model = make_model("llama")
    model.config._attn_implementation = "flex_attention"

    with pytest.raises(OptionError, match=r"must take masks, as \('sdpa', 'eager'\) do, but it is 'flex_att"):
        LayerParallelDrafter.wrap(model, target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": [[0]]}, "`LayerParallelConfig` has no option `groups`"),
        ({"layer_groups": [[0, 1], [2, 3, 4, 5], [6]]}, "each in a group of its own"),
        ({"layer_groups": EACH_ALONE, "group_size": 2}, "one must be left out, but they are 2 and"),
        ({"group_size": 0}, "`group_size` must be at least 1, but it is 0"),
        ({"backend": "fast"}, r"`backend` must be one of \('fused', 'distributed'\), but it is 'fast'"),
        ({"draft_vocab_size": 98}, r"`draft_vocab_size` must lie in 1..97, .* but it is 98"),
        ({"confidence_temperatures": {"greedy": [1.0]}}, "A stored `confidence_temperatures` must be"),
        ({"draft_tree": {"parents": [0], "ranks": [0]}}, "parents"),
    ],
)
def test_bad_options_are_refused(target: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError if "draft_tree" not in options else ValueError, match=message):
        LayerParallelDrafter.wrap(make_model("llama", seed=1), target, **options)


def test_options_changed_later_are_checked_before_drafting(target: Any) -> None:
    drafter = make_drafter(target)

    drafter.config.backend = "fast"

    with pytest.raises(OptionError, match="`backend` must be one of"):
        target.generate(make_prompt(), assistant_model=drafter, max_new_tokens=4)


def test_a_configuration_without_a_model_is_refused() -> None:
    with pytest.raises(OptionError, match="`draft_config` must be the configuration of the model that drafts"):
        LayerParallelConfig(vocab_size=VOCAB_SIZE)


def test_which_tree_is_drafted(target: Any) -> None:
    drafter = make_drafter(target, num_tree_nodes=20)
    assert (drafter.is_tree_dynamic, drafter.num_nodes, drafter.tree_depth) == (True, 20, 5)

    drafter.generation_config.draft_tree = DraftTree.chain(2).to_json()
    assert (drafter.is_tree_dynamic, drafter.num_nodes) == (False, 3)

    drafter.generation_config.draft_tree = None
    drafter.generation_config.dynamic_tree = False
    assert (drafter.is_tree_dynamic, drafter.num_nodes) == (False, 6)  # a chain as deep as trees grow
