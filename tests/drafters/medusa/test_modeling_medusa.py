"""The Medusa drafter as a model: its forward, how it starts, what it refuses, and that it is saved and loaded whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from tests import runs
from tests.drafters.medusa.makers import make_medusa
from tests.drafters.medusa.twin import naive_head
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec import DraftTree, MedusaConfig, MedusaDrafter, SpeculationConfig
from transformers_falcon_spec.commands.loading import load_drafter
from transformers_falcon_spec.errors import CheckpointError, DrafterMismatchError, DraftTreeError, OptionError
from transformers_falcon_spec.generation.head import apply_head


@pytest.mark.parametrize("has_lm_heads", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2])
@torch.no_grad()
def test_the_forward_is_that_of_its_naive_twin(num_layers: int, has_lm_heads: bool) -> None:
    target = make_target().double()
    drafter = make_medusa(target, num_heads=3, num_layers=num_layers, has_lm_heads=has_lm_heads)
    features = torch.randn(2, 4, 3, 64, dtype=torch.double)

    outputs = drafter(features)

    def head(states: torch.Tensor) -> torch.Tensor:
        return apply_head(target, states)

    logits = outputs if has_lm_heads else head(outputs)
    for row in ((0, 0), (1, 3)):
        for number in range(3):
            expected = naive_head(drafter.state_dict(), number, features[(*row, number)], head)
            torch.testing.assert_close(logits[(*row, number)], expected, rtol=1e-6, atol=1e-6)


def test_weights_have_the_names_of_the_published_files_behind_one_prefix() -> None:
    weights = MedusaDrafter(MedusaConfig(hidden_size=8, vocab_size=20, num_heads=2, num_layers=2)).state_dict()
    shared = MedusaDrafter(MedusaConfig(hidden_size=8, vocab_size=20, num_heads=1, has_lm_heads=False)).state_dict()

    of_head = {"0.linear.weight": (8, 8), "0.linear.bias": (8,), "1.linear.weight": (8, 8), "1.linear.bias": (8,)}
    expected = {
        f"heads.{head}.{name}": shape for head in range(2) for name, shape in [*of_head.items(), ("2.weight", (20, 8))]
    }
    assert {name: tuple(value.shape) for name, value in weights.items()} == expected
    assert set(shared) == {"heads.0.0.linear.weight", "heads.0.0.linear.bias"}


@pytest.mark.parametrize(("num_heads", "has_lm_heads"), [(5, True), (50, False)])
def test_a_fresh_drafter_has_lm_heads_of_its_own_only_where_they_do_not_outweigh_the_target(
    num_heads: int, has_lm_heads: bool
) -> None:
    target = make_target()

    drafter = MedusaDrafter.from_target(target, num_heads=num_heads)

    assert drafter.config.has_lm_heads == has_lm_heads
    assert drafter.num_parameters() < 2 * target.num_parameters()
    assert MedusaDrafter.from_target(target, num_heads=2, has_lm_heads=False).config.has_lm_heads is False


@pytest.mark.parametrize("has_lm_heads", [True, False])
@pytest.mark.parametrize("family", ["llama", "cohere", "granite", "gemma2", "minicpm3", "opt"])
@torch.no_grad()
def test_every_head_starts_out_as_the_targets_own(family: str, has_lm_heads: bool) -> None:
    target = make_target(family)
    drafter = MedusaDrafter.from_target(target, num_heads=2, has_lm_heads=has_lm_heads)
    features = torch.randn(5, drafter.config.hidden_size)

    outputs = drafter(features[:, None].expand(-1, 2, -1))

    wanted = apply_head(target, features)
    for number in range(2):
        logits = outputs[:, number] if has_lm_heads else apply_head(target, outputs[:, number])
        if family == "gemma2" and has_lm_heads:  # its logits are capped; a head of one's own is linear
            assert (logits.argmax(-1) == wanted.argmax(-1)).all()
        else:
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [MedusaDrafter, AutoModel])
@pytest.mark.parametrize("has_lm_heads", [True, False])
def test_what_is_saved_is_loaded(tmp_path: Path, kind: Any, has_lm_heads: bool) -> None:
    tree = DraftTree.chain(2).to_json()
    drafter = make_medusa(make_target(), num_heads=2, has_lm_heads=has_lm_heads, draft_tree=tree)
    drafter.generation_config = SpeculationConfig(verifier="traversal")
    drafter.save_pretrained(tmp_path)

    loaded = kind.from_pretrained(tmp_path)

    assert isinstance(loaded, MedusaDrafter)
    assert loaded.generation_config.verifier == "traversal"
    assert loaded.stored_tree == tree
    assert loaded.config.has_lm_heads == has_lm_heads
    assert all(value.equal(drafter.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert AutoConfig.from_pretrained(tmp_path).model_type == "medusa_spec"


def test_the_commands_load_it_by_its_config(tmp_path: Path) -> None:
    target = make_target()
    make_medusa(target).save_pretrained(tmp_path)

    assert type(load_drafter(str(tmp_path), target)) is MedusaDrafter


@pytest.mark.parametrize("name", ["heads.1.0.linear.bias", "heads.1.1.weight"])
def test_a_checkpoint_without_all_its_weights_is_refused(tmp_path: Path, name: str) -> None:
    make_medusa(make_target(), num_heads=2).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match=rf"must hold exactly the weights of `MedusaDrafter`.*{name}"):
        MedusaDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "`num_heads` must be at least 1, but it is 0"),
        ({"num_layers": 0}, "`num_layers` must be at least 1, but it is 0"),
        ({"heads": 3}, "`MedusaConfig` has no option `heads`"),
        ({"draft_tree": {"parents": [0], "ranks": [-1]}}, "`parents` must start with -1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((OptionError, DraftTreeError), match=message):
        MedusaDrafter.from_target(make_target(), **options)


def test_a_target_of_another_size_is_refused() -> None:
    drafter = MedusaDrafter.from_target(make_target())

    with pytest.raises(DrafterMismatchError, match=r"features of size 64, but the target .* gives 32"):
        runs.drafted(make_target(hidden_size=32), drafter)
    with pytest.raises(DrafterMismatchError, match=r"vocabulary of size 97, but the target .* gives 50"):
        runs.drafted(make_target(vocab_size=50), drafter, make_prompt() % 40 + 3)


def test_a_tree_of_the_options_goes_before_that_of_the_config() -> None:
    drafter = MedusaDrafter.from_target(make_target(), num_heads=3, draft_tree=DraftTree.chain(2).to_json())
    assert (drafter.num_nodes, drafter.block_size) == (3, 3)

    drafter.generation_config = SpeculationConfig(draft_tree=DraftTree.chain(1).to_json())

    assert drafter.num_nodes == 2


@pytest.mark.parametrize(("num_heads", "max_depth"), [(1, 1), (2, 2), (5, 4)])
def test_without_a_tree_the_likeliest_nodes_are_drafted(num_heads: int, max_depth: int) -> None:
    tree = MedusaDrafter.from_target(make_target(), num_heads=num_heads).draft_tree

    node_probs = [
        0.5 ** sum(int(tree.ranks[0, above]) + 1 for above in tree.path_to(node)[1:]) for node in range(len(tree))
    ]
    assert len(tree) == (11 if num_heads == 1 else 16)
    assert int(tree.depths.max()) == max_depth
    assert node_probs == sorted(node_probs, reverse=True)
