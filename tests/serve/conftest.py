"""What tests of the server share: the embedded pair, and what the target alone writes."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

MODELS = Path(__file__).parents[2] / "models"
NAME = "models/reference-target"


@pytest.fixture(scope="package")
def pair() -> tuple[Any, Any, Any]:
    """Target, tokenizer and drafter."""
    from transformers_falcon_spec.commands.loading import load_drafter, load_target  # noqa: PLC0415  see tests/conftest.py

    target, tokenizer = load_target(str(MODELS / "reference-target"), "float32", "cpu")
    return target, tokenizer, load_drafter(str(MODELS / "falcon-reference"), target, tokenizer)


@pytest.fixture(scope="package")
def plain(pair: tuple[Any, Any, Any]) -> Callable[..., str]:
    """The text of a call of `generate` for one prompt, without the drafter."""
    import torch  # noqa: PLC0415

    target, tokenizer, _ = pair

    @cache
    def text(prompt_ids: tuple[int, ...], max_new_tokens: int, seed: int, **options: Any) -> str:
        torch.manual_seed(seed)
        ids = torch.tensor([prompt_ids])
        options = {"do_sample": True, **options} if options else {"do_sample": False}
        out = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **options)
        return tokenizer.decode(out[0, len(prompt_ids) :], skip_special_tokens=True)

    return lambda ids, num, seed=0, **options: text(tuple(ids), num, seed, **options)
