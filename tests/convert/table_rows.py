"""The formats in the tables of `docs/convert.md`: checkpoints of each, a target for them, and tests that compare forwards."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel

from tests.drafters.dflash.test_stock import peaked_dflash
from tests.families import VOCAB_SIZE
from tests.tiny import make_target
from transformers_falcon_spec import load_drafter

from . import (
    foreign,
    foreign_dflash,
    foreign_diffusion,
    test_diffusion_format,
    test_eagle_format,
    test_falcon_format,
    test_medusa_format,
    test_peagle_format,
)
from . import test_published_dflash as published
from .drafting import random_ids

IDS = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}  # lower layers first, as engines hand them over
Check = Callable[[Path], None]


@dataclass(frozen=True)
class Row:
    """A format: its makers, in every form that the row speaks of, its target, and the tests that compare its forward."""

    sources: tuple[Callable[[Path], Path], ...]
    forwards: tuple[Check, ...] = ()
    family: str = "llama"
    depth: int | None = None

    def target(self, folder: Path) -> Any:
        """A target for it, in double precision, with a tokenizer beside it."""
        layers = {} if self.depth is None else {"num_hidden_layers": self.depth}
        return foreign_diffusion.saved_target(folder / "target", self.family, **layers)


def files(maker: Callable[..., foreign_diffusion.Parts], name: str = "model.safetensors", **fields: Any) -> Any:
    """What writes a checkpoint of these parts into a folder."""
    return lambda folder: foreign.written(folder, *maker(**fields), name)


def calls(test: Any, variants: Any, *, unpack: bool = False) -> tuple[Check, ...]:
    """A test, called for each of its cases."""
    return tuple(
        lambda folder, case=case: test(*(case if unpack else (case,)), folder) for case in variants
    )  # the case as it is now


def stock(folder: Path) -> Path:
    """The folder of a drafter of Transformers."""
    peaked_dflash(make_target(num_hidden_layers=4), target_layer_ids=[0, 2]).save_pretrained(folder)
    return folder


@torch.no_grad()
def stock_forward(folder: Path) -> None:
    """The logits of a draft are those of Transformers' own class behind the same features, in one forward."""
    target, reference = make_target(num_hidden_layers=4), AutoModel.from_pretrained(stock(folder / "stock")).eval()
    features, root = torch.randn(1, 20, 2 * foreign.HIDDEN), int(random_ids(21)[-1])
    block = torch.tensor([[root, *[reference.config.mask_token_id] * (reference.config.block_size - 1)]])
    embeds = target.get_input_embeddings()(block)
    states = reference(noise_embeds=embeds, context_hidden_states=features).last_hidden_state
    generator = published.start(load_drafter(folder / "stock", target), target)
    generator.commit(published.Committed(random_ids(21)[None], (21,), (20,), features))
    generator.text.read(generator.read_pairs)
    found = generator.draft_logits(generator.text.first)[0, 0]
    torch.testing.assert_close(found, target.lm_head(states)[0, 1:], atol=1e-5, rtol=1e-5)


def of_diffusion(*names: str) -> Row:
    """The row of a format of diffusion models."""
    kinds = [test_diffusion_format.KINDS[name] for name in names]

    def source(kind: test_diffusion_format.Kind) -> Callable[[Path], Path]:
        is_word = kind.mask < VOCAB_SIZE
        mask, special = (f"word{kind.mask}", {"": 99}) if is_word else ("<|mask|>", foreign_diffusion.SPECIAL)
        return lambda folder: foreign_diffusion.saved(folder, kind.parts, mask=mask, **special)

    forwards = calls(test_diffusion_format.test_a_model_drafts_from_the_logits_of_its_own_forward, names)
    return Row(tuple(map(source, kinds)), forwards, kinds[0].target)


DRAFTING = (
    *published.FORMS,
    "DSpark",
    "newer",
    "JetSpec",
    "no later tokens",
    "scaled",
    "speculators with a window",
    "DFlash2",
)


def of_dflash(*names: str) -> Row:
    """The row of a format of published DFlash drafters."""
    sources = tuple(files(lambda name=name: published.VARIANTS[name][1]) for name in names if name in DRAFTING)
    test = published.test_logits_at_the_masks_are_those_of_the_published_forward
    return Row(sources, calls(test, names), depth=foreign_dflash.TARGET_LAYERS)


FIRST = [name for name in published.VARIANTS if not name.startswith(("speculators", "DFlash2", "JetSpec", "DSpark"))]
SPECULATORS = [name for name in published.VARIANTS if name.startswith("speculators")]
SECOND = [name for name in published.VARIANTS if name.startswith("DFlash2")]
THIRD = test_eagle_format.test_the_third_forward_is_the_published_one
PARALLEL = test_peagle_format.test_the_block_is_the_published_one
ROWS = {
    "Falcon": Row(
        (files(foreign.falcon),),
        calls(test_falcon_format.test_the_forward_is_the_published_one, test_falcon_format.VARIANTS),
    ),
    "Eagle-1, Eagle-2, HASS": Row(
        (files(foreign.eagle), files(foreign.eagle, bias=False)),
        calls(test_eagle_format.test_the_first_forward_is_the_published_one, test_eagle_format.FIRST),
    ),
    "Eagle-3, Eagle-3.1": Row(
        tuple(files(foreign.eagle3, **IDS, **more) for more in ({}, {"fc_norm": True, "norm_output": True})),
        calls(THIRD, [case for case in test_eagle_format.THIRD if case[0] == "midlayer"], unpack=True),
        depth=9,
    ),
    "Eagle-3 of speculators": Row(
        (files(foreign.eagle3_speculators, **IDS),),
        calls(THIRD, [case for case in test_eagle_format.THIRD if case[0] != "midlayer"], unpack=True),
        depth=9,
    ),
    "P-EAGLE (vLLM)": Row(
        (files(foreign.peagle), files(lambda: foreign.peagle("layers.0"))),
        calls(PARALLEL, ("vLLM", "vLLM, numbered")),
    ),
    "P-EAGLE of speculators": Row(
        (files(foreign.peagle_speculators),), calls(PARALLEL, ("speculators", "speculators, a window"))
    ),
    "Medusa-1, v2 heads": Row(
        tuple(files(foreign.medusa, "medusa_lm_head.pt", **fields) for fields in test_medusa_format.VARIANTS.values()),
        calls(test_medusa_format.test_the_forward_is_the_published_one, test_medusa_format.VARIANTS),
    ),
    "DFlash (z-lab, SpecForge)": of_dflash(*FIRST),
    "JetSpec": of_dflash("JetSpec", "JetSpec without"),
    "DFlash2 (z-lab)": of_dflash(*SECOND),
    "DFlash of speculators": of_dflash(*SPECULATORS),
    "DSpark of speculators": of_dflash("DSpark of speculators", "DSpark of speculators, gated, behind the root"),
    "DSpark, DFlash (DeepSpec)": of_dflash("DSpark", "DSpark, gated", "DSpark without scores"),
    "DFlash of Transformers": Row((stock,), (stock_forward,), depth=4),
    "Dream": of_diffusion("Dream", "Dream with one table"),
    "Fast-dLLM v2": of_diffusion("Fast-dLLM v2"),
    "A2D of Qwen2, Qwen3, Llama": of_diffusion("A2D of Qwen2", "A2D of Qwen3", "A2D of Llama"),
    "A2D in blocks (Qwen3)": of_diffusion("A2D of Qwen3 in blocks"),
    "DiffuLLaMA": of_diffusion("DiffuLLaMA"),
}

# A source of each format that says of its target no more than it must, and the row of the other table.
SILENT: dict[str, tuple[Callable[[Path], Path], str]] = {
    "Falcon (Bestpay)": (files(foreign.falcon), "Falcon"),
    "Eagle-1, Eagle-2, HASS": (files(foreign.eagle), "Eagle-1, Eagle-2, HASS"),
    "Eagle-3, Eagle-3.1": (files(foreign.eagle3), "Eagle-3, Eagle-3.1"),
    "Eagle-3 of speculators": (
        files(foreign.eagle3_speculators, eagle_aux_hidden_state_layer_ids=None),
        "Eagle-3 of speculators",
    ),
    "P-EAGLE (vLLM)": (
        files(lambda: foreign.peagle(eagle_aux_hidden_state_layer_ids=None)),
        "Eagle-3, Eagle-3.1",
    ),
    "P-EAGLE of speculators": (
        files(lambda: foreign.peagle_speculators(eagle_aux_hidden_state_layer_ids=None)),
        "Eagle-3 of speculators",
    ),
    "Medusa-1 heads": (files(foreign.medusa, "medusa_lm_head.pt"), "Medusa-1, v2 heads"),
    "Medusa v2 heads": (files(foreign.medusa, "medusa_lm_head.pt", has_lm_heads=False), "Medusa-1, v2 heads"),
    "DFlash (z-lab, SpecForge)": (files(foreign_dflash.dflash), "DFlash (z-lab, SpecForge)"),
    "JetSpec": (files(lambda: foreign_dflash.dflash({"causal_head": True})), "JetSpec"),
    "A2D (dLLM)": (ROWS["A2D of Qwen2, Qwen3, Llama"].sources[0], "A2D of Qwen2, Qwen3, Llama"),
} | {
    name: (ROWS[name].sources[0], name)
    for name in (
        *("DFlash2 (z-lab)", "DFlash of speculators", "DFlash of Transformers"),
        *("DSpark of speculators", "DSpark, DFlash (DeepSpec)"),
        *("Dream", "Fast-dLLM v2", "DiffuLLaMA"),
    )
}
