"""The drafter as a model: who sees whom, what is saved, and which targets and checkpoints it takes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests import reference
from tests.tiny import VOCAB_SIZE, make_drafter, make_prompt, make_target
from transformers_falcon_spec import FalconSpecConfig, FalconSpecDrafter, SpeculationConfig
from transformers_falcon_spec.core.tree import DraftTree
from transformers_falcon_spec.errors import (
    CheckpointError,
    DrafterMismatchError,
    DraftTreeError,
    FalconSpecError,
    OptionError,
)

WIDTH = 16
LENGTH = 9


def small_drafter(**options: Any) -> FalconSpecDrafter:
    """A drafter of float64 weights large enough that every dependence shows."""
    fields = {"hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": VOCAB_SIZE}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = FalconSpecDrafter(FalconSpecConfig(**fields, initializer_range=WIDTH**-0.5, **options))
        with torch.no_grad():
            for weight in drafter.recurrence.parameters():
                weight.normal_(std=WIDTH**-0.5)
    return drafter.double().eval()


def random_rows(num_rows: int = 1, length: int = LENGTH, width: int = WIDTH, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, length, width, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def dependences(drafter: FalconSpecDrafter, phase: int) -> list[list[bool]]:
    """`[row][key]`: whether the output of `row` changes when the input of `key` does."""
    embeds, features = random_rows(seed=1), random_rows(seed=2).repeat(LENGTH + 1, 1, 1)
    for key in range(LENGTH):
        features[key, key] += 3.0
    outputs = drafter(embeds.expand_as(features), features, torch.full((LENGTH + 1,), phase))
    return ((outputs[:-1] - outputs[-1]).abs().amax(-1) > 1e-12).T.tolist()


@pytest.mark.parametrize("recurrence", ["sequence", "token"])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize(("block_size", "phase"), [(k, phase) for k in (1, 2, 3, 4) for phase in range(k)])
def test_a_row_depends_on_exactly_the_rows_up_to_its_blocks_end(
    block_size: int, phase: int, num_layers: int, recurrence: str
) -> None:
    drafter = small_drafter(block_size=block_size, num_hidden_layers=num_layers, recurrence=recurrence)

    found = dependences(drafter, phase)

    assert found == reference.block_causal_mask(range(LENGTH), range(LENGTH), block_size, phase)


def test_block_size_1_is_plain_causal_attention_in_any_phase() -> None:
    drafter = small_drafter(block_size=1, num_hidden_layers=2)
    embeds, features = random_rows(seed=1), random_rows(seed=2)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None]

    outputs = drafter(embeds, features, torch.tensor([0]))
    shifted = drafter(embeds, features, torch.tensor([5]))

    fused, _ = drafter.recur(torch.cat([embeds, features], dim=-1), None)
    torch.testing.assert_close(
        outputs, drafter.attend(fused, causal, torch.arange(LENGTH)[None], torch.zeros(1, LENGTH, dtype=torch.long))
    )
    assert torch.equal(outputs, shifted)


@pytest.mark.parametrize("newest_row", [False, True])
def test_a_row_is_told_its_place_in_the_block_but_its_keys_and_values_are_not(newest_row: bool) -> None:
    drafter = small_drafter(block_size=3, newest_row=newest_row)
    embeds, features = random_rows(seed=1), random_rows(seed=2)
    rows, _ = drafter.recur(torch.cat([embeds, features], dim=-1), None)
    everything, positions = torch.ones(1, LENGTH, LENGTH, dtype=torch.bool), torch.arange(LENGTH)[None]
    outputs, caches = [], []

    for phase in (0, 1):
        caches.append(DynamicCache())
        outputs.append(drafter.attend(rows, everything, positions, (positions - phase) % 3, caches[-1]))

    assert (outputs[0] - outputs[1]).abs().amax(-1).min() > 1e-6  # every row has another position
    assert torch.equal(caches[0].layers[0].keys, caches[1].layers[0].keys)
    assert torch.equal(caches[0].layers[0].values, caches[1].layers[0].values)


def test_without_the_embedding_of_places_a_drafter_is_one_whose_places_are_alike() -> None:
    drafter, without = small_drafter(block_size=2), small_drafter(block_size=2, block_position_embedding=False)
    rows = (random_rows(seed=1), random_rows(seed=2), torch.tensor([1]))
    state = drafter.state_dict()
    block_positions = state.pop("layers.0.self_attn.block_position.weight")

    without.load_state_dict(state)

    assert not torch.allclose(drafter(*rows), without(*rows))
    with torch.no_grad():
        drafter.layers[0].self_attn.block_position.weight.zero_()
    assert block_positions.shape == (2, WIDTH)
    assert torch.equal(drafter(*rows), without(*rows))


@pytest.mark.parametrize("block_size", [1, 2, 3])
@torch.no_grad()
def test_fresh_attention_looks_ahead_in_the_block_head_by_head(block_size: int) -> None:
    target = make_target()
    heads = target.config.num_attention_heads
    drafter = make_drafter(target, block_size=block_size, attention_bias=True, num_key_value_heads=heads)
    attention = drafter.layers[0].self_attn
    rotary = drafter.rotary_emb(torch.zeros(1, dtype=torch.float), torch.arange(LENGTH)[None])
    query, key = (
        projection.bias.view(1, heads, 1, -1).expand(-1, -1, LENGTH, -1)
        for projection in (attention.q_proj, attention.k_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *rotary)

    looked_at = (query @ key.mT)[0].argmax(-1)  # [heads, rows]

    for head in range(heads):
        ahead = head % block_size
        assert looked_at[head, : LENGTH - ahead].tolist() == list(range(ahead, LENGTH))


def test_phases_count_modulo_the_block_and_row_by_row() -> None:
    drafter = small_drafter(block_size=3)
    embeds, features = random_rows(3, seed=1), random_rows(3, seed=2)

    together = drafter(embeds, features, torch.tensor([0, 1, 5]))
    alone = [drafter(embeds[row : row + 1], features[row : row + 1], torch.tensor([row])) for row in range(3)]

    torch.testing.assert_close(together, torch.cat(alone))


@pytest.mark.parametrize(("recurrence", "reached"), [("sequence", {4, 5, 6, 7, 8}), ("token", {4})])
def test_the_recurrence_carries_state_along_the_sequence_or_not_at_all(recurrence: str, reached: set[int]) -> None:
    drafter = small_drafter(recurrence=recurrence)
    rows = random_rows(width=2 * WIDTH)
    changed = rows.clone()
    changed[0, 4] += 1.0

    before, after = drafter.recur(rows, None)[0], drafter.recur(changed, None)[0]

    assert set((before != after).any(-1)[0].nonzero().flatten().tolist()) == reached


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_recurrence_by_token_is_the_lstm_from_a_zero_state(num_layers: int) -> None:
    drafter = small_drafter(recurrence="token", num_recurrent_layers=num_layers)
    lstm = reference.lstm_of(drafter.recurrence)
    rows = random_rows(2, width=2 * WIDTH)

    outputs, _ = drafter.recur(rows, None)

    assert not any("weight_hh" in name for name in drafter.state_dict())
    for row in range(2):
        for token in range(LENGTH):
            expected, _ = lstm(rows[row : row + 1, token : token + 1])
            torch.testing.assert_close(outputs[row, token], expected[0, 0])


@pytest.mark.parametrize("recurrence", ["sequence", "token"])
def test_the_recurrence_goes_on_where_it_stopped(recurrence: str) -> None:
    drafter = small_drafter(recurrence=recurrence)
    rows = random_rows(2, width=2 * WIDTH)

    whole, _ = drafter.recur(rows, None)
    first, state = drafter.recur(rows[:, :4], None)
    second, _ = drafter.recur(rows[:, 4:], state)

    torch.testing.assert_close(whole, torch.cat([first, second], dim=1))
    assert (state is None) == (recurrence == "token")


@pytest.mark.parametrize("recurrence", ["sequence", "token"])
def test_padding_on_the_right_changes_nothing(recurrence: str) -> None:
    drafter = small_drafter(block_size=3, num_hidden_layers=2, recurrence=recurrence)
    embeds, features = random_rows(2, seed=1), random_rows(2, seed=2)
    is_token = torch.arange(LENGTH) < torch.tensor([[5], [LENGTH]])
    phases = torch.tensor([1, 2])

    padded = drafter(embeds, features, phases, is_token)
    short = drafter(embeds[:1, :5], features[:1, :5], phases[:1])

    torch.testing.assert_close(padded[:1, :5], short)
    assert padded.isfinite().all()


def test_the_feature_comes_after_the_embedding_in_a_row() -> None:
    drafter = small_drafter()
    embeds, features = random_rows(seed=1), random_rows(seed=2)

    outputs = drafter(embeds, features, torch.tensor([0]))

    swapped = drafter(features, embeds, torch.tensor([0]))
    assert not torch.allclose(outputs, swapped)
    assert drafter.recurrence.input_size == 2 * WIDTH


def test_inputs_of_another_type_are_computed_in_the_drafters() -> None:
    drafter = small_drafter().float()

    outputs = drafter(random_rows().bfloat16(), random_rows().bfloat16(), torch.tensor([0]))

    assert outputs.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_drafter_comes_back_from_disk_as_it_was_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    tree = DraftTree.from_lists([-1, 0, 0, 1]).to_json()
    drafter = make_drafter(make_target(), block_size=3, recurrence="token", draft_tree=tree).to(dtype)
    drafter.generation_config = SpeculationConfig(draft_tree=DraftTree.chain(2).to_json())

    drafter.save_pretrained(tmp_path)
    loaded = FalconSpecDrafter.from_pretrained(tmp_path, dtype="auto")

    assert loaded.dtype == dtype
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    assert all(torch.equal(value, drafter.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert loaded.config.to_diff_dict() == {**drafter.config.to_diff_dict(), "architectures": ["FalconSpecDrafter"]}
    assert loaded.generation_config.draft_tree == drafter.generation_config.draft_tree
    assert loaded.draft_tree.to_json() == DraftTree.chain(2).to_json()


def test_auto_classes_know_the_drafter(tmp_path: Path) -> None:
    drafter = make_drafter(make_target(), block_size=4)
    drafter.save_pretrained(tmp_path)

    config, model = AutoConfig.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)

    assert isinstance(config, FalconSpecConfig)
    assert config.block_size == 4
    assert isinstance(model, FalconSpecDrafter)


def test_a_drafter_without_options_beside_it_takes_the_defaults(tmp_path: Path) -> None:
    make_drafter(make_target(), block_size=3).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()

    loaded = FalconSpecDrafter.from_pretrained(tmp_path)

    assert loaded.draft_tree.to_json() == DraftTree.chain(3).to_json()


def test_the_tree_of_the_options_goes_before_that_of_the_config() -> None:
    drafter = make_drafter(make_target(), draft_tree=DraftTree.chain(5).to_json())

    of_config = drafter.draft_tree
    drafter.generation_config.draft_tree = DraftTree.chain(3).to_json()

    assert (len(of_config), len(drafter.draft_tree)) == (6, 4)


def _without(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if name != "layers.0.mlp.up_proj.weight"}


def _with_embedding(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**weights, "embed_tokens.weight": torch.zeros(VOCAB_SIZE, 64)}


def _narrower(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**weights, "layers.0.mlp.up_proj.weight": torch.zeros(8, 64)}


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_without, r"must hold exactly the weights.*missing_keys.*layers\.0\.mlp\.up_proj\.weight"),
        (_with_embedding, r"must hold exactly the weights.*unexpected_keys.*embed_tokens\.weight"),
        (_narrower, r"must hold exactly the weights.*mismatched_keys.*layers\.0\.mlp\.up_proj\.weight"),
    ],
    ids=["missing", "extra", "another shape"],
)
def test_a_checkpoint_that_is_not_a_whole_drafter_is_refused(tmp_path: Path, spoil: Any, text: str) -> None:
    make_drafter(make_target()).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(spoil(load_file(file)), file, metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match=text):
        FalconSpecDrafter.from_pretrained(tmp_path)


def test_neither_embedding_nor_head_is_in_the_weights() -> None:
    drafter = make_drafter(make_target())

    names = {name.partition(".")[0] for name in drafter.state_dict()}
    sizes = {size for value in drafter.state_dict().values() for size in value.shape}

    assert names == {"recurrence", "layers"}
    assert VOCAB_SIZE not in sizes
    assert drafter.get_output_embeddings() is None


@pytest.mark.parametrize(
    ("family", "changes", "widths"),
    [
        ("llama", {}, (64, 64, 64)),
        ("gpt2", {}, (64, 64, 64)),
        ("opt", {}, (64, 64, 64)),
        ("opt", {"word_embed_proj_dim": 32}, (32, 32, 32)),  # its head reads what its embedding gives
    ],
)
@pytest.mark.parametrize("layers", [(-1,), (1, 2, -1)])
def test_sizes_come_from_the_target(
    family: str, changes: dict[str, Any], widths: tuple[int, int, int], layers: tuple[int, ...]
) -> None:
    target = make_target(family, **changes)
    hidden, embedding, last = widths

    drafter = make_drafter(target, block_size=3, feature_layers=layers)

    config = drafter.config
    assert (config.hidden_size, config.embedding_size) == (hidden, embedding)
    assert config.feature_size == last + 64 * (len(layers) - 1)
    assert drafter.recurrence.input_size == config.embedding_size + config.feature_size
    assert (config.vocab_size, config.bos_token_id, config.pad_token_id) == (VOCAB_SIZE, *_special_ids(target))
    drafter.check_target(target)


def _special_ids(target: Any) -> tuple[int | None, int | None]:
    return target.config.bos_token_id, target.config.pad_token_id


@pytest.mark.parametrize(
    ("family", "changes", "layers"),
    [
        ("llama", {}, (0, 2, -1)),
        ("gpt2", {}, (-1, 1)),
        ("opt", {"word_embed_proj_dim": 32}, (-1,)),
        ("opt", {"word_embed_proj_dim": 32}, (0, 1, -1)),
    ],
)
def test_the_text_is_the_targets_own_whatever_features_are_read(
    family: str, changes: dict[str, Any], layers: tuple[int, ...]
) -> None:
    target = make_target(family, **changes).double()
    parents = [-1, 0, 0, 1, 3] if layers == (-1,) else [-1, 0, 0, 1, 2]
    drafter = make_drafter(target, feature_layers=layers, draft_tree=DraftTree.from_lists(parents).to_json())
    prompt = make_prompt()

    out = target.generate(prompt, assistant_model=drafter, max_new_tokens=8, do_sample=False)

    assert out.tolist() == reference.greedy(target, prompt, 8).tolist()


def test_a_tree_of_several_passes_needs_features_that_the_drafter_predicts() -> None:
    target = make_target()
    drafter = make_drafter(target, feature_layers=(1, -1), draft_tree=DraftTree.chain(3).to_json())

    with pytest.raises(
        OptionError, match="its draft tree must end at depth 2, the block size, but it reaches depth 3"
    ):
        target.generate(make_prompt(), assistant_model=drafter, max_new_tokens=4)


def test_a_drafter_in_another_type_than_its_target_drafts() -> None:
    target = make_target().bfloat16()
    drafter = make_drafter(target, draft_tree=DraftTree.chain(4).to_json()).float()

    out = target.generate(make_prompt(), assistant_model=drafter, max_new_tokens=6, return_dict_in_generate=True)

    assert out.speculation.num_passes > 0


def test_options_go_before_what_the_target_says() -> None:
    drafter = make_drafter(make_target(), intermediate_size=40, num_hidden_layers=2, target_name_or_path="a/b")

    assert drafter.config.intermediate_size == 40
    assert len(drafter.layers) == 2
    assert drafter.config.target_name_or_path == "a/b"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"vocab_size": 55}, "expects a vocabulary of size 97, but the target `x/other` gives 55"),
        ({"hidden_size": 32}, "expects features of size 64, but the target `x/other` gives 32"),
    ],
)
def test_another_target_is_refused_with_the_name_of_the_right_one(changes: dict[str, int], text: str) -> None:
    drafter = make_drafter(make_target(), target_name_or_path="x/right")
    other = make_target(**changes)
    other.config._name_or_path = "x/other"

    with pytest.raises(DrafterMismatchError, match=f"{text}. Load the target it was trained for: `x/right`."):
        drafter.check_target(other)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"block_size": 0}, OptionError, "`block_size` must be at least 1, but it is 0."),
        ({"num_hidden_layers": 0}, OptionError, "`num_hidden_layers` must be at least 1, but it is 0."),
        ({"num_recurrent_layers": -1}, OptionError, "`num_recurrent_layers` must be at least 1, but it is -1."),
        ({"recurrence": "both"}, OptionError, r"`recurrence` must be one of .*, but it is 'both'."),
        ({"feature_layers": []}, OptionError, "`feature_layers` must name at least one hidden state"),
        ({"recurrent_dropout": 1.5}, OptionError, "`recurrent_dropout` must lie in 0..1, but it is 1.5."),
        ({"draft_tree": {"parents": [-1]}}, DraftTreeError, "must be an object with `parents` and `ranks`"),
        (
            {"draft_tree": {"parents": [-1, 2, 0], "ranks": [-1, 0, 0]}},
            DraftTreeError,
            "Node 1 must come after its parent",
        ),
        ({"draft_tree": {"parents": [-1, 0, 0], "ranks": [-1, 1, 1]}}, DraftTreeError, "Siblings must differ in rank"),
        (
            {"newest_row": True, "block_position_embedding": False},
            OptionError,
            "`newest_row` needs `block_position_embedding`",
        ),
        ({"transition_rank": 0}, OptionError, "`transition_rank` must be at least 1"),
        ({"transition_rank": 4, "transition_tokens": 0}, OptionError, "`transition_tokens` must be at least 1"),
        ({"transition_size": 4}, OptionError, "`transition_size` needs a transition"),
        ({"transition_rank": 4, "transition_tokens": 2}, OptionError, "`transition_tokens` needs a network"),
        ({"block_size": "2"}, StrictDataclassError, "'block_size' expected int, got str"),
        ({"recurrent_dropout": "much"}, StrictDataclassError, "'recurrent_dropout' expected float, got str"),
        ({"feature_layers": "last"}, StrictDataclassError, "'feature_layers' expected a list, got str"),
        ({"draft_tree": [-1, 0]}, StrictDataclassError, "'draft_tree' expected a dict, got list"),
    ],
)
def test_a_wrong_option_is_refused_in_words(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        FalconSpecConfig(**options)


def test_a_misspelled_option_of_from_target_is_refused() -> None:
    with pytest.raises(OptionError, match="`FalconSpecConfig` has no option `blocksize`"):
        FalconSpecDrafter.from_target(make_target(), blocksize=3)


def test_a_broken_tree_in_a_saved_config_is_found_when_loading(tmp_path: Path) -> None:
    make_drafter(make_target()).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"draft_tree": null', '"draft_tree": {"parents": [0], "ranks": [-1]}'))

    with pytest.raises(FalconSpecError, match="`parents` must start with -1"):
        FalconSpecDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("block_size", [1, 2, 3])
@torch.no_grad()
def test_each_row_is_given_its_places_map_of_the_newest_row_of_its_block(block_size: int) -> None:
    drafter = small_drafter(block_size=block_size, newest_row=True)
    attention, states = drafter.layers[0].self_attn, random_rows(2)
    phases = torch.tensor([0, 1])
    block_positions = (torch.arange(LENGTH) - phases[:, None]) % block_size

    found = attention._newest(states, block_positions)

    for text in range(2):
        for row in range(LENGTH):
            last = min(row + block_size - 1 - int(block_positions[text, row]), LENGTH - 1)
            weight = attention.newest.weight.unflatten(0, (block_size, -1))[block_positions[text, row]]
            torch.testing.assert_close(found[text, row], weight @ states[text, last])


@torch.no_grad()
def test_queries_know_what_the_row_is_told_of_the_newest_row() -> None:
    drafter = small_drafter(block_size=2, newest_row=True)
    attention, states = drafter.layers[0].self_attn, random_rows()
    block_positions, rotary = torch.arange(LENGTH)[None] % 2, drafter.rotary_emb(states, torch.arange(LENGTH)[None])
    added = attention.block_position(block_positions) + attention._newest(states, block_positions)
    rows = ((states + added) @ attention.q_proj.weight.T, states @ attention.k_proj.weight.T)
    by_head = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in rows)

    found, _ = attention(states, position_embeddings=rotary, attention_mask=None, block_positions=block_positions)

    query, key = apply_rotary_pos_emb(*by_head, *rotary)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    weights = (query @ key.mT * attention.head_dim**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    read = weights @ (states @ attention.v_proj.weight.T).unflatten(-1, (2, -1)).transpose(1, 2)
    torch.testing.assert_close(found, read.transpose(1, 2).flatten(2) @ attention.o_proj.weight.T + added)


def test_a_shortcut_carries_rows_past_the_recurrence() -> None:
    drafter = small_drafter(shortcut=True)
    rows = torch.cat([random_rows(seed=1), random_rows(seed=2)], dim=-1)

    fused, _ = drafter.recur(rows, None)

    torch.testing.assert_close(fused, drafter.recurrence(rows)[0] + rows @ drafter.shortcut.weight.T)


@pytest.mark.parametrize("recurrence", ["token", "sequence"])
def test_inputs_on_one_scale_are_read_alike_however_large_they_are(recurrence: str) -> None:
    drafter = small_drafter(shortcut=True, norm_inputs=True, recurrence=recurrence)
    embeds, features = random_rows(seed=1), random_rows(seed=2)

    expected, _ = drafter.recur(torch.cat([embeds, features], dim=-1), None)
    found, _ = drafter.recur(torch.cat([20 * embeds, 300 * features], dim=-1), None)

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    plain = small_drafter(shortcut=True, recurrence=recurrence)
    rows = [part / part.pow(2).mean(-1, keepdim=True).sqrt() for part in (embeds, features)]
    torch.testing.assert_close(plain.recur(torch.cat(rows, dim=-1), None)[0], expected, rtol=1e-5, atol=1e-5)


def test_a_target_whose_layers_differ_in_width_gets_a_drafter_of_the_widest() -> None:
    target = make_target("gemma3n", intermediate_size=[32, 96, 48, 64])

    assert FalconSpecDrafter.from_target(target).config.intermediate_size == 96
