"""Drafters saved at commit 9c4ffdc load today, and draft what they drafted then. `tests/data/saved_9c4ffdc/README.md` says how they were made."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from lab.renew_drafters import main
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


def test_drafters_saved_before_the_first_version_are_rewritten(tmp_path: Path) -> None:
    drafter = tmp_path / "old" / "falcon"
    shutil.copytree(SAVED / "falcon", drafter)
    config, options = drafter / "config.json", drafter / "generation_config.json"
    stored = json.loads(config.read_text()), json.loads(options.read_text())
    config.write_text(config.read_text().replace("target_fingerprint", "target_contract"))
    options.write_text(json.dumps({**stored[1], "strict": False, "verifier": "lazy_walk"}))

    main(str(tmp_path / "old"), str(tmp_path / "new"))

    for path, expected in zip((config, options), stored, strict=True):
        assert json.loads((tmp_path / "new" / "falcon" / path.name).read_text()) == expected


@pytest.mark.parametrize("kind", sorted(NUM_STEPS))
def test_a_saved_drafter_of_each_kind_is_known_to_the_command_line(kind: str, target: Any) -> None:
    drafter = load_drafter(str(SAVED / kind), target)

    assert type(drafter) is type(AutoModel.from_pretrained(SAVED / kind))
