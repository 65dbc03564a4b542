"""Random draws. Everything random in the package goes through a `Draws` object or generator that was passed in."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@runtime_checkable
class Draws(Protocol):
    """A source of choices. Tests pass one that walks through every branch."""

    def categorical(self, probs: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
        """One index for each row of `probs`."""
        ...


@dataclass(frozen=True)
class _Draw:
    """The noise of a draw, and the stream's state before and after it."""

    noise: Float[Tensor, " vocab"]
    before: Tensor
    after: Tensor


class GeneratorDraws:
    """Draws from a `torch.Generator`, with the same calls as Transformers' own sampling: same state, same tokens.

    Noise that was looked at in advance is kept until its draw is over, for on a CPU it takes long to make.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator  # None: torch's global stream, which `generate` without a drafter draws from
        self._coming: list[_Draw] = []

    def categorical(self, probs: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
        """One index for each row of `probs`."""
        found = self._foreseen(probs) if len(probs) == 1 and self._coming else None
        if found is not None:
            return found

        if self.generator is not None or not probs.is_cuda:
            return torch.multinomial(probs, 1, generator=self.generator).squeeze(1)

        # From a copy, since PyTorch refuses draws from CUDA's own stream while another thread captures.
        copy = self._copied_stream(probs.device)
        drawn = torch.multinomial(probs, 1, generator=copy).squeeze(1)
        self.set_state(copy.get_state(), probs.device)
        return drawn

    def _foreseen(self, probs: Float[Tensor, "1 vocab"]) -> Int[Tensor, "1"] | None:
        """The index by the noise that was looked at in advance; None where there is none, or no choice."""
        start = self.get_state(probs.device)
        draw = next((each for each in self._coming if each.before.equal(start)), None)
        if draw is None or _kind(draw.noise) != _kind(probs[0]) or not 0 < float(probs.sum()) < torch.inf:
            return None

        self.set_state(draw.after, probs.device)
        return (probs / draw.noise).argmax(dim=-1)

    def noise_ahead(self, vocab_size: int, device: torch.device) -> Callable[[int], Float[Tensor, " vocab"]]:
        """Exponential noise by depth in the next draft, 1 for the next token; the stream stays where it is."""
        start = self.get_state(device)
        like = torch.empty(vocab_size, dtype=torch.float, device=device)
        return lambda depth: self._draws_after(start, depth, like)[depth - 1].noise

    def fill_ahead(self, noise: Float[Tensor, "draws vocab"], start: Tensor | None = None) -> list[Tensor]:
        """Write the noise of the next draws; returns the stream's state after each. The stream stays where it is.

        They are the next ones after the state `start`, where one is given. Each row is a draw of its own, as one draw
        of all rows is another stream on CUDA.
        """
        copy = self._copied_stream(noise.device)
        if start is not None:
            copy.set_state(start)

        states = []
        for row in noise:
            row.exponential_(generator=copy)
            states.append(copy.get_state())
        return states

    def categorical_by_depth(
        self, probs: Float[Tensor, "nodes vocab"], depths: Int[Tensor, " nodes"]
    ) -> tuple[Int[Tensor, " nodes"], list[Tensor]]:
        """The token that `categorical` would draw after each node, and the stream's state after each depth.

        `categorical` takes the argmax of probabilities over exponential noise, so nodes of one depth, of which only
        one can be reached, share their noise.
        """
        draws = self._draws_after(self.get_state(probs.device), int(depths.max()) + 1, probs[0])
        self.set_state(draws[-1].after, probs.device)

        noises = torch.stack([draw.noise for draw in draws])
        return (probs / noises[depths]).argmax(dim=-1), [draw.after for draw in draws]

    def _draws_after(self, start: Tensor, num: int, like: Float[Tensor, " vocab"]) -> list[_Draw]:
        """The next `num` draws from the state `start` on, with noise of the shape, type and device of `like`."""
        known = self._coming
        if known and _kind(known[0].noise) != _kind(like):
            known.clear()

        while known and not known[0].before.equal(start):
            known.pop(0)

        if len(known) < num:
            copy = torch.Generator(like.device)
            copy.set_state(known[-1].after if known else start)
            for _ in range(num - len(known)):
                before = copy.get_state()
                known.append(_Draw(multinomial_noise(like, copy), before, copy.get_state()))

        return known[:num]

    def get_state(self, device: torch.device) -> Tensor:
        """The stream's state."""
        return self._stream(device).get_state()

    def set_state(self, state: Tensor, device: torch.device) -> None:
        """Go on from a state that `get_state`, `fill_ahead` or `categorical_by_depth` gave."""
        self._stream(device).set_state(state)

    def is_at(self, state: Tensor, device: torch.device) -> bool:
        """Whether the stream stands in a state."""
        return self.get_state(device).equal(state)

    def _copied_stream(self, device: torch.device) -> torch.Generator:
        copy = torch.Generator(device)
        copy.set_state(self._stream(device).get_state())
        return copy

    def _stream(self, device: torch.device) -> torch.Generator:
        if self.generator is not None:
            return self.generator

        if device.type == "cuda":
            return torch.cuda.default_generators[device.index or 0]

        return torch.default_generator


def _kind(noise: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return noise.shape, noise.dtype, noise.device


class CoupledDraws:
    """Draws that a drafter can foresee: token n of a text is the best of `probs / noise(n)`, by the seed's noise.

    The text has the target's distribution and depends on target and seed, never on the drafter; a drafter that uses
    the same noise guesses better. Source: arXiv 2506.05632, Gumbel coupling in the form of an exponential race.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.num_drawn = 0

    @classmethod
    def from_global_stream(cls) -> "CoupledDraws":
        """Seeded by one draw from torch's global stream, so that the next call writes another text."""
        return cls(int(torch.randint(2**62, (1,))))

    def noise(self, number: int, vocab_size: int) -> Float[Tensor, " vocab"]:
        """Exponential noise of the token with this number."""
        generator = torch.Generator().manual_seed(_hashed(f"{self.seed} {number}".encode()))
        return torch.empty(vocab_size, dtype=torch.float, device="cpu").exponential_(generator=generator)

    def noise_ahead(self, vocab_size: int, device: torch.device) -> Callable[[int], Float[Tensor, " vocab"]]:
        """Noise by depth in the next draft; 1 is the next token."""
        return lambda depth: self.noise(self.num_drawn + depth - 1, vocab_size).to(device)

    def fill_ahead(
        self, noise: Float[Tensor, "draws vocab"], start: tuple[int, int] | None = None
    ) -> list[tuple[int, int]]:
        """Write the noise of the next draws, or of those after `start`; returns the state after each."""
        first = self.num_drawn if start is None else start[1]
        for number, row in enumerate(noise, start=first):
            row.copy_(self.noise(number, noise.shape[1]))
        return [(self.seed, first + index + 1) for index in range(len(noise))]

    def get_state(self, device: torch.device) -> tuple[int, int]:  # noqa: ARG002  others draw there
        """The seed, and how many tokens were drawn."""
        return self.seed, self.num_drawn

    def set_state(self, state: tuple[int, int], device: torch.device) -> None:  # noqa: ARG002
        """Go on as the draws with this seed do after so many tokens."""
        self.seed, self.num_drawn = state

    def is_at(self, state: tuple[int, int], device: torch.device) -> bool:
        """Whether the draws stand in a state."""
        return self.get_state(device) == state

    def categorical(self, probs: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
        """One index for the only row of `probs`."""
        noise = self.noise(self.num_drawn, probs.shape[-1])[None].to(probs)
        self.num_drawn += 1
        return draw_distinct(probs, noise, 1).squeeze(1)


# Draws whose noise a drafter may see in advance, so that it guesses their choice: `argmax(probs / noise)`.
ForeseeableDraws: TypeAlias = GeneratorDraws | CoupledDraws


def draw_distinct(
    probs: Float[Tensor, "rows vocab"], noise: Float[Tensor, "rows vocab"], num: int
) -> Int[Tensor, "rows {num}"]:
    """`num` indices of each row, as if drawn one after the other without replacement; `noise` is exponential."""
    return (probs / noise).topk(num, dim=-1).indices


def draw_indices(num_choices: int, num: int, generator: torch.Generator) -> Int[Tensor, " {num}"]:
    """`num` indices below `num_choices`, each as likely as any, with replacement."""
    return torch.randint(num_choices, (num,), generator=generator, device=generator.device)


def multinomial_noise(probs: Float[Tensor, "*rows vocab"], generator: torch.Generator) -> Float[Tensor, "*rows vocab"]:
    """The noise behind `torch.multinomial(probs, 1, generator=generator)`, which takes the best of `probs / noise`."""
    return torch.empty_like(probs).exponential_(generator=generator)


def choose(scores: Float[Tensor, "rows vocab"], do_sample: bool, draws: Draws) -> Int[Tensor, " rows"]:
    """The next token of each row: drawn from the softmax of processed `scores`, or the best one."""
    return draws.categorical(torch.softmax(scores, dim=-1)) if do_sample else scores.argmax(dim=-1)


def choose_by_noise(
    scores: Float[Tensor, "rows vocab"], noise: Float[Tensor, "rows vocab"] | None
) -> tuple[Int[Tensor, "rows 1"], Bool[Tensor, "rows 1"]]:
    """The next token of each row, and whether it may be drawn; the host is asked for nothing.

    The token is what [`choose`] draws with the `noise` of `fill_ahead`, or the best one without it. It may be drawn
    if the best score is finite: where it is not, `choose` fails.
    """
    if noise is None:
        return scores.argmax(dim=-1, keepdim=True), torch.ones_like(scores[:, :1], dtype=torch.bool)

    probs = torch.softmax(scores, dim=-1)
    return (probs / noise).argmax(dim=-1, keepdim=True), scores.amax(dim=-1, keepdim=True).abs() < torch.inf


def row_seeds(num_rows: int) -> list[int]:
    """A seed for each row of a batch, all from one draw of torch's global stream."""
    base = int(torch.randint(2**62, (1,)))
    return [_hashed(f"{base} {row}".encode()) for row in range(num_rows)]


def private_generator() -> torch.Generator:
    """A generator for drafts, seeded from the present state of the global stream, which stays untouched."""
    return torch.Generator().manual_seed(_hashed(torch.get_rng_state().numpy().tobytes()))


def _hashed(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1
