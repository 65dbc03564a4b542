"""The only place that draws. Everything random in the package goes through a `Draws` that was passed in."""

import hashlib
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor


@runtime_checkable
class Draws(Protocol):
    """A source of choices. Tests pass one that walks through every branch."""

    def categorical(self, probs: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
        """One index for each row of `probs`."""
        ...


class GeneratorDraws:
    """Draws from a `torch.Generator`, with the same calls as Transformers' own sampling: same state, same tokens."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        """`generator` None is torch's global stream, the one that `generate` without a drafter draws from."""
        self.generator = generator

    def categorical(self, probs: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
        """One index for each row of `probs`."""
        return torch.multinomial(probs, num_samples=1, generator=self.generator).squeeze(1)


def choose(scores: Float[Tensor, "rows vocab"], do_sample: bool, draws: Draws) -> Int[Tensor, " rows"]:
    """The next token of each row: drawn from the softmax of processed `scores`, or the best one."""
    return draws.categorical(torch.softmax(scores, dim=-1)) if do_sample else scores.argmax(dim=-1)


def private_generator(device: torch.device | str = "cpu") -> torch.Generator:
    """A generator seeded from the global stream's present state, which stays untouched: drafting draws from this one."""
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest, "big") >> 1)
