"""Tiny models that are called as public diffusion models are, each a Llama behind another signature, and drafters made of them.

They show that the calls fit what was read of those families; the published weights were not run.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from tests.families import VOCAB_SIZE
from tests.tiny import make_target
from transformers_falcon_spec.drafters.diffuspec.drafter import DenoisedTexts

MASK = VOCAB_SIZE  # behind the target's tokens
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1}


class DreamConfig(LlamaConfig):
    """Of Dream's kind."""

    model_type = "Dream"


class Dream(LlamaForCausalLM):
    """Takes a mask or the word "full", and says itself of how many rows logits are asked for."""

    config_class = DreamConfig

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Any = "full",
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        num_logits_to_keep: int = 0,
    ) -> Any:
        """All see all where no mask is given."""
        if not isinstance(attention_mask, Tensor):
            attention_mask = torch.zeros(1, 1, *[input_ids.shape[1]] * 2, dtype=self.dtype)
        return LlamaForCausalLM.forward(
            self,
            input_ids,
            attention_mask,
            position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            logits_to_keep=num_logits_to_keep,
        )


class A2dConfig(LlamaConfig):
    """Of A2D's kind."""

    model_type = "a2d-llama"


class A2d(LlamaForCausalLM):
    """An own class of a stock model."""

    config_class = A2dConfig


KINDS: dict[str, tuple[type[LlamaConfig], type[LlamaForCausalLM]]] = {
    "dream": (DreamConfig, Dream),
    "a2d": (A2dConfig, A2d),
    "a2d on a grid": (A2dConfig, A2d),
    "diffullama": (LlamaConfig, LlamaForCausalLM),
}
# What `docs/convert.md` says that each family needs; a smaller block.
OPTIONS: dict[str, dict[str, Any]] = {
    "dream": {"attention": "full", "auto_class": "AutoModel"},
    "a2d": {"attention": "full", "logits_shift": 0, "auto_class": "AutoModelForMaskedLM"},
    "a2d on a grid": {
        "attention": "block_causal",
        "logits_shift": 0,
        "auto_class": "AutoModelForMaskedLM",
        "block_size": 4,
    },
    "diffullama": {"attention": "full"},
}
AutoConfig.register(DreamConfig.model_type, DreamConfig, exist_ok=True)
AutoConfig.register(A2dConfig.model_type, A2dConfig, exist_ok=True)
AutoModel.register(DreamConfig, Dream, exist_ok=True)
AutoModelForMaskedLM.register(A2dConfig, A2d, exist_ok=True)


def make_model(kind: str = "diffullama", seed: int = 1, **changes: Any) -> Any:
    """A model of a family in double precision, with the target's tokens and a mask behind them."""
    config, model = KINDS[kind]
    fields = {**SIZES, "vocab_size": VOCAB_SIZE + 1, **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: Any = model(config(**fields))
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.mul_(8)
    return made.double().eval().requires_grad_(False)


def make_diffusion(target: Any = None, **options: Any) -> Any:
    """A drafter in double precision that knows nothing of `target` but its vocabulary; a block of 5 by default."""
    from transformers_falcon_spec import DiffusionDrafter, SpeculationConfig  # noqa: PLC0415  as in `tests/tiny.py`

    target = make_target().double() if target is None else target
    given = {"mask_token_id": target.config.vocab_size, "block_size": 5, **options}
    generation = {name: given.pop(name) for name in ("verifier", "num_tree_nodes") if name in given}
    model = make_model(vocab_size=target.config.vocab_size + 1)
    drafter = DiffusionDrafter.wrap(model, target, **given)
    drafter.generation_config = SpeculationConfig(**generation)
    return drafter


def logits_behind(texts: DenoisedTexts, text: Tensor, num: int) -> Tensor:
    """Logits `[num, vocab]` of the positions behind the only one of the texts, as a draft has them."""
    return texts.logits([text], [num])[0]
