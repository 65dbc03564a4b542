"""Reading trees, rebuilding logits and counting positions, against plain forwards, on many families."""

import pytest
import torch
from transformers import PreTrainedModel

from tests import reference, runs
from tests.tiny import TREE_FAMILIES, make_prompt, make_target
from transformers_falcon_spec import DraftTree
from transformers_falcon_spec.generation.target import Target

PATH = (0, 1, 4, 7, 10)  # of `runs.BUSHY`
SECOND = [-1, 0, 0, 1, 1, 3, 5]
NARROW = {"mistral": 3, "gemma2": 3, "gemma3": 3}  # windows smaller than the tree is deep


def _token_ids(parents: list[int], seed: int) -> list[int]:
    return make_prompt(len(parents), seed)[0].tolist()


def _assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert (logits - expected).abs().max() < 1e-5 * expected.std()


def _assert_reads_trees(model: PreTrainedModel, num_padding: int = 0) -> None:
    """One tree, the kept part of it, then another tree: each node's logits are those of its own path alone."""
    prompt, first, second = make_prompt(23), _token_ids(runs.BUSHY, 1), _token_ids(SECOND, 2)
    padding = torch.zeros(1, num_padding, dtype=torch.long)
    mask = torch.cat([padding, torch.ones_like(prompt)], dim=-1)
    target = runs.prefilled(model, torch.cat([padding, prompt], dim=-1), mask)

    logits = runs.tree_logits(target, first, runs.BUSHY)
    target.keep(len(first), [PATH])
    after = runs.tree_logits(target, second, SECOND)

    _assert_close(logits, reference.tree_logits(model, prompt, first, runs.BUSHY))
    kept = torch.tensor([[first[node] for node in PATH]])
    _assert_close(after, reference.tree_logits(model, torch.cat([prompt, kept], dim=-1), second, SECOND))


@pytest.mark.parametrize("family", TREE_FAMILIES)
def test_each_node_is_read_as_if_its_path_were_the_text(family: str) -> None:
    _assert_reads_trees(make_target(family).double())


@pytest.mark.parametrize("family", NARROW)
def test_windows_smaller_than_the_tree_is_deep_hold(family: str) -> None:
    _assert_reads_trees(make_target(family, sliding_window=NARROW[family]).double())


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma3"])
def test_left_padding_of_a_single_row_is_never_read(family: str) -> None:
    _assert_reads_trees(make_target(family).double(), num_padding=5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "llama4"])
def test_holes_in_the_prompts_mask_are_never_read(family: str) -> None:
    model, token_ids = make_target(family).double(), _token_ids(runs.BUSHY, 1)
    mask = torch.ones(1, 23, dtype=torch.long)
    mask[0, [0, 1, 9, 17, 21]] = 0

    logits = runs.tree_logits(runs.prefilled(model, make_prompt(23), mask), token_ids, runs.BUSHY)

    path = (0, 1, 4, 7, 10)
    target = runs.prefilled(model, make_prompt(23), mask)
    with torch.no_grad():  # the same path, read by Transformers with the same mask
        plain = target.read(torch.tensor([[token_ids[node] for node in path]]), DraftTree.chain(4), form="chain")
    _assert_close(logits[list(path)], plain.logits[0])


def test_eager_attention_reads_the_same_tree_masks() -> None:
    model = make_target("llama", attn_implementation="eager").double()

    _assert_reads_trees(model)


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_attention_without_tree_masks_is_replaced_for_the_tree_and_restored(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_target("llama").double()
    target = runs.prefilled(model, make_prompt())
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append(model.config._attn_implementation))
    monkeypatch.setattr(model.config, "_attn_implementation_internal", name)

    runs.tree_logits(target, _token_ids(SECOND, 1), SECOND)

    assert seen == ["sdpa"]
    assert model.config._attn_implementation == name


@pytest.mark.parametrize("family", [*TREE_FAMILIES, "bloom"])
def test_head_rebuilds_the_logits_with_all_scales_and_caps(family: str) -> None:
    model = make_target(family)
    target = Target(model, (-1,))

    with torch.no_grad(), target.feature_hooks.active():
        logits = model(make_prompt(), use_cache=False).logits
        rebuilt = target.head(target.feature_hooks.take(12))

    assert rebuilt.dtype == torch.float32
    torch.testing.assert_close(rebuilt, logits.float(), rtol=1e-4, atol=1e-4)


def test_head_keeps_leading_dimensions_and_embed_is_the_targets_own() -> None:
    model = make_target()
    target = Target(model, (-1,))

    assert target.head(torch.zeros(2, 3, 5, 64)).shape == (2, 3, 5, 97)
    assert target.embed(torch.tensor([[3, 4]])).equal(model.get_input_embeddings().weight[[3, 4]][None])


@pytest.mark.parametrize(("layers", "width"), [((), 0), ((-1,), 64), ((0, 2, -1), 192)])
def test_feature_dim_is_the_width_of_all_tapped_layers(layers: tuple[int, ...], width: int) -> None:
    assert Target(make_target(), layers).feature_dim == width


def test_projected_decoders_have_two_feature_widths() -> None:
    model = make_target("opt", word_embed_proj_dim=32)

    target = Target(model, (1, -1))

    assert target.feature_dim == 64 + 32
    with torch.no_grad(), target.feature_hooks.active():
        logits = model(make_prompt(), use_cache=False).logits
        features = target.feature_hooks.take(12)
    assert features.shape[-1] == target.feature_dim
    torch.testing.assert_close(target.head(features[..., 64:]), logits, rtol=1e-4, atol=1e-4)


def test_num_to_context_counts_down_from_the_position_table() -> None:
    target = runs.prefilled(make_target("gpt2", n_positions=20), make_prompt(12))

    room = target.num_to_context
    runs.tree_logits(target, [3, 4, 5], [-1, 0, 1])
    target.keep(3, [(0, 1)])

    assert (room, target.num_to_context) == ([7], [5])  # the root itself stands at 12, the last position is 19


def test_a_chain_is_read_without_a_mask_of_ours() -> None:
    model = make_target("bloom").double()
    target = runs.prefilled(model, make_prompt())
    token_ids = [3, 4, 5]

    with torch.no_grad():
        logits = target.read(torch.tensor([token_ids]), DraftTree.chain(2), form="chain").logits[0]

    _assert_close(logits, reference.tree_logits(model, make_prompt(), token_ids, [-1, 0, 1]))
