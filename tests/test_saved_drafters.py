"""Drafters saved at commit 9c4ffdc load today, and draft what they drafted then. `tests/data/saved_9c4ffdc/README.md` says how they were made."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from tests.tiny import make_target
from transformers_falcon_spec.commands.loading import load_drafter

SAVED = Path(__file__).parent / "data" / "saved_9c4ffdc"
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
GREEDY = {"do_sample": False, "max_new_tokens": 28}
# Steps that 28 tokens take with each drafter, nothing tuned, at commit 9c4ffdc as today.
NUM_STEPS = {"diffuspec": 7, "eagle1": 10, "eagle3": 10, "easyspec": 9, "falcon": 10, "lookahead": 21, "medusa": 19}


@pytest.fixture(scope="module")
def target() -> Any:
    return make_target(**SMALL)


@pytest.mark.parametrize("kind", sorted(NUM_STEPS))
def test_a_saved_drafter_of_each_kind_drafts_as_it_did(kind: str, target: Any) -> None:
    prompt = torch.tensor([[7, 8, 9, 10]])  # of a text that the drafters were trained on
    drafter = AutoModel.from_pretrained(SAVED / kind).eval()
    drafter.generation_config.tune = False

    out = target.generate(prompt, assistant_model=drafter, return_dict_in_generate=True, **GREEDY)

    assert out.sequences.tolist() == target.generate(prompt, **GREEDY).tolist()
    assert out.speculation.num_steps == NUM_STEPS[kind]


@pytest.mark.parametrize("kind", ["diffuspec", "eagle1", "eagle3", "falcon", "medusa"])
def test_the_fingerprint_of_a_saved_drafter_is_read_by_its_old_name(kind: str) -> None:
    stored = json.loads((SAVED / kind / "config.json").read_text())

    config = AutoConfig.from_pretrained(SAVED / kind)

    assert config.to_dict()["target_fingerprint"] == stored["target_contract"]


@pytest.mark.parametrize("kind", sorted(NUM_STEPS))
def test_a_saved_drafter_of_each_kind_is_known_to_the_command_line(kind: str, target: Any) -> None:
    drafter = load_drafter(str(SAVED / kind), target)

    assert type(drafter) is type(AutoModel.from_pretrained(SAVED / kind))
