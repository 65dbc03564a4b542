"""Ways to draft with a diffusion drafter that benchmarks hold against each other: one factor at a time around the paper's path search."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from transformers_falcon_spec import DiffusionDrafter, SpeculationConfig
from transformers_falcon_spec.drafters.diffuspec import NgramProxy
from transformers_falcon_spec.evaluation.methods import with_options
from transformers_falcon_spec.training.conversations import read_conversations

METHOD, CPS, BOTH = "method", "CPS", "CPS and adaptive length"
ADAPTIVE, NEITHER = "adaptive length", "neither"
NUM_TREE_NODES = 16
TREE = f"tree {NUM_TREE_NODES} nodes"
CONTEXT, FITTED, NONE = "running context", "fitted text", "none"
Proxies = Mapping[str, NgramProxy | None]


@dataclass(frozen=True)
class Variant:
    """One way to draft; what is not said is as in `CPS`: the paper's search, drafts of a block, a fitted proxy that counts on.

    Args:
        factor (`str`): What differs.
        value (`str`): How.
        fields (`dict`): Fields of [`DiffusionConfig`].
        proxy (`str`): What the proxy has read beside the running context.
        num_tree_nodes (`int`): Nodes of a tree, root included.
        verifier (`str`): The rule by which drafts are accepted when sampling.
    """

    factor: str
    value: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    proxy: str = FITTED
    num_tree_nodes: int = NUM_TREE_NODES
    verifier: str = "token_matching"

    @property
    def name(self) -> str:
        """What differs, and how."""
        return self.value if self.factor == METHOD else f"{self.factor} {self.value}"

    def of(self, drafter: DiffusionDrafter, proxies: Proxies, tune: bool = False) -> DiffusionDrafter:
        """The drafter of the same weights that drafts so."""
        options = SpeculationConfig(tune=tune, num_tree_nodes=self.num_tree_nodes, verifier=self.verifier)
        variant: DiffusionDrafter = with_options(
            drafter, options, **{"search": "cps", "draft_length": "fixed", **self.fields}
        )
        variant.proxy = proxies[self.proxy]
        variant.config.check()
        return variant


# For sampling alone: when greedy these are the best tokens of all positions, as with neither.
MARGINAL = Variant(METHOD, "drawn marginals", {"search": "marginal"}, verifier="recursive_rejection")


def variants_of(drafter: DiffusionDrafter) -> list[Variant]:
    """All variants of a drafter, those of the paper's ablation first."""
    return [*_methods(drafter.block_size), *_factors(drafter.block_size), *_cache_variants(drafter.config.attention)]


def _methods(block_size: int) -> Iterator[Variant]:
    """Path search and adaptive length, both, one or neither. The paper's lengths do not fit a block; half of one is the shortest here."""
    adapts = {"draft_length": "adaptive", "min_draft_tokens": -(-block_size // 2), "growth": -(-block_size // 2)}
    yield Variant(METHOD, BOTH, adapts)
    yield Variant(METHOD, CPS)
    yield Variant(METHOD, ADAPTIVE, {**adapts, "search": "argmax"})
    yield Variant(METHOD, NEITHER, {"search": "argmax"})


def _factors(block_size: int) -> Iterator[Variant]:
    """One option at a time."""
    options: dict[str, tuple[str, tuple[Any, ...]]] = {
        "beam width B": ("beam_width", (1, 2, 5, 8)),
        "mass tau": ("mass", (0.5, 0.95, 1.0)),
        "candidates M_max": ("max_candidates", (2, 5, 30)),
        "model's weight lambda": ("model_weight", (0.25, 0.75, 0.9)),
        "fixed length k": ("num_draft_tokens", tuple(range(2, block_size, 2))),
        "passes S": ("num_steps", (2, 4, 8)),
    }
    for factor, (name, values) in options.items():
        yield from (Variant(factor, f"{value}", {name: value}) for value in values)
    yield from (Variant("proxy", proxy, proxy=proxy) for proxy in (NONE, CONTEXT))
    for share in (0.2, 0.45):
        yield Variant("confidence stop", f"{share}", {"draft_length": "confidence", "least_confidence": share})
    for num in (8, NUM_TREE_NODES, 32):
        yield Variant("tree", f"{num} nodes", {"search": "tree"}, num_tree_nodes=num)
    yield Variant("tree", f"{NUM_TREE_NODES} nodes, no proxy", {"search": "tree"}, NONE)


def _cache_variants(attention: str) -> Iterator[Variant]:
    """With full attention, keys and values that several rounds share."""
    if attention == "full":
        yield from (Variant("rounds that share a cache", f"{num}", {"cache_rounds": num}) for num in (2, 4, 8))


def proxies_of(texts: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int, limit: int | None = None) -> Proxies:
    """No proxy, one that knows the running context alone, and one fitted to conversations as well."""
    rows: Any = read_conversations(texts, limit).rows
    token_ids = [tokenizer.apply_chat_template(row, return_dict=True)["input_ids"] for row in rows]
    return {
        NONE: None,
        CONTEXT: NgramProxy.fit([], 3, vocab_size),
        FITTED: NgramProxy.fit(token_ids, 3, vocab_size),
    }
