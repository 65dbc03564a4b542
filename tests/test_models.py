"""The embedded pair: whole, small, and giving the target's own text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformers_falcon_spec import DraftTree, FalconSpecDrafter, LookaheadDrafter

MODELS = Path(__file__).parents[1] / "models"
MOST_BYTES = 45_000_000
PROMPT = "Tom has 3 boxes of 12 pencils. He gives away 10. How many are left?"


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, dict[str, torch.Tensor]]:
    target = AutoModelForCausalLM.from_pretrained(MODELS / "reference-target").eval()
    drafter = FalconSpecDrafter.from_pretrained(MODELS / "falcon-reference").eval()
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "reference-target")
    message = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    return target, drafter, dict(inputs)


@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7}], ids=["greedy", "sampling"]
)
def test_the_pair_writes_the_targets_own_text_in_fewer_steps(pair: Any, options: dict[str, Any]) -> None:
    target, drafter, inputs = pair

    torch.manual_seed(0)
    plain = target.generate(**inputs, **options, max_new_tokens=48)
    torch.manual_seed(0)
    out = target.generate(
        **inputs, **options, max_new_tokens=48, assistant_model=drafter, return_dict_in_generate=True
    )

    assert out.sequences.tolist() == plain.tolist()
    assert out.speculation.acceptance_length > 1.3


def test_the_shipped_tree_is_well_formed_and_fits_the_block_size(pair: Any) -> None:
    _, drafter, _ = pair

    tree = DraftTree.from_json(drafter.config.draft_tree)  # refuses duplicates and children before parents
    max_depth, block_size = int(tree.depths.max()), drafter.config.block_size

    assert len(tree) > 1
    assert max_depth % block_size == 0 or max_depth < block_size


@pytest.mark.parametrize("name", ["reference-target", "falcon-reference"])
def test_weights_are_stored_in_bf16_and_load_as_float32(name: str) -> None:
    folder = MODELS / name

    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        stored = {weights.get_slice(key).get_dtype() for key in weights.keys()}  # noqa: SIM118  not a dict

    assert stored == {"BF16"}
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["dtype"] == "float32"


def test_all_weights_together_stay_small() -> None:
    assert sum(path.stat().st_size for path in MODELS.rglob("*.safetensors")) <= MOST_BYTES


def test_the_drafters_training_is_on_record() -> None:
    record = json.loads((MODELS / "falcon-reference" / "training.json").read_text(encoding="utf-8"))

    assert {"command", "commit", "versions", "device", "threads", "seed", "data", "curve"} <= set(record)


def test_the_shipped_lookahead_drafter_serves_the_target_without_weights(pair: Any) -> None:
    target, _, inputs = pair
    drafter = LookaheadDrafter.from_pretrained(MODELS / "lookahead")

    plain = target.generate(**inputs, do_sample=False, max_new_tokens=48)
    out = target.generate(
        **inputs, do_sample=False, max_new_tokens=48, assistant_model=drafter, return_dict_in_generate=True
    )

    assert out.sequences.tolist() == plain.tolist()
    assert out.speculation.acceptance_length > 1
    assert sum(path.stat().st_size for path in (MODELS / "lookahead").iterdir()) < 1000
