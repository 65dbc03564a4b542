"""The embedded pair: whole, small, and giving the target's own text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformers_falcon_spec import DraftTree, FalconSpecDrafter
from transformers_falcon_spec.commands.loading import load_drafter

MODELS = Path(__file__).parents[1] / "models"
MOST_BYTES = 56_000_000
WEIGHTS = sorted(path.parent.name for path in MODELS.glob("*/model.safetensors"))
DRAFTERS = sorted(
    path.parent.name for path in MODELS.glob("*/generation_config.json") if path.parent.name != "reference-target"
)
SMALL = [name for name in DRAFTERS if "smollm2" not in name]  # of the target that lies beside them
PROMPT = "Tom has 3 boxes of 12 pencils. He gives away 10. How many are left?"


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, dict[str, torch.Tensor]]:
    target = AutoModelForCausalLM.from_pretrained(MODELS / "reference-target").eval()
    drafter = FalconSpecDrafter.from_pretrained(MODELS / "falcon-reference").eval()
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "reference-target")
    message = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    return target, drafter, dict(inputs)


@pytest.mark.parametrize("name", SMALL)
def test_every_shipped_drafter_keeps_the_targets_text_in_fewer_steps(pair: Any, name: str) -> None:
    target, _, inputs = pair
    drafter = load_drafter(str(MODELS / name), target)

    plain = target.generate(**inputs, do_sample=False, max_new_tokens=48)
    out = target.generate(
        **inputs, do_sample=False, max_new_tokens=48, assistant_model=drafter, return_dict_in_generate=True
    )

    assert out.sequences.tolist() == plain.tolist()
    assert out.speculation.acceptance_length > 1


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


def test_the_embedded_pair_is_there() -> None:
    assert {"reference-target", "falcon-reference"} <= set(WEIGHTS)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_stored_in_bf16_and_load_as_float32(name: str) -> None:
    folder = MODELS / name

    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        types = {key: weights.get_slice(key).get_dtype() for key in weights.keys()}  # noqa: SIM118  not a dict

    lists = {key: types.pop(key) for key in ("d2t", "t2d") if key in types}  # of tokens that can be drafted
    assert set(types.values()) == {"BF16"}
    assert lists in ({}, {"d2t": "I64", "t2d": "BOOL"})
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["dtype"] == "float32"


def test_all_weights_together_stay_small() -> None:
    assert sum(path.stat().st_size for path in MODELS.rglob("*.safetensors")) <= MOST_BYTES


@pytest.mark.parametrize("name", sorted({*WEIGHTS} & {*DRAFTERS}))
def test_a_drafters_training_is_on_record(name: str) -> None:
    record = json.loads((MODELS / name / "training.json").read_text(encoding="utf-8"))

    assert {"command", "commit", "versions", "device", "threads", "seed", "data", "curve"} <= set(record)


def test_the_shipped_lookahead_drafter_has_no_weights() -> None:
    assert "lookahead" in DRAFTERS
    assert sum(path.stat().st_size for path in (MODELS / "lookahead").iterdir()) < 1000
