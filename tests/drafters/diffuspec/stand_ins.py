"""Tiny models that are called as public diffusion models are, each a Llama behind another signature, and drafters made of them.

They show that the calls fit what was read of those families; the published weights were not run.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from tests.families import VOCAB_SIZE
from tests.tiny import make_target

MASK = VOCAB_SIZE  # behind the target's tokens
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1}


def _run(
    model: Any, input_ids: Tensor, mask: Tensor, positions: Tensor | None = None, cache: Any = None, **kwargs: Any
) -> Any:
    """The Llama inside, under a boolean mask `[rows, 1, tokens, slots]`."""
    additive = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min)
    return LlamaForCausalLM.forward(
        model, input_ids, additive, positions, past_key_values=cache, use_cache=cache is not None, **kwargs
    )


def _grid(num_tokens: int, num_slots: int, block_size: int) -> Tensor:
    """The mask of blocks on a grid, `[1, 1, tokens, slots]`, for the last tokens of a text."""
    blocks = torch.arange(num_slots) // block_size
    return (blocks <= blocks[num_slots - num_tokens :, None])[None, None]


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


class SdarConfig(LlamaConfig):
    """Of SDAR's kind."""

    model_type = "sdar"
    block_size: int = 4


class Sdar(LlamaForCausalLM):
    """Casts its mask to booleans, and keeps keys and values where it is told to."""

    config_class = SdarConfig

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        store_kv: bool | None = None,
    ) -> Any:
        """An additive mask would be turned around here, as it would be there."""
        assert bool(store_kv) == bool(use_cache) == (past_key_values is not None)
        return _run(self, input_ids, attention_mask.bool(), position_ids, past_key_values)


class FastConfig(LlamaConfig):
    """Of Fast-dLLM v2's kind."""

    model_type = "Fast_dLLM_Qwen"
    bd_size: int = 4


class Fast(LlamaForCausalLM):
    """Makes its mask of the grid and of what the cache holds."""

    config_class = FastConfig

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        update_past_key_values: bool = False,
        block_size: int = 32,
        **kwargs: Any,
    ) -> Any:
        """Positions follow from the cache, too."""
        assert attention_mask is None
        assert update_past_key_values == use_cache
        start = 0 if past_key_values is None else past_key_values.get_seq_length()
        num_slots = start + input_ids.shape[1]
        positions = torch.arange(start, num_slots)[None]
        return _run(self, input_ids, _grid(len(positions[0]), num_slots, block_size), positions, past_key_values)


class MdlmConfig(LlamaConfig):
    """Of MDLM's kind."""

    model_type = "mdlm"


class Mdlm(LlamaForCausalLM):
    """Takes the noise level, and nothing else: all see all."""

    config_class = MdlmConfig

    def forward(self, input_ids: Tensor, timesteps: Tensor) -> Any:  # type: ignore[override]
        """Trained to ignore the noise level."""
        assert timesteps.shape == input_ids.shape[:1]
        return _run(self, input_ids, torch.ones(1, 1, *[input_ids.shape[1]] * 2, dtype=torch.bool))


class Bd3lmConfig(LlamaConfig):
    """Of BD3-LM's kind."""

    model_type = "bd3lm"
    block_size: int = 4


class Bd3lm(LlamaForCausalLM):
    """Outside of `sample_mode` it would take a noised beside a clean text."""

    config_class = Bd3lmConfig

    def forward(self, input_ids: Tensor, timesteps: Tensor, sample_mode: bool = False) -> Any:  # type: ignore[override]
        """On its own grid."""
        assert sample_mode
        assert timesteps.shape == input_ids.shape[:1]
        num_tokens = input_ids.shape[1]
        return _run(self, input_ids, _grid(num_tokens, num_tokens, self.config.block_size))


class A2dConfig(LlamaConfig):
    """Of A2D's kind."""

    model_type = "a2d-llama"


class A2d(LlamaForCausalLM):
    """An own class of a stock model."""

    config_class = A2dConfig


KINDS: dict[str, tuple[type[LlamaConfig], type[LlamaForCausalLM]]] = {
    "dream": (DreamConfig, Dream),
    "sdar": (SdarConfig, Sdar),
    "fast_dllm_v2": (FastConfig, Fast),
    "mdlm": (MdlmConfig, Mdlm),
    "bd3lm": (Bd3lmConfig, Bd3lm),
    "a2d_mdlm": (A2dConfig, A2d),
    "a2d_bd3lm": (A2dConfig, A2d),
    "diffullama": (LlamaConfig, LlamaForCausalLM),
}
_AUTO = {"dream": AutoModel, "sdar": AutoModelForCausalLM, "fast_dllm_v2": AutoModelForCausalLM}
for _name, (_config, _model) in list(KINDS.items())[:-2]:
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    _AUTO.get(_name, AutoModelForMaskedLM).register(_config, _model, exist_ok=True)


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
    """A drafter in double precision that knows nothing of `target` but its vocabulary; a block of 5 unless told otherwise."""
    from transformers_falcon_spec import DiffusionDrafter, SpeculationConfig  # noqa: PLC0415  as in `tests/tiny.py`

    target = make_target().double() if target is None else target
    given = {"mask_token_id": target.config.vocab_size, "block_size": 5, **options}
    generation = {name: given.pop(name) for name in ("verifier", "num_tree_nodes") if name in given}
    model = make_model(vocab_size=target.config.vocab_size + 1)
    drafter = DiffusionDrafter.from_model(model, target, **given)
    drafter.generation_config = SpeculationConfig(**generation)
    return drafter
