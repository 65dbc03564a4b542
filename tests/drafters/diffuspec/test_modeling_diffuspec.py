"""The diffusion drafter as a model: made of a target, saved and loaded, and refused where it cannot draft."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from tests import runs
from tests.adapters import adapted
from tests.drafters.diffuspec.stand_ins import MASK, OPTIONS, make_diffusion, make_model
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec import (
    CheckpointError,
    DiffusionConfig,
    DiffusionDrafter,
    DrafterMismatchError,
    DraftTree,
    OptionError,
    SpeculationConfig,
)
from transformers_falcon_spec.commands.loading import load_drafter
from transformers_falcon_spec.drafters.diffuspec.drafter import OWN_FIELDS, logits_of, visible
from transformers_falcon_spec.drafters.diffuspec.search import NgramProxy


@pytest.mark.parametrize("ties", [True, False])
def test_a_fresh_drafter_is_the_targets_own_layers_with_a_mask_beside_its_tokens(ties: bool) -> None:
    target = make_target(tie_word_embeddings=ties)

    drafter = DiffusionDrafter.from_target(target, num_hidden_layers=2, num_draft_tokens=3)

    config, size = drafter.config, target.config.vocab_size
    ours, theirs = drafter.model.state_dict(), target.state_dict()
    assert (config.mask_token_id, config.draft_vocab_size, config.vocab_size) == (size, size, size)
    assert (config.attention, config.logits_shift, config.block_size, config.num_draft_tokens) == (
        "prefix_causal",
        1,
        8,
        3,
    )
    for layer, source in ((0, 0), (1, 2)):
        name = "model.layers.{}.mlp.up_proj.weight"
        assert ours[name.format(layer)].equal(theirs[name.format(source)].float())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert ours[name][:size].equal(theirs[name])
        torch.testing.assert_close(ours[name][size], theirs[name].mean(0))
    assert (drafter.model.get_input_embeddings().weight is drafter.model.get_output_embeddings().weight) == ties


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "qwen3", "cohere", "granite"])
def test_targets_of_many_families_give_their_layers(family: str) -> None:
    target = make_target(family, seed=7).double()
    drafter = DiffusionDrafter.from_target(target, block_size=4).double().eval()
    positions = torch.arange(9)
    text = torch.cat([make_prompt(6)[0], torch.full((3,), drafter.config.mask_token_id)])
    allowed = visible("prefix_causal", 6, 4, positions, positions)

    pair = runs.informed(target, drafter)
    with torch.no_grad():
        trained = drafter(text[None], positions[None], allowed[None], torch.ones(1, 9, dtype=torch.bool))
        drafted = logits_of(drafter.model, text[None], positions[None], allowed[None], 9)[0]

    pair.assert_equal()
    assert pair.stats.num_drafted > 0
    torch.testing.assert_close(trained.float(), drafted[:, : target.config.vocab_size], rtol=1e-5, atol=1e-5)


def test_a_target_that_sees_through_windows_is_refused() -> None:
    with pytest.raises(OptionError, match="must see the whole text, but some see a window or a chunk"):
        DiffusionDrafter.from_target(make_target("gemma3"))


@pytest.mark.parametrize("family", ["bloom", "falcon_alibi"])
def test_a_target_of_a_kind_that_takes_no_mask_of_pairs_is_refused(family: str) -> None:
    with pytest.raises(OptionError, match=r"must take a mask that says what each token sees, but .* fails at one"):
        DiffusionDrafter.from_target(make_target(family), num_hidden_layers=1)


def test_memory_that_runs_out_in_the_check_of_a_model_is_not_laid_to_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    model = make_model()
    monkeypatch.setattr(type(model), "forward", full)

    with pytest.raises(torch.OutOfMemoryError, match="no memory is left"):
        DiffusionDrafter.wrap(model, make_target(), mask_token_id=MASK, **OPTIONS["diffullama"])


@pytest.mark.parametrize("ties", [True, False])
def test_what_is_saved_is_what_is_loaded(tmp_path: Path, ties: bool) -> None:
    target = make_target(tie_word_embeddings=ties)
    drafter = DiffusionDrafter.from_target(target, attention="full", search="tree", block_size=4, beam_width=2)
    drafter.generation_config = SpeculationConfig(num_tree_nodes=6)
    drafter.proxy = NgramProxy.fit([[5, 6, 7, 5, 6]], 2, target.config.vocab_size)
    drafter.save_pretrained(tmp_path)

    for loaded in (
        DiffusionDrafter.from_pretrained(tmp_path),
        AutoModel.from_pretrained(tmp_path),
        load_drafter(str(tmp_path), target),
    ):
        weights = loaded.state_dict()
        assert all(value.equal(weights[name]) for name, value in drafter.state_dict().items())
        assert weights.keys() == drafter.state_dict().keys()
        assert isinstance(loaded, DiffusionDrafter)
        assert (loaded.config.attention, loaded.config.search, loaded.config.block_size) == ("full", "tree", 4)
    loaded = DiffusionDrafter.from_pretrained(tmp_path, target=target)
    assert loaded.generation_config.num_tree_nodes == loaded.num_nodes == 6
    assert loaded.draft_settings == drafter.draft_settings
    assert loaded.proxy is not None
    assert loaded.proxy.probs([5], [6, 7]) == drafter.proxy.probs([5], [6, 7])


def test_a_mask_behind_the_targets_tokens_is_nothing_to_warn_of(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        DiffusionDrafter.from_target(make_target(vocab_size=83))
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)

    assert "mask_token_id" not in caplog.text


def test_settings_tell_proxies_apart() -> None:
    drafter, settings = make_diffusion(), []

    for text in (None, [1, 2, 3], [1, 2, 4]):
        drafter.proxy = None if text is None else NgramProxy.fit([text], 2, 97)
        settings.append(drafter.draft_settings)

    assert settings[0] != settings[1] != settings[2]


def test_an_adapter_drafts_with_the_proxy_of_the_drafter_beneath(tmp_path: Path) -> None:
    base = DiffusionDrafter.from_target(make_target(), num_hidden_layers=1)
    base.proxy = NgramProxy.fit([[1, 2, 3]], 2, base.config.vocab_size)
    base.save_pretrained(tmp_path / "base")
    adapted(DiffusionDrafter.from_pretrained(tmp_path / "base")).save_pretrained(tmp_path / "adapter")

    loaded = DiffusionDrafter.from_pretrained(tmp_path / "adapter")

    assert loaded.proxy is not None
    assert loaded.proxy.fingerprint == base.proxy.fingerprint


def test_a_proxy_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    drafter = make_diffusion()
    drafter.proxy = NgramProxy.fit([[1, 2, 3]], 2, 97)
    drafter.save_pretrained(tmp_path)
    file = tmp_path / "ngram_proxy.safetensors"
    file.write_bytes(file.read_bytes()[:-5])

    with pytest.raises(CheckpointError, match="must hold files that can be read"):
        DiffusionDrafter.from_pretrained(tmp_path)


def test_a_diffusion_model_on_disk_is_wrapped(tmp_path: Path) -> None:
    target = make_target(seed=7).double()
    make_model("dream").save_pretrained(tmp_path)

    drafter = DiffusionDrafter.from_pretrained(
        tmp_path, target=target, mask_token_id=MASK, num_draft_tokens=6, **OPTIONS["dream"]
    )

    assert (type(drafter.model).__name__, drafter.dtype, drafter.training) == ("Dream", torch.double, False)
    assert (drafter.config.attention, drafter.config.num_draft_tokens) == ("full", 6)
    runs.informed(target, drafter).assert_equal()


def test_a_wrapped_model_is_saved_as_a_drafter(tmp_path: Path) -> None:
    target = make_target(seed=7).double()
    drafter = DiffusionDrafter.wrap(
        make_model("a2d on a grid"), target, mask_token_id=MASK, **OPTIONS["a2d on a grid"]
    )
    drafter.save_pretrained(tmp_path)

    loaded = DiffusionDrafter.from_pretrained(tmp_path, target=target, dtype=torch.double)

    assert (loaded.config.attention, loaded.config.block_size) == ("block_causal", 4)
    assert all(value.equal(loaded.state_dict()[name]) for name, value in drafter.state_dict().items())


def test_options_of_wrapping_are_refused_for_a_drafter(tmp_path: Path) -> None:
    make_diffusion().save_pretrained(tmp_path)

    with pytest.raises(OptionError, match="`tokenizer` must be left out unless a model is wrapped"):
        DiffusionDrafter.from_pretrained(tmp_path, target=make_target(), tokenizer=None)


def test_a_model_without_all_its_weights_is_refused(tmp_path: Path) -> None:
    model = make_model("dream")
    del model.model.layers[1]
    model.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 2')
    (tmp_path / "config.json").write_text(config)

    with pytest.raises(CheckpointError, match="must hold all weights of `Dream`, but it lacks"):
        DiffusionDrafter.from_pretrained(tmp_path, target=make_target(), mask_token_id=MASK, **OPTIONS["dream"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"attention": "causal"},
            r"`attention` must be one of \('full', 'prefix_causal', 'block_causal'\), but it is 'causal'",
        ),
        ({"search": "best"}, "`search` must be one of .* but it is 'best'"),
        ({"draft_length": "long"}, "`draft_length` must be one of .* but it is 'long'"),
        ({"auto_class": "AutoModelForVision"}, "`auto_class` must be one of"),
        ({"logits_shift": 2}, r"`logits_shift` must be one of \(0, 1\), but it is 2"),
        ({"beam_width": 0}, "`beam_width` must be at least 1, but it is 0"),
        ({"num_draft_tokens": -1}, "`num_draft_tokens` must be at least 0, but it is -1"),
        ({"model_weight": 1.5}, r"`model_weight` must lie in 0\.\.1, but it is 1\.5"),
        ({"mass": 0.0}, "`mass` must lie above 0 and up to 1, but it is 0.0"),
        ({"growth": -1}, "`growth` must be at least 0"),
        ({"smoothing": 0.0}, "`smoothing` must lie above 0 and up to 1, but it is 0.0"),
        ({"min_draft_tokens": 0}, "`min_draft_tokens` must be at least 1, but it is 0"),
        ({"max_candidates": 0}, "`max_candidates` must be at least 1, but it is 0"),
        (
            {"num_draft_tokens": 9},
            "`num_draft_tokens` must be at most 5, the block that the model was trained to fill in, but it is 9",
        ),
        ({"min_draft_tokens": 6}, "`min_draft_tokens` must be at most `num_draft_tokens`, 5, but it is 6"),
        (
            {"attention": "block_causal", "block_size": None},
            '`attention="block_causal"` needs the `block_size` of its grid',
        ),
        ({"draft_vocab_size": 98}, r"`draft_vocab_size` must lie in 1\.\.97, .* but it is 98"),
        ({"beams": 3}, "`DiffusionConfig` has no option `beams`"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_diffusion(make_target(), **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "`draft_config` must be the configuration of the model that drafts, but there is none"),
        ({"draft_config": {"model_type": "unheard"}}, "its `model_type` is 'unheard'. Register its classes, or wrap"),
        (
            {"draft_config": {"model_type": "llama", "vocab_size": 9}, "mask_token_id": 9},
            r"`mask_token_id` must lie in 0\.\.8, the diffusion model's ids, but it is 9",
        ),
        (
            {"draft_config": {"model_type": "mistral", "sliding_window": 4}, "mask_token_id": 9},
            "must see the whole text, but some see a window",
        ),
    ],
)
def test_a_diffusion_model_that_cannot_draft_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        DiffusionConfig(**fields)


def test_an_option_that_was_changed_to_a_wrong_value_is_refused_in_the_next_call() -> None:
    target = make_target().double()
    drafter = make_diffusion(target)
    drafter.config.beam_width = 0

    with pytest.raises(OptionError, match="`beam_width` must be at least 1, but it is 0"):
        runs.drafted(target, drafter)


def test_an_option_of_neither_the_drafter_nor_the_model_is_refused() -> None:
    with pytest.raises(OptionError, match="has no option `num_layer`"):
        DiffusionDrafter.from_target(make_target(), num_layer=2)


def test_another_target_is_refused() -> None:
    drafter = make_diffusion(make_target().double())

    with pytest.raises(DrafterMismatchError, match=r"expects a vocabulary of size 97, but the target .* gives 50"):
        runs.drafted(make_target(vocab_size=50).double(), drafter, make_prompt() % 50)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"draft_tree": DraftTree.chain(2).to_json()},
            "A `DiffusionDrafter` makes its trees itself, but `draft_tree` names a static one",
        ),
        ({"dynamic_tree": True}, "A `DiffusionDrafter` grows no trees"),
    ],
)
def test_trees_of_other_kinds_are_refused(options: dict[str, Any], message: str) -> None:
    target = make_target().double()
    drafter = make_diffusion(target)
    drafter.generation_config = SpeculationConfig(**options)

    with pytest.raises(OptionError, match=message):
        runs.drafted(target, drafter)


def test_the_page_names_every_option() -> None:
    page = (Path(__file__).parents[3] / "docs" / "options.md").read_text(encoding="utf-8")

    assert [name for name in sorted(OWN_FIELDS) if f"`{name}`" not in page] == []
