"""Vision-language targets, with text alone and with an image in the prompt: the text stays the target's own."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.families import FAMILIES, VOCAB_SIZE
from tests.pairs import in_turn
from tests.tiny import in_double, make_drafter, make_prompt, peaked
from transformers_falcon_spec.core.sampling import row_seeds
from transformers_falcon_spec.generation.probe import probe
from transformers_falcon_spec.generation.processors import RowCriteria

pytestmark = pytest.mark.families

IMAGE, START, END = VOCAB_SIZE - 1, VOCAB_SIZE - 3, VOCAB_SIZE - 4
_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
_VISION |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_QWEN: dict[str, Any] = {"image_token_id": IMAGE, "video_token_id": VOCAB_SIZE - 2, "vision_start_token_id": START}
_QWEN |= {"vision_end_token_id": END}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64}
_MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {  # the text family, the class, and what else it takes
    "gemma3": (
        "gemma3",
        "Gemma3Config",
        {"vision_config": {"model_type": "siglip_vision_model", **_VISION}, "mm_tokens_per_image": 4}
        | {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END},
    ),
    "llava": (
        "llama",
        "LlavaConfig",
        {"vision_config": {"model_type": "clip_vision_model", **_VISION}, "image_token_index": IMAGE},
    ),
    "mistral3": (
        "mistral",
        "Mistral3Config",
        {"vision_config": {"model_type": "pixtral", **_VISION}, "image_token_index": IMAGE, "spatial_merge_size": 1},
    ),
    "qwen2_5_vl": ("qwen2", "Qwen2_5_VLConfig", {"vision_config": _QWEN_VISION, **_QWEN}),
    "qwen3_vl": (
        "qwen3",
        "Qwen3VLConfig",
        {"vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]}, **_QWEN},
    ),
}
MODES: dict[str, dict[str, Any]] = {"greedy": {}, "sampling": runs.SAMPLING}
ATTENTIONS = ("eager", "sdpa")


def _make_target(family: str, attention: str = "sdpa") -> PreTrainedModel:
    text_family, name, fields = CONFIGS[family]
    row = FAMILIES[text_family]
    text = dict(row.fields)
    if family.startswith("qwen"):
        text["rope_parameters"] = _MROPE | ({"mrope_interleaved": True} if family == "qwen3_vl" else {})
    else:
        text = getattr(transformers, row.config)(**text).to_dict()
    config = getattr(transformers, name)(text_config=text, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        target = AutoModelForImageTextToText.from_config(config, attn_implementation=attention)
        for weight in target.parameters():
            if weight.dim() == 2 and not weight.any():  # Gemma3 projects images to zero until it is trained
                torch.nn.init.normal_(weight, std=0.02)
    return in_double(peaked(target))


def _with_image(family: str) -> tuple[Tensor, dict[str, Tensor]]:
    """A prompt with one image of four tokens, and what else the processor of the family would give."""
    text = make_prompt(14).clamp(max=90)
    ids = torch.cat([text[:, :5], torch.tensor([[START, IMAGE, IMAGE, IMAGE, IMAGE, END]]), text[:, 5:]], dim=-1)
    is_image = (ids == IMAGE).long()
    generator = torch.Generator().manual_seed(0)
    if family.startswith("qwen"):
        size = 16 if family == "qwen3_vl" else 14
        pixels = torch.randn(16, 3 * 2 * size * size, generator=generator, dtype=torch.double)
        grid = torch.tensor([[1, 4, 4]])
        return ids, {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": is_image}
    pixels = torch.randn(1, 3, 28, 28, generator=generator, dtype=torch.double)
    extras = {"gemma3": {"token_type_ids": is_image}, "mistral3": {"image_sizes": torch.tensor([[28, 28]])}}
    return ids, {"pixel_values": pixels, **extras.get(family, {})}


def _assert_own_text(target: PreTrainedModel, drafter: Any, prompt: Tensor, **options: Any) -> Any:
    gold = runs.plain(target, prompt, **options).sequences

    pair = runs.both(target, InformedDrafter(drafter, gold), prompt, **options)

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1.3
    return pair


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", CONFIGS)
def test_vision_language_targets_read_trees(family: str, attention: str) -> None:
    capability = probe(_make_target(family, attention))

    assert capability.form == "tree"
    assert capability.tree_error <= 1e-4 * capability.control_error


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", CONFIGS)
def test_the_text_after_text_alone_is_the_targets_own(family: str, mode: str) -> None:
    _assert_own_text(_make_target(family), RandomDrafter(), make_prompt(14).clamp(max=90), **MODES[mode])


@pytest.mark.parametrize(("attention", "mode"), in_turn(ATTENTIONS, MODES))
@pytest.mark.parametrize("family", CONFIGS)
def test_the_text_after_an_image_is_the_targets_own(family: str, attention: str, mode: str) -> None:
    target = _make_target(family, attention)
    prompt, inputs = _with_image(family)

    pair = _assert_own_text(target, RandomDrafter(), prompt, **inputs, **MODES[mode], output_logits=True)

    inputs["pixel_values"] = -inputs["pixel_values"]
    other = runs.plain(target, prompt, **inputs, max_new_tokens=1, output_logits=True)
    assert (other.logits[0] - pair.plain.logits[0]).abs().max() > 0.1  # the image counts
    assert (pair.drafted.logits[0] - pair.plain.logits[0]).abs().max() < 1e-5


@pytest.mark.parametrize("family", CONFIGS)
def test_prompts_with_images_may_be_batched(family: str) -> None:
    target, (prompt, extras) = _make_target(family), _with_image(family)
    short = torch.cat([torch.zeros(1, 2, dtype=torch.long), prompt[:, :2], prompt[:, 4:]], dim=-1)
    prompts, mask = torch.cat([prompt, short]), torch.ones(2, prompt.shape[1], dtype=torch.long)
    mask[1, :2] = 0
    extras = {name: torch.cat([value, value]) for name, value in extras.items()}
    for name in {"mm_token_type_ids", "token_type_ids"} & set(extras):
        extras[name] = (prompts == IMAGE).long()
    ends = RowCriteria([lambda ids: len(ids) >= prompts.shape[1] + 12, lambda _: False])
    options = {"attention_mask": mask, "max_new_tokens": 20, "stopping_criteria": [ends], **extras}
    gold = runs.plain(target, prompts, **options).sequences
    drafter = InformedDrafter(make_drafter(target, block_size=2), gold, mask=mask)

    ours = runs.drafted(target, drafter, prompts, **options)

    assert ours.sequences.tolist() == gold.tolist()
    assert all(row.num_accepted > 0 for row in ours.speculation.rows)
    assert not any("last one ended" in note for note in ours.speculation.notes)


@pytest.mark.parametrize("family", CONFIGS)
def test_features_of_an_image_prompt_are_the_targets_hidden_states(family: str) -> None:
    target = _make_target(family)
    prompt, inputs = _with_image(family)
    drafter = RandomDrafter(feature_layers=(1, -1))

    out = _assert_own_text(target, drafter, prompt, **inputs).drafted.sequences

    commits = drafter.generators[-1].commits
    features = torch.cat([commit.features for commit in commits], dim=1)
    assert features.shape[1] == out.shape[1] - 1
    plain = runs.plain(target, prompt, **inputs, output_hidden_states=True).hidden_states
    for index, layer in enumerate((1, -1)):
        states = torch.cat([step[layer] for step in plain], dim=1)
        part = features[..., index * 64 : (index + 1) * 64]
        torch.testing.assert_close(part, states, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", CONFIGS)
def test_falcon_drafts_for_vision_language_targets(family: str) -> None:
    target = _make_target(family)
    prompt, inputs = _with_image(family)

    pair = _assert_own_text(target, make_drafter(target), prompt, **inputs)

    assert pair.stats.num_passes > 0


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_after_an_image_are_not_counted_in_slots(family: str) -> None:
    target = _make_target(family)
    prompt, inputs = _with_image(family)
    seen: list[Tensor] = []
    target.register_forward_pre_hook(lambda _m, _a, kwargs: seen.append(kwargs.get("position_ids")), with_kwargs=True)

    runs.drafted(target, RandomDrafter(), prompt, max_new_tokens=3, **inputs)

    tree_positions = seen[-1]
    assert len(tree_positions) in (3, 4)
    assert int(tree_positions[-1].max()) < prompt.shape[1]  # four image tokens take two positions


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_an_earlier_image_leaves_nothing_behind(family: str) -> None:
    target = _make_target(family)
    prompt, inputs = _with_image(family)
    runs.drafted(target, RandomDrafter(), prompt, **inputs)

    _assert_own_text(target, RandomDrafter(), make_prompt(14).clamp(max=90))


@pytest.mark.parametrize("family", CONFIGS)
def test_an_image_counts_for_every_sequence_of_its_prompt(family: str) -> None:
    target, (prompt, inputs) = _make_target(family), _with_image(family)
    options = {**inputs, "do_sample": True}
    torch.manual_seed(0)
    gold = [runs.plain(target, prompt, seed=seed, **options).sequences[0] for seed in row_seeds(3)]

    out = runs.drafted(
        target, InformedDrafter(RandomDrafter(), torch.stack(gold)), prompt, num_return_sequences=3, **options
    )

    assert out.sequences.tolist() == torch.stack(gold).tolist()
    assert all(row.num_accepted > 0 for row in out.speculation.rows)
