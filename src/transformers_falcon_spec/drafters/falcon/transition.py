"""How tokens of a block change what is expected after them: scores added to the logits of the next feature."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from .configuration_falcon import FalconSpecConfig


class Transition(nn.Module):
    """Scores by which tokens of a block change the logits of the next one: a low-rank table, and a small network.

    The table is for the last token, weighed by the feature expected at the next. The network reads that feature and
    the embeddings of the last tokens.
    """

    def __init__(self, config: FalconSpecConfig) -> None:
        super().__init__()
        rank, size, self.num_tokens = config.transition_rank, config.transition_size, config.transition_tokens
        assert rank is not None  # the caller asked
        self.rank, self.has_network = rank, size is not None
        self.before = nn.Embedding(config.vocab_size, rank)
        self.gate = nn.Linear(config.hidden_size, rank, bias=False)
        self.after = nn.Linear(rank, config.vocab_size, bias=False)
        if size is not None:
            assert config.embedding_size is not None  # the configuration fills it in
            self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.input_norm = nn.RMSNorm(config.embedding_size, eps=config.rms_norm_eps)
            self.up = nn.Linear(config.hidden_size, size, bias=False)
            self.up_tokens = nn.Linear(self.num_tokens * config.embedding_size, size, bias=False)
            self.down = nn.Linear(size, rank, bias=False)

    def forward(
        self,
        token_ids: Int[Tensor, "..."],
        features: Float[Tensor, "... hidden"],
        token_embeds: Float[Tensor, "... tokens embed"] | None = None,
    ) -> Tensor:
        """Scores `[..., vocab]` to add to the logits of `features` after the tokens `token_ids`.

        `token_embeds` are those of the last tokens, the newest last, zeros or none for those that a block lacks; only
        the network reads them.
        """
        return self.after_tokens(token_ids, self.prepare(features), token_embeds)

    def prepare(self, features: Float[Tensor, "... hidden"]) -> Float[Tensor, "... prepared"]:
        """What depends on features alone, and is the same after all tokens."""
        gates = 1 + self.gate(features)
        return torch.cat([gates, self.up(self.norm(features))], dim=-1) if self.has_network else gates

    def after_tokens(
        self,
        token_ids: Int[Tensor, "..."],
        prepared: Float[Tensor, "... prepared"],
        token_embeds: Float[Tensor, "... tokens embed"] | None = None,
    ) -> Tensor:
        """The scores, of features that [`Transition.prepare`] has read."""
        scores = self.before(token_ids) * prepared[..., : self.rank]
        if self.has_network:
            assert token_embeds is not None
            missing = self.num_tokens - token_embeds.shape[-2]
            embeds = functional.pad(self.input_norm(token_embeds), (0, 0, missing, 0)).flatten(-2)
            scores = scores + self.down(functional.silu(prepared[..., self.rank :] + self.up_tokens(embeds)))
        return self.after(scores)
