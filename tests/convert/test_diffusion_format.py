"""Public diffusion models, converted: the numbers of their own forward, the target's own text, and what is refused."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import runs
from tests.drafters.diffuspec.stand_ins import logits_behind
from tests.families import VOCAB_SIZE
from tests.tiny import make_target
from transformers_falcon_spec import DiffusionDrafter, load_drafter
from transformers_falcon_spec.convert import Format, convert_checkpoint, detect, formats
from transformers_falcon_spec.drafters.diffuspec.drafter import DenoisedTexts, most_behind
from transformers_falcon_spec.errors import CheckpointError, DrafterMismatchError

from . import foreign_diffusion as foreign
from . import reference_diffusion
from .drafting import random_ids


@pytest.fixture(autouse=True)
def own_assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))


@dataclass(frozen=True)
class Kind:
    """A format, its parts, and what its own code says: the shift, and the blocks that see themselves and earlier ones."""

    format: Format
    parts: foreign.Parts
    shift: int = 1
    block: int | None = None
    mask: int = foreign.MASK
    target: str = "qwen2"


KINDS = {
    "Dream": Kind(formats.DREAM, foreign.dream()),
    "Dream with one table": Kind(formats.DREAM, foreign.dream(tie_word_embeddings=True)),
    "Fast-dLLM v2": Kind(formats.FAST_DLLM, foreign.fast_dllm(), block=4),
    "A2D of Qwen2": Kind(formats.A2D, foreign.a2d("qwen2", tie_word_embeddings=True), shift=0),
    "A2D of Qwen3": Kind(formats.A2D, foreign.a2d("qwen3"), shift=0),
    "A2D of Qwen3 in blocks": Kind(formats.A2D, foreign.a2d("qwen3", block_size=4), shift=0, block=4),
    "A2D of Llama": Kind(formats.A2D, foreign.a2d("llama"), shift=0, target="llama"),
    "DiffuLLaMA": Kind(formats.DIFFULLAMA, foreign.diffullama(), mask=40, target="llama"),
}


def loaded(kind: Kind, target: Any, folder: Path) -> Any:
    """A drafter of a folder of that kind."""
    is_word = kind.mask < VOCAB_SIZE
    mask, special = (f"word{kind.mask}", {"": 99}) if is_word else ("<|mask|>", foreign.SPECIAL)
    return load_drafter(foreign.saved(folder, kind.parts, mask=mask, **special), target)


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_a_model_drafts_from_the_logits_of_its_own_forward(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    drafter = loaded(kind, foreign.saved_target(tmp_path / "target", kind.target), tmp_path / "source")
    config, weights = kind.parts
    weights = {name: value.double() for name, value in weights.items()}

    for length, most in ((2, 2), (9, 1), (41, 20)):
        num = min(most, most_behind(drafter, length))  # how far a draft may reach
        text = random_ids(length)
        expected = reference_diffusion.drafted(weights, config, text.tolist(), num, kind.mask, kind.shift, kind.block)
        texts = DenoisedTexts(drafter, 1, 64)
        found = logits_behind(texts, text, num)
        torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=1e-5)
    attention = "full" if kind.block is None else "block_causal"
    settings = drafter.config
    assert (settings.attention, settings.block_size, settings.logits_shift) == (attention, kind.block, kind.shift)
    assert (settings.mask_token_id, settings.draft_vocab_size) == (kind.mask, VOCAB_SIZE)
    is_tied = config.get("tie_word_embeddings", True)
    assert (drafter.model.lm_head.weight is drafter.model.get_input_embeddings().weight) is is_tied


@pytest.mark.parametrize("name", KINDS)
def test_the_format_of_a_model_is_recognised_and_the_text_with_it_is_the_targets(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    target = foreign.saved_target(tmp_path / "target", kind.target)

    assert detect({**kind.parts[0], "mask_token_id": kind.mask}, kind.parts[1]) is kind.format
    drafter = loaded(kind, target, tmp_path / "source")
    chain = runs.informed(target, drafter)
    drafter.config.search = "tree"
    rows = runs.both(target, drafter, torch.stack([random_ids(9, 1), random_ids(9, 2)]))
    chain.assert_equal()
    rows.assert_equal(is_kept=False)
    assert chain.stats.num_drafted > 0
    assert rows.stats.num_drafted > rows.stats.num_steps


@pytest.mark.parametrize("mode", [{"do_sample": False}, runs.SAMPLING], ids=["greedy", "sampling"])
def test_the_text_is_the_targets_own_and_drafts_of_a_copy_of_it_are_kept(mode: dict[str, Any], tmp_path: Path) -> None:
    target = foreign.saved_target(tmp_path / "target", num_hidden_layers=1, rope_theta=1e6)
    parts = foreign.copied(target, foreign.dream(num_hidden_layers=1))
    drafter: Any = load_drafter(foreign.saved(tmp_path / "source", parts), target)
    several = runs.both(target, drafter, **mode)
    drafter.config.search = "tree"
    tree = runs.both(target, drafter, **mode)
    rows = [random_ids(9, 1), random_ids(9, 2)][: 1 if mode["do_sample"] else 2]  # sampled rows draw at their own pace
    batch = runs.both(target, drafter, torch.stack(rows), **mode)

    drafter.config.num_draft_tokens = 1  # without masks, one layer computes what it computes in the target
    one = runs.both(target, drafter, **mode)

    for pair in (several, tree, batch):
        pair.assert_equal(is_kept=False)
        assert pair.stats.num_drafted > pair.stats.num_steps
    one.assert_equal()
    assert one.stats.acceptance_length > (1.9 if mode == {"do_sample": False} else 1.5)


def test_a_converted_drafter_is_saved_and_loads_like_any_other(tmp_path: Path) -> None:
    target = foreign.saved_target(tmp_path / "target")
    source = foreign.saved(tmp_path / "source", foreign.dream(tie_word_embeddings=True))

    kind = convert_checkpoint(source, tmp_path / "own", str(tmp_path / "target"))
    again = DiffusionDrafter.from_pretrained(tmp_path / "own", target=target).eval()

    assert kind is formats.DREAM
    weights, theirs = again.state_dict(), load_drafter(source, target).state_dict()
    assert all(weights[name].equal(theirs[name].to(weights[name].dtype)) for name in theirs)
    record = json.loads((tmp_path / "own" / "conversion.json").read_text())
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} == set(
        record["source_sha256"]
    )
    assert record["format"] == "Dream"


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    source, target = foreign.saved(tmp_path / "source", foreign.dream()), foreign.saved_target(tmp_path / "target")

    load_drafter(source, target)
    with pytest.raises(CheckpointError, match=r"comes with it \(`auto_map`\) is never run"):
        detect({"model_type": "new", "auto_map": {"AutoModel": "new.Model"}}, ["body.weight"])

    assert not (source / "was_run").exists()


def test_other_tokens_than_the_targets_are_refused(tmp_path: Path) -> None:
    target = foreign.saved_target(tmp_path / "target")
    other = foreign.saved(tmp_path / "other", foreign.dream(), **foreign.SPECIAL, word7=8)

    with pytest.raises(DrafterMismatchError, match="id 8 is 'word7' in the draft model and 'word8' in the target"):
        load_drafter(other, target)


def test_a_mask_that_is_a_word_of_the_target_is_refused(tmp_path: Path) -> None:
    target = foreign.saved_target(tmp_path / "target", tokens=foreign.MASK, vocab_size=foreign.SIZE)
    special = {"<|mask|>": foreign.START}
    source = foreign.saved(tmp_path / "source", foreign.dream(mask_token_id=foreign.START), **special)

    with pytest.raises(DrafterMismatchError, match=r"id 97 is '<\|mask\|>' in the draft model and 'word97'"):
        load_drafter(source, target)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"mask_token_id": 4000},
            "must be one of its 100 tokens, but it is 4000: `mask_token_id` of its config is 4000",
        ),
        ({"mask_token_id": "98"}, "`mask_token_id` of its config is '98', its tokenizer's 98"),
        ({"vocab_size": None}, "`vocab_size` of the config .* must be a positive whole number, but it is None"),
        ({"vocab_size": -5}, "`vocab_size` of the config .* must be a positive whole number, but it is -5"),
        ({"rms_norm_eps": "x"}, "reading it fails: Strict.*'rms_norm_eps' expected float, got str"),
        ({"hidden_size": 0}, "`hidden_size` of the config .* must be a positive whole number, but it is 0"),
        ({"intermediate_size": 97}, r"'model.layers.0.mlp.down_proj.weight': '\(64, 96\) instead of \(64, 97\)'"),
        ({"num_hidden_layers": 3}, r"missing: \['model.layers.2.input_layernorm.weight'"),
        ({"num_hidden_layers": 1}, r"unexpected: \['model.layers.1.input_layernorm.weight'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "Rotary positions must be of a kind in"),
        ({"quantization_config": {"bits": 4}}, "This is a quantised checkpoint"),
    ],
)
def test_config_and_weights_that_do_not_belong_together_are_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config, weights = foreign.dream()
    source = foreign.saved(tmp_path / "source", ({**config, **fields}, weights))
    target = foreign.saved_target(tmp_path / "target")

    with pytest.raises(CheckpointError, match=message):
        load_drafter(source, target)


def test_a_mask_of_the_config_that_is_not_the_tokenizers_is_refused(tmp_path: Path) -> None:
    source = foreign.saved(tmp_path / "source", foreign.dream(mask_token_id=foreign.START))
    target = foreign.saved_target(tmp_path / "target")

    with pytest.raises(DrafterMismatchError, match="token 98 of the diffusion model's tokenizer, but `mask_token_id`"):
        load_drafter(source, target)


def test_tokens_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    source, target = foreign.saved(tmp_path / "source", foreign.dream()), foreign.saved_target(tmp_path / "target")

    with pytest.raises(DrafterMismatchError, match=r"are compared, but the target .* brings no tokenizer"):
        load_drafter(source, make_target("qwen2"))
    with pytest.raises(CheckpointError, match="must know which tokens the target has, but the source does not say it"):
        convert_checkpoint(source, tmp_path / "own")
    (source / "tokenizer.json").unlink()
    with pytest.raises(DrafterMismatchError, match=r"are compared, but `.*source` brings no tokenizer"):
        load_drafter(source, target)


@pytest.mark.parametrize("model_type", ["llada", "lladamoe", "llada2_moe"])
def test_llada_is_refused_with_the_reason(model_type: str, tmp_path: Path) -> None:
    config, weights = foreign.dream(model_type=model_type, architectures=["LLaDA"], mask_token_id=126336)
    source = foreign.saved(tmp_path / "source", (config, weights))

    with pytest.raises(CheckpointError, match=r"This is LLaDA.*architecture and a tokenizer of its own.*never run"):
        load_drafter(source, make_target("qwen2"))


def test_a_model_without_any_mask_is_refused_and_fast_dllm_has_its_codes_own(tmp_path: Path) -> None:
    target = foreign.saved_target(tmp_path / "target")
    plain, fast = (
        foreign.saved(tmp_path / name, parts, mask=None)
        for name, parts in {"a2d": foreign.a2d("qwen2"), "fast": foreign.fast_dllm()}.items()
    )

    with pytest.raises(CheckpointError, match="must be one of its 100 tokens, but it is None"):
        load_drafter(plain, target)
    with pytest.raises(CheckpointError, match="must be one of its 100 tokens, but it is 151665"):
        load_drafter(fast, target)


def test_blocks_must_have_a_size(tmp_path: Path) -> None:
    source = foreign.saved(tmp_path / "source", foreign.fast_dllm(bd_size=None))
    target = foreign.saved_target(tmp_path / "target")

    with pytest.raises(
        CheckpointError, match=r"`bd_size` of the config .* must be a positive whole number, but it is None"
    ):
        load_drafter(source, target)


def test_a_model_that_may_have_been_trained_in_blocks_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_drafter(
        foreign.saved(tmp_path / "source", foreign.a2d("qwen3")), foreign.saved_target(tmp_path / "target", "qwen3")
    )

    assert "taken for a model all of whose tokens see all (MDLM), for its config names no `block_size`" in caplog.text
