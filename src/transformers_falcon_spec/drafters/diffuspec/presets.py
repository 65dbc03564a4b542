"""How the DiffuSpec paper drafts (arXiv 2510.02358, section 5), with any diffusion model: `preset="paper"`.

Its length is adaptive, from 20 to 30 tokens, and its search has a 3-gram model that was fitted to training text.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ...errors import OptionError
from .proxy import NgramProxy

PAPER = "paper"
PAPER_OPTIONS = {
    "draft_length": "adaptive",
    "min_draft_tokens": 20,
    "num_draft_tokens": 30,
    "growth": 10,
    "smoothing": 0.5,
    "num_steps": 1,
    "search": "cps",
    "mass": 0.8,
    "max_candidates": 15,
    "beam_width": 3,
    "model_weight": 0.5,
}
PAPER_ORDER = 3


def preset_options(name: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are given and, behind them, those of the preset of that name.

    Raises:
        [`OptionError`]: there is no such preset.
    """
    if name not in (None, PAPER):
        raise OptionError(
            f"`preset` must be {PAPER!r} or left out, but it is {name!r}. What public models need is listed in "
            "`docs/diffuspec.md`."
        )
    return {**(PAPER_OPTIONS if name == PAPER else {}), **given}


def fitted_proxy(
    name: str | None, texts: Iterable[Sequence[int] | Tensor] | None, vocab_size: int
) -> NgramProxy | None:
    """The proxy that a preset asks for, fitted to training text; None where there is no text.

    Raises:
        [`OptionError`]: the preset is the paper's, and there is no text.
    """
    if name == PAPER and texts is None:
        raise OptionError(
            f"The preset `{PAPER}` needs training text for its {PAPER_ORDER}-gram proxy, but `proxy_texts` is None. "
            "Pass `proxy_texts=[...]`, token ids of the target for each text."
        )
    return None if texts is None else NgramProxy.fit(texts, PAPER_ORDER, vocab_size)
