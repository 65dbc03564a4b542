"""One checkpoint of each format, and the check that a conversion of it is refused in words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.families import VOCAB_SIZE
from transformers_falcon_spec.convert import convert_checkpoint
from transformers_falcon_spec.errors import CheckpointError

from . import foreign, foreign_dflash

Parts = tuple[dict[str, Any], dict[str, Tensor]]
MAKERS: dict[str, Callable[..., Parts]] = {
    "falcon": foreign.falcon,
    "eagle": foreign.eagle,
    "eagle3": lambda: foreign.eagle3(eagle_aux_hidden_state_layer_ids=foreign.LAYER_IDS),
    "speculators": foreign.eagle3_speculators,
    "dflash": foreign_dflash.dflash,
    "dflash2": foreign_dflash.dflash2,
    "dflash of speculators": foreign_dflash.speculators,
    "dspark of speculators": foreign_dflash.dspark_speculators,
    "medusa": foreign.medusa,
    "medusa v2": lambda: foreign.medusa(has_lm_heads=False, vocab_size=VOCAB_SIZE),
}
NEEDED = {
    "falcon": "layers.1.input_layernorm.weight",
    "eagle": "layers.0.mlp.up_proj.weight",
    "eagle3": "midlayer.hidden_norm.weight",
    "speculators": "layers.0.self_attn.q_proj.weight",
    "dflash": "hidden_norm.weight",
    "dflash2": "candidate_selector.hidden_projection.weight",
    "dflash of speculators": "fc.weight",
    "dspark of speculators": "markov_head.markov_w2.weight",
    "medusa": "1.0.linear.bias",
    "medusa v2": "2.0.linear.bias",
}


def refused(source: Path, message: str, target: str | None = None, error: type[Exception] = CheckpointError) -> None:
    """The conversion must be refused with these words, and leave nothing behind."""
    before = sorted(source.parent.iterdir())

    with pytest.raises(error, match=message) as caught:
        convert_checkpoint(source, source.parent / "dest", target)

    assert type(caught.value) is error
    assert sorted(source.parent.iterdir()) == before
