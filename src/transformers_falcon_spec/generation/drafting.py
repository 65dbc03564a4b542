"""The interface between the decoding loop and every drafter: budgets, drafts, and the text that is committed.

A generator object serves one call of `generate` and owns all state of the drafter in it: cache, pairs not yet read,
private `rng`. The drafter module is read-only meanwhile, so that threads share it. The loop owns the target, every
draw that decides text, and keeps the drafter in eval mode. A generator never sees padding, cache holes or the target's
cache, and leaves the global random state alone.

Pairs: reading token t[p], the target yields feature f[p], from which t[p+1] follows; so `commit` hands over pairs
(f[p], t[p+1]). Order: commit(prompt), then repeat [propose,] commit. A plain step commits without a proposal; `commit`
only stores, and `propose` catches up in one pass. A finished row has num_new 0 and depth 0, until `select_rows` lets
it leave; rows never move where a generator does not have that.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers.generation.candidate_generator import CandidateGenerator

from ..core.tree import DraftTree
from ..errors import DraftTreeError
from .modes import in_eval_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .options import SpeculationConfig

NO_DRAFTS = "No memory was left for drafting, so the target wrote the rest alone."


@runtime_checkable
class TargetView(Protocol):
    """The part of the target that a drafter may use. It calls modules and reads no weights, which may be quantised."""

    vocab_size: int
    feature_dim: int  # width of one pair's feature: sum over `feature_layers`

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings `[..., tokens, embed_dim]` of `[..., tokens]`."""
        ...

    def head(self, features: Tensor, is_scaled: bool = True, rows: nn.Module | None = None) -> Tensor:
        """Logits `[..., vocab]` in float32 of `[..., hidden]`, scaled and capped as the target does or left raw."""
        ...

    def head_rows(self, token_ids: Tensor) -> nn.Linear:
        """The rows of the head for these tokens `[tokens]`; logits that are made with them are those of them alone."""
        ...


@dataclass(frozen=True)
class Prices:
    """The cost of drafting in tokens: the tokens that decoding writes in the same time at its present speed."""

    nodes: Tensor  # [nodes] of reading n + 1 nodes and not the root alone
    passes: list[float]  # of pass p after p passes; the first is not asked about
    pass_yields: list[float]  # net tokens that pass p has added, for each token expected to be kept where it goes on
    weights: Tensor  # [depths] how often nodes of a depth are kept, over how often the drafter says
    width: int  # least nodes of a depth to consider, so that enough of them pay

    def pays(self, number: int, expected_tokens: float) -> bool:
        """Whether pass `number` is expected to pay, if so many of the nodes that it continues will be accepted."""
        yielded = self.pass_yields[min(number, len(self.pass_yields) - 1)]
        price = self.passes[min(number, len(self.passes) - 1)]
        return expected_tokens * yielded > price


@dataclass(frozen=True)
class DraftBudget:
    """The limits of one draft. The loop chooses them, and the generator keeps to them."""

    depths: tuple[int, ...]  # [rows] deepest node allowed before the end of text or context; 0 = draft nothing
    num_nodes: int  # most nodes per row, root and lookahead nodes included
    num_passes: int | None = None  # most drafter passes; None leaves it to the generator
    is_chain: bool = False  # the target cannot verify trees: at most one child per node
    # Of the target's draws: children are drawn at it, and `draft_probs` given; None: the likeliest tokens are taken.
    temperature: float | None = None
    # [vocab] by row and depth: children are the best of probabilities / noise, and no `draft_probs` are needed.
    noise: Callable[[int, int], Tensor] | None = None
    prices: Prices | None = None  # a drafter that can draft less does so where more does not pay

    @property
    def has_free_shape(self) -> bool:
        """Whether the shape of the tree may follow from what is likely: no drawn tokens need their probabilities."""
        return self.temperature is None or self.noise is not None


@dataclass(frozen=True)
class Draft:
    """A tree of tokens for each row, which the target will read. Node 0 is the newest token of the text."""

    token_ids: Tensor  # [rows, nodes] int64, target ids, on the drafter's device; siblings differ
    parents: Tensor  # [1 or rows, nodes] int64; -1 at the root and at filler nodes of shorter rows
    is_lookahead: Tensor | None = None  # [1 or rows, nodes] bool: read for the drafter, never text
    draft_probs: Tensor | None = None  # [rows, dists, vocab] drawn from, after processors; None: nothing was drawn
    dist_index: Tensor | None = None  # [1 or rows, nodes] which dist the children of a node were drawn from; -1 = leaf
    num_passes: int = 1  # drafter passes spent
    expected_by_depth: Tensor | None = None  # [depths] expected tokens, the root's first; where there are prices
    # By pass after the first: the expected tokens of the nodes that it continues, and those that it added.
    marginal_gains: tuple[tuple[float, float], ...] = ()
    max_depth: int | None = None  # of all rows, where it is known without asking the device
    is_text_alone: bool = False  # it repeats the text, and the drafter was not asked
    # Where its tensors are buffers in which later drafts will lie, too: the work that copies it, by where to.
    copies: dict[Any, Any] | None = None

    def check(self, roots: Tensor, name: str) -> None:
        """Refuse what is no tree below the newest tokens `roots` `[rows, 1]`, of which another text would come.

        The host waits for the device. `name` says who drafted it.

        Raises:
            [`DraftTreeError`]: it is none.
        """
        token_ids = self.token_ids
        parents = self.parents
        shape = list(token_ids.shape)
        if shape[:1] != [len(roots)] or list(parents.shape) not in (shape, [1, *shape[1:]]):
            raise DraftTreeError(
                f"A `Draft` must have `token_ids` [{len(roots)} rows, nodes], and `parents` as many or one row of "
                f"them, but what a `{name}` proposed has {shape} and {list(parents.shape)}."
            )

        nodes = torch.arange(shape[1], device=parents.device)
        is_tree = ((parents >= -1) & (parents < nodes)).all()
        if not (is_tree.to(roots.device) & token_ids[:, :1].to(roots.device).eq(roots).all()):
            raise DraftTreeError(
                "Node 0 of a `Draft` must be the newest token of the row, and each node must stand behind its parent, "
                f"which is -1 where it has none. But after the tokens {roots.flatten().tolist()}, a `{name}` "
                f"proposed rows of which the first is {token_ids[0].tolist()}, with the parents {parents[0].tolist()}."
            )

    @property
    def depth(self) -> int:
        """The depth of the deepest node."""
        if self.max_depth is not None:
            return self.max_depth
        return int(DraftTree(self.parents, self.parents).depths.max())


@dataclass(frozen=True)
class Committed:
    """The text so far, and the target's features of its newest tokens. The generator may keep the tensors."""

    sequence_ids: Tensor  # [rows, capacity] int64, all committed tokens, left-aligned, without padding
    lengths: tuple[int, ...]  # [rows] committed tokens, bonus included
    num_new: tuple[int, ...]  # [rows] newest of them; at first all but t[0] and a user's cached prefix
    features: Tensor | None  # [rows, max(num_new), feature_dim]: f[p] of each new t[p+1]; None without layers to read
    node_choices: Tensor | None = None  # [rows, nodes] best raw logit after each node read last; None unless wanted


@dataclass(frozen=True)
class Kept:
    """The newest tokens of a step in fixed shapes, as they lie on the device; each row's stand at its beginning."""

    token_ids: Tensor  # [rows, most] int64, the bonus token included
    features: Tensor | None  # [rows, most, feature_dim]: f[p] of each new t[p+1]
    num: Tensor  # [rows, 1] int64, how many of them count
    num_new: tuple[int, ...]  # [rows] the same, as the host knows it
    new_ids: tuple[tuple[int, ...], ...] = ()  # [rows] the tokens that count, as the host knows them


class TreeCandidateGenerator(CandidateGenerator, ABC):
    """Base of all drafters' generators: subclasses write `commit` and `propose`. Transformers' loop can use them."""

    requires_model_outputs = True
    model_kwargs_overrides: ClassVar[dict[str, Any]] = {"output_hidden_states": True}  # same meaning in every version
    fixed: Any = None  # the buffers of drafts in fixed shapes, of a [`FixedGenerator`] after `enter_fixed`
    wants_node_choices: bool = False  # whether `commit` gets `node_choices`; never from the stock loop

    def __init__(self, drafter: Any, target: TargetView, max_length: int, rng: torch.Generator) -> None:
        self.drafter = drafter
        self.target = target
        self.max_length = max_length
        self.rng = rng
        self._has_prompt = False  # of the stock loop

    @abstractmethod
    def commit(self, committed: Committed) -> None:
        """Store new text and features. Nothing is computed or drawn here, and nobody waits for the device."""

    @abstractmethod
    def propose(self, budget: DraftBudget) -> Draft | None:
        """Draft a tree for each row within `budget`. None means that the target should write the next token alone."""

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone, in this order, after a commit; budgets and commits then count only these.

        A subclass may leave it out: `why_rows_stay` then says so, and nobody asks for it.
        """

    @property
    def why_rows_stay(self) -> str | None:
        """Why a row that has ended cannot leave, in words; None if it can."""
        if type(self).select_rows is TreeCandidateGenerator.select_rows:
            return f"a `{type(self).__name__}` has no `select_rows`"
        return None

    def why_not_fixed(self, budget: DraftBudget) -> str | None:  # noqa: ARG002  it decides in subclasses
        """Why drafts within such budgets cannot be made in fixed shapes, in words; None if they can."""
        return f"a `{type(self).__name__}` drafts in shapes that follow the text"

    def get_candidates(  # type: ignore[override]  # generators of Transformers return None for the logits, too
        self,
        input_ids: Tensor,
        model_kwargs: dict[str, Any] | None = None,  # noqa: ARG002  the stock loop passes it
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Candidates `[1, len + drafted]` for Transformers' own loop: one row, a chain, the same text when greedy.

        The logits are None: that loop then compares tokens and never rejects by ratio.
        """
        if is_first_iteration:  # the target reads the prompt first
            return input_ids, None
        states = model_outputs.hidden_states
        num_new = int(n_last_matches) + 1 if self._has_prompt else states[-1].shape[1]
        rows = [states[layer][:, :num_new] for layer in self.drafter.feature_layers]
        features = torch.cat(rows, dim=-1) if rows else None
        self._has_prompt = True
        self.commit(Committed(input_ids, (input_ids.shape[1],), (num_new,), features))
        depth = max(self.max_length - input_ids.shape[1] - 1, 0)
        with in_eval_mode(self.drafter):
            draft = self.propose(DraftBudget((depth,), depth + 1, is_chain=True)) if depth else None
        return (input_ids, None) if draft is None else (torch.cat([input_ids, draft.token_ids[:, 1:]], dim=-1), None)

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Do nothing: `commit` has learned the same from `num_new`."""


class FixedGenerator(TreeCandidateGenerator):
    """A generator that can go on in fixed shapes, if `why_not_fixed` names no reason against it."""

    backend: str | None = None  # with which `torch.compile` compiles the drafter there, if it does
    num_cheap_nodes: int = 0  # of each row, which the target reads there for little more than the root alone

    @property
    @abstractmethod
    def has_unread(self) -> bool:
        """Whether there is new text that the drafter has not read."""

    @abstractmethod
    def enter_fixed(self, num_slots: int, most_kept: int, buffers: Any = None) -> Any:
        """Go on in fixed shapes: `propose` then writes drafts to the same tensors in every step and asks for no value.

        Call it when the prompt, or other text since the last proposal, is committed. There is room for `num_slots`
        tokens, and for more where the text gets longer; a step usually keeps `most_kept` tokens of a row at most.
        Returns the buffers; a later call with the same drafter and target, neither of them changed, may hand them in
        again, and goes on in them where they fit.
        """

    @abstractmethod
    def commit_kept(self, kept: Kept) -> None:
        """Store new text and features that lie on the device, after `enter_fixed`; what waits too long is read."""


class NoDrafts(TreeCandidateGenerator):
    """Drafts nothing and keeps nothing, in place of a generator that has no memory left."""

    def commit(self, committed: Committed) -> None:
        """Forget it."""

    def propose(self, budget: DraftBudget) -> None:
        """Nothing."""

    def select_rows(self, rows: Sequence[int]) -> None:
        """Nothing is kept of any row."""


class Drafter(Protocol):
    """What the loop needs of a drafter model."""

    # hidden states that it reads: 0 the embeddings, i the output of layer i, -1 the head's input
    feature_layers: tuple[int, ...]
    generation_config: "SpeculationConfig"

    def check_target(self, model: "PreTrainedModel") -> None:
        """Raise an error if the drafter was not made for this target."""
        ...

    def candidate_generator(self, target: TargetView, max_length: int, rng: torch.Generator) -> TreeCandidateGenerator:
        """Make the object that drafts during one call."""
        ...
