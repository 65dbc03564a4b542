"""The drafter as a model: its forward against plain torch, what is saved, and which options, targets and checkpoints it takes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel

from tests.drafters.eagle.kinds import KINDS, make_eagle, make_eagle_target, view
from tests.drafters.eagle.naive import NaiveEagle
from tests.drafters.texts import Text
from tests.tiny import VOCAB_SIZE, make_target
from transformers_falcon_spec import DraftTree, EagleConfig, EagleDrafter, SpeculationConfig
from transformers_falcon_spec.commands.loading import load_drafter
from transformers_falcon_spec.drafters.eagle import eagle3_feature_layers
from transformers_falcon_spec.errors import CheckpointError, DrafterMismatchError, DraftTreeError, OptionError

LENGTH = 7
NUM_STEPS = 3


@pytest.fixture(scope="module")
def target() -> Any:
    return make_eagle_target().requires_grad_(False)


def read(drafter: EagleDrafter, target: Any) -> tuple[Tensor, Tensor, NaiveEagle, list[int]]:
    """Embeddings and features of a text, a twin that has read it, and the tokens of the pairs."""
    text, twin = Text(0, drafter.config.feature_size), NaiveEagle(drafter, view(target, drafter))
    committed = text.more(LENGTH)
    ids = committed.sequence_ids[0, 1 : LENGTH + 1]
    twin.commit(ids.tolist(), committed.features[0])
    return target.get_input_embeddings()(ids)[None], committed.features, twin, ids.tolist()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_training_computes_what_drafting_a_chain_from_any_place_computes(target: Any, kind: str) -> None:
    drafter = make_eagle(target, kind)
    embeds, features, twin, ids = read(drafter, target)

    states = drafter(embeds, features, num_steps=NUM_STEPS).states

    assert states.shape == (1, NUM_STEPS, LENGTH, 16)
    for step in range(NUM_STEPS):
        for position in range(LENGTH - step):
            chain = tuple(ids[position + 1 : position + 1 + step])  # true tokens, own states
            torch.testing.assert_close(
                states[0, step, position], twin.state(chain, num_true=position + 1), atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_are_those_of_the_twin(target: Any, kind: str) -> None:
    drafter = make_eagle(target, kind)
    embeds, features, twin, _ = read(drafter, target)

    output = drafter(embeds, features)

    if drafter.config.version == 1:
        assert output.logits is None
        return
    ids = torch.arange(VOCAB_SIZE) if drafter.draft_token_ids is None else drafter.draft_token_ids
    found = output.logits.view(LENGTH, -1)[-1].softmax(-1)
    torch.testing.assert_close(found.double(), twin.probs(())[ids], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_logits_come_where_they_are_wanted_in_that_order(target: Any) -> None:
    drafter = make_eagle(target, "eagle-3")
    embeds, features, *_ = read(drafter, target)
    is_counted = torch.rand(1, 2, LENGTH, generator=torch.Generator().manual_seed(0)) > 0.5

    everywhere = drafter(embeds, features, num_steps=2).logits.view(1, 2, LENGTH, -1)
    some = drafter(embeds, features, num_steps=2, is_counted=is_counted).logits

    torch.testing.assert_close(some, everywhere[is_counted])


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3"])
@torch.no_grad()
def test_padding_on_the_right_changes_nothing(target: Any, kind: str) -> None:
    drafter = make_eagle(target, kind)
    embeds, features, *_ = read(drafter, target)

    padded = drafter(embeds, features, num_steps=2).states
    short = drafter(embeds[:, :5], features[:, :5], num_steps=2).states

    torch.testing.assert_close(padded[:, :1, :5], short[:, :1])
    torch.testing.assert_close(padded[:, 1:, :4], short[:, 1:, :4])  # the last chain's next token is padding


@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [(32, (2, 16, 29)), (12, (2, 6, 9)), (7, (2, 3, 4)), (4, (1, 2, 3)), (3, (1, 2)), (2, (1,)), (1, (0,))],
)
def test_version_3_reads_an_early_a_middle_and_a_late_layer(num_layers: int, layers: tuple[int, ...]) -> None:
    assert eagle3_feature_layers(num_layers) == layers


def test_sizes_come_from_the_target() -> None:
    target = make_target(num_hidden_layers=7)

    first, third = EagleDrafter.from_target(target), EagleDrafter.from_target(target, version=3)

    assert first.fc.weight.shape == (64, 128)
    assert first.fc.bias is not None
    assert third.fc.weight.shape == (64, 192)
    assert third.fc.bias is None
    assert third.feature_layers == (2, 3, 4)
    assert third.layer.self_attn.q_proj.weight.shape == (64, 128)
    assert third.lm_head.weight.shape == (VOCAB_SIZE, 64)
    for drafter in (first, third):
        drafter.check_target(target)
    names = {name.rpartition(".")[0] for name in first.state_dict()}
    assert not any("input_layernorm" in name or "lm_head" in name or name == "norm" for name in names)


@pytest.mark.parametrize(
    ("kind", "family", "changes"),
    [
        ("eagle-1", "opt", {"word_embed_proj_dim": 32}),
        ("eagle-3", "opt", {"word_embed_proj_dim": 32}),
        ("eagle-1", "gpt2", {}),
    ],
)
def test_targets_of_other_families_and_widths_will_do(kind: str, family: str, changes: dict[str, Any]) -> None:
    target = make_target(family, **changes).double()
    plain = target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False)

    out = target.generate(
        torch.tensor([[5, 6, 7]]), assistant_model=make_eagle(target, kind), max_new_tokens=8, do_sample=False
    )

    assert out.tolist() == plain.tolist()


def test_a_draft_vocabulary_is_kept_as_offsets_and_a_mask() -> None:
    drafter = EagleDrafter.from_target(make_target(), version=3, draft_vocab_size=4)
    drafter.set_draft_vocabulary([9, 2, 5, 90])

    assert drafter.d2t.tolist() == [2, 4, 7, 87]
    assert drafter.draft_token_ids.tolist() == [2, 5, 9, 90] == drafter.t2d.nonzero().flatten().tolist()
    assert drafter.lm_head.weight.shape[0] == 4


@pytest.mark.parametrize("ids", [[1, 2, 3], [1, 2, 3, 3], [1, 2, 3, VOCAB_SIZE], [-1, 1, 2, 3]])
def test_a_draft_vocabulary_that_does_not_fit_is_refused(ids: list[int]) -> None:
    drafter = EagleDrafter.from_target(make_target(), version=3, draft_vocab_size=4)

    assert drafter.draft_token_ids.tolist() == [0, 1, 2, 3]
    with pytest.raises(OptionError, match=f"`draft_vocab_size` = 4 different ids in 0..96, but they are {len(ids)}"):
        drafter.set_draft_vocabulary(ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_drafter_comes_back_from_disk_as_it_was_saved(
    tmp_path: Path, target: Any, kind: str, dtype: torch.dtype
) -> None:
    drafter = make_eagle(target, kind, draft_tree=DraftTree.chain(3).to_json()).to(dtype)
    drafter.generation_config = SpeculationConfig(draft_tree=DraftTree.chain(2).to_json())

    drafter.save_pretrained(tmp_path)
    loaded = EagleDrafter.from_pretrained(tmp_path, dtype="auto")

    assert loaded.dtype == dtype
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    assert all(torch.equal(value, drafter.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert loaded.config.to_diff_dict() == {**drafter.config.to_diff_dict(), "architectures": ["EagleDrafter"]}
    assert loaded.draft_settings == {"draft_tree": DraftTree.chain(2).to_json()}


def test_auto_classes_and_commands_know_the_drafter(tmp_path: Path, target: Any) -> None:
    make_eagle(target, "eagle-3").save_pretrained(tmp_path)

    assert isinstance(AutoConfig.from_pretrained(tmp_path), EagleConfig)
    assert isinstance(AutoModel.from_pretrained(tmp_path), EagleDrafter)
    assert isinstance(load_drafter(str(tmp_path), target), EagleDrafter)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("layer.mlp.up_proj.weight", "missing"), ("d2t", "missing"), ("embed_tokens.weight", "unexpected")],
)
def test_a_checkpoint_that_is_not_a_whole_drafter_is_refused(
    tmp_path: Path, target: Any, name: str, kind: str
) -> None:
    make_eagle(target, "eagle-3").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if kind == "missing":
        del weights[name]
    else:
        weights[name] = torch.zeros(VOCAB_SIZE, 16)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match=f"{kind}_keys.*{name}"):
        EagleDrafter.from_pretrained(tmp_path)


def test_which_tree_is_drafted(target: Any) -> None:
    drafter = make_eagle(target, "eagle-1", num_tree_nodes=20)
    assert (drafter.is_tree_dynamic, drafter.num_nodes) == (True, 20)
    assert drafter.draft_settings["num_tree_nodes"] == 20

    drafter.generation_config.draft_tree = DraftTree.chain(2).to_json()
    assert (drafter.is_tree_dynamic, drafter.num_nodes) == (False, 3)

    drafter.generation_config.draft_tree = None
    drafter.generation_config.dynamic_tree = False
    assert (drafter.is_tree_dynamic, drafter.num_nodes) == (False, 5)  # a chain of `tree_depth`


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"version": 2}, OptionError, r"`version` must be one of \(1, 3\), but it is 2"),
        ({"num_hidden_layers": 2}, OptionError, "`num_hidden_layers` must be one of \\(1,\\), but it is 2"),
        ({"feature_layers": []}, OptionError, "`feature_layers` must name at least one hidden state"),
        ({"feature_layers": [1, -1]}, OptionError, r"`feature_layers` must be \[-1\] .* are \[1, -1\] and 8192"),
        ({"fc_norm": True, "norm_output": True}, OptionError, "`fc_norm`, `norm_output` must be left out unless"),
        (
            {"draft_vocab_size": 0},
            OptionError,
            "must lie in 1..32000, the target's vocabulary, but it is 0.",
        ),
        ({"version": 3, "draft_vocab_size": 40000}, OptionError, "1..32000, .* but it is 40000."),
        ({"draft_tree": {"parents": [-1, 2, 0], "ranks": [-1, 0, 0]}}, DraftTreeError, "Node 1 must come after"),
        ({"version": "3"}, StrictDataclassError, "'version' expected int, got str"),
    ],
)
def test_a_wrong_option_is_refused_in_words(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        EagleConfig(**options)


def test_an_option_set_out_of_range_later_is_found_before_drafting(target: Any) -> None:
    drafter = make_eagle(target, "eagle-1")
    drafter.generation_config.tree_top_k = 1000

    with pytest.raises(OptionError, match="`tree_top_k` ask for the 1000 best tokens"):
        drafter.candidate_generator(view(target, drafter), 100, torch.Generator())


def test_a_misspelled_option_of_from_target_is_refused() -> None:
    with pytest.raises(OptionError, match="`EagleConfig` has no option `top_k`"):
        EagleDrafter.from_target(make_target(), top_k=3)


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3"])
def test_another_target_is_refused(target: Any, kind: str) -> None:
    with pytest.raises(DrafterMismatchError, match=r"expects features of size .*, but the target"):
        make_eagle(target, kind).check_target(make_target())


def test_gradient_checkpointing_which_would_drop_the_chains_past_is_refused(target: Any) -> None:
    with pytest.raises(ValueError, match=r"does not support (gradient|activation) checkpointing"):
        make_eagle(target, "eagle-3").gradient_checkpointing_enable()


@pytest.mark.parametrize("version", [1, 3])
def test_a_target_whose_layers_differ_in_width_gets_a_drafter_of_the_widest(version: int) -> None:
    target = make_target("gemma3n", intermediate_size=[32, 96, 48, 64])

    assert EagleDrafter.from_target(target, version=version).config.intermediate_size == 96
