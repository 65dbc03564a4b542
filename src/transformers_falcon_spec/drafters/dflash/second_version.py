"""What DFlash2 adds to DFlash: convolutions over a block, around attention and MLP, and scores between neighbours.

Source: z-lab/dflash, `dflash/model.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantDecoderLayer

from .configuration_dflash import DFlashConfig


class BlockConvolution(nn.Module):
    """Convolutions before and after a part of a layer, in which a token of a block reads itself and those before it.

    Each channel has kernels of its own. What the token says, the same for all channels of a group, is added to them.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        assert config.conv_kernel_size is not None  # the caller asked
        assert config.conv_group_size is not None  # the configuration has both
        self.num_taps, self.group_size = config.conv_kernel_size, config.conv_group_size
        self.num_groups = config.hidden_size // self.group_size
        kernels = torch.zeros(2, self.num_taps, config.hidden_size)
        kernels[:, 0] = 1.0  # fresh ones change nothing
        self.base_kernel = nn.Parameter(kernels)
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.num_taps * self.num_groups, bias=False)

    def forward(
        self, states: Float[Tensor, "rows block hidden"], part: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "rows block hidden"]:
        """What `part` makes of states that are convolved first, convolved again."""
        changes = self.kernel_projection(states).unflatten(-1, (2, self.num_taps, self.num_groups))
        before, after = (self.base_kernel + changes.repeat_interleave(self.group_size, dim=-1)).unbind(dim=-3)
        return _convolved(part(_convolved(states, before)), after)


def _convolved(states: Tensor, kernels: Tensor) -> Tensor:
    """The sum over taps of a kernel `[rows, block, taps, hidden]` times the states so many tokens before."""
    length, taps = states.shape[-2], kernels.unbind(dim=-2)
    shifted = (functional.pad(states, (0, 0, tap, 0))[..., :length, :] for tap in range(len(taps)))
    return torch.stack([kernel * before for kernel, before in zip(taps, shifted, strict=True)]).sum(dim=0)


class ConvolvedLayer(MuseGlimmerAssistantDecoderLayer):
    """A layer of Transformers' drafter with convolutions around attention and MLP."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.attention_conv, self.mlp_conv = BlockConvolution(config), BlockConvolution(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:  # the model names all
        """As the stock layer computes it, apart from the convolutions."""

        def attend(states: Tensor) -> Tensor:
            attended: Tensor = self.self_attn(hidden_states=states, **kwargs)[0]
            return attended

        states = hidden_states + self.attention_conv(self.input_layernorm(hidden_states), attend)
        output: Tensor = states + self.mlp_conv(self.post_attention_layernorm(states), self.mlp)
        return output


class CandidateSelector(nn.Module):
    """Scores of the tokens of a mask after the one before it: a product of low rank, weighed by the mask's state."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        assert config.selector_rank is not None  # the caller asked
        self.predecessor_codebook = nn.Embedding(config.vocab_size, config.selector_rank)
        self.successor_codebook = nn.Linear(config.selector_rank, config.vocab_size, bias=False)
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, token_ids: Int[Tensor, "..."], gates: Float[Tensor, "... rank"]) -> Float[Tensor, "... vocab"]:
        """The scores after `token_ids`, which are added to logits; `gates` are the projected states of the masks."""
        scores: Tensor = self.successor_codebook(self.predecessor_codebook(token_ids) * gates)
        return scores
