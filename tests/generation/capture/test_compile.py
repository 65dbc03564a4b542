"""Compiled targets read and compiled drafters draft as eager ones do, are compiled once for a shape, and nothing holds them."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from tests import runs
from tests.every_drafter import KINDS, every_drafter
from tests.tiny import in_double, make_target
from transformers_falcon_spec.core.masks import additive, slot_mask
from transformers_falcon_spec.core.tree import DraftTree
from transformers_falcon_spec.drafters.tree_drafting.proposing import PairGenerator
from transformers_falcon_spec.generation import plan
from transformers_falcon_spec.generation.adapters import unwrapped
from transformers_falcon_spec.generation.capture import compile as compile_file
from transformers_falcon_spec.generation.capture import target as target_file
from transformers_falcon_spec.generation.capture.compile import compiled_read
from transformers_falcon_spec.generation.drafting import Draft, DraftBudget
from transformers_falcon_spec.generation.feature_hooks import FeatureHooks
from transformers_falcon_spec.generation.model_parts import decoder_of, layer_kinds, masks_by_kind
from transformers_falcon_spec.generation.slot_cache import SlotCache
from transformers_falcon_spec.generation.tree_attention import tree_attention
from transformers_falcon_spec.transformers_versions import CACHE

pytestmark = pytest.mark.usefixtures("no_shape_checks")  # a compiler does not see into them
LAYERS = (0, 1, -1)
CHAIN, TREE, OTHER_TREE = [-1, 0, 1], [-1, 0, 0, 1], [-1, 0, 1, 1]


@pytest.fixture(autouse=True)
def no_counts() -> Iterator[None]:
    counters.clear()
    with torch.no_grad():
        yield


def _num_compiled() -> int:
    return counters["stats"]["unique_graphs"]


class Reader:
    """Two rows of 5 and 9 tokens in slots of a model's own, read with one tree after the other."""

    def __init__(self, model: PreTrainedModel, capacity: int = 64) -> None:
        self.model, self.config = model, model.config.get_text_config(decoder=True)
        self.cache = SlotCache(self.config.num_hidden_layers, 2, capacity, torch.device("cpu"))
        self.hooks = FeatureHooks(decoder_of(model), self.config.num_hidden_layers, LAYERS)
        self.eager([-1, *range(8)], seed=1)
        self.cache.lengths.copy_(torch.tensor([[5], [9]]))

    def inputs(self, parents: list[int], seed: int, num_shown: int) -> dict[str, Any]:
        num_nodes = len(parents)
        tree = DraftTree(*torch.tensor([[parents, parents], [parents, parents]]))
        self.cache.show(num_nodes, num_shown)
        masks = {}
        for kind in layer_kinds(self.config):
            limits = (kind.sliding_window, kind.chunk_size)
            allowed = slot_mask(tree.ancestor_mask, tree.depths, self.cache.lengths, num_shown, *limits)
            masks[kind.name] = additive(allowed, self.model.dtype)
        rng = torch.Generator().manual_seed(seed)
        return {
            "input_ids": torch.randint(3, 90, (2, num_nodes), generator=rng),
            "position_ids": self.cache.lengths + tree.depths,
            "attention_mask": masks_by_kind(self.config, masks),
            CACHE: self.cache,
            "use_cache": True,
        }

    def eager(self, parents: list[int], seed: int, num_shown: int = 32) -> tuple[Tensor, Tensor | None]:
        with tree_attention(self.model), self.hooks.active():
            logits = self.model(**self.inputs(parents, seed, num_shown)).logits
            return logits, self.hooks.take(len(parents))

    def compiled(
        self, parents: list[int], seed: int, num_shown: int = 32, layers: tuple[int, ...] = LAYERS
    ) -> tuple[Tensor, Tensor | None]:
        with tree_attention(self.model), self.hooks.active(), self.hooks.paused():
            return compiled_read(self.model, "aot_eager", layers, self.inputs(parents, seed, num_shown))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("llama", marks=pytest.mark.families),
        *(
            pytest.param(name, marks=[pytest.mark.families, pytest.mark.slow])
            for name in ("gemma3", "gpt2", "qwen3_moe", "gpt_oss")
        ),
    ],
)
def test_a_compiled_read_is_the_eager_one_with_its_features(family: str) -> None:
    model = make_target(family)
    eager, compiled = Reader(model), Reader(model)

    for parents, seed in ((TREE, 2), (OTHER_TREE, 3)):
        for found, expected in zip(compiled.compiled(parents, seed), eager.eager(parents, seed), strict=True):
            torch.testing.assert_close(found, expected)
    for mine, theirs in zip(compiled.cache.layers, eager.cache.layers, strict=True):
        torch.testing.assert_close(mine.held, theirs.held)
    assert _num_compiled() == 1
    assert not counters["graph_break"]


@pytest.mark.families
def test_a_shape_is_compiled_once_for_all_calls() -> None:
    model = make_target(num_hidden_layers=2)
    first, second = Reader(model), Reader(model)

    for reader in (first, second, first):
        for parents in (TREE, CHAIN, OTHER_TREE):
            reader.compiled(parents, seed=4)
    assert _num_compiled() == 2


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=[pytest.mark.families, pytest.mark.slow])])
def test_a_text_that_grows_is_compiled_once(family: str) -> None:
    model = make_target(family)
    eager, compiled = Reader(model, 512), Reader(model, 512)

    for num_shown, capacity in ((256, 512), (512, 512), (512, 1024), (1024, 1024)):
        if capacity > compiled.cache.capacity:
            eager.cache.grow(capacity)
            compiled.cache.grow(capacity)
        found, expected = compiled.compiled(TREE, num_shown, num_shown), eager.eager(TREE, num_shown, num_shown)
        torch.testing.assert_close(found, expected)

    assert _num_compiled() == 1


@pytest.mark.families
def test_more_shapes_are_compiled_than_dynamo_allows_by_itself() -> None:
    reader = Reader(make_target(num_hidden_layers=2))

    with torch._dynamo.config.patch(cache_size_limit=1):
        for parents in (TREE, CHAIN):
            reader.compiled(parents, seed=5)

    assert _num_compiled() == 2


@pytest.mark.families
def test_without_features_logits_alone_are_compiled_and_nothing_holds_the_model() -> None:
    reader = Reader(make_target(num_hidden_layers=2))

    logits, features = reader.compiled(TREE, seed=6, layers=())

    torch.testing.assert_close(logits, reader.eager(TREE, seed=6)[0])
    assert features is None
    model = weakref.ref(reader.model)
    del reader
    gc.collect()

    assert model() is None


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that compile take a backend that needs no compiler of C++."""
    monkeypatch.setattr(plan, "BACKEND", "aot_eager")


def _static(drafter: Any, *, is_compiled: bool) -> Any:
    options = drafter.generation_config
    options.capture, options.compile, options.tune, options.pack_weights = True, is_compiled, False, True
    return drafter


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """Tokens and parents of every draft in fixed shapes."""
    seen: list[list[list[int]]] = []
    propose = PairGenerator.propose_tree

    def noted(self: PairGenerator, budget: DraftBudget) -> Draft | None:
        draft = propose(self, budget)
        seen.append([] if draft is None else [*draft.token_ids.tolist(), *draft.parents.tolist()])
        return draft

    monkeypatch.setattr(PairGenerator, "propose_tree", noted)
    return seen


SLOW = [pytest.mark.families, pytest.mark.slow]
NOT_COMPILED = {"lookahead", "layers in parallel", "diffusion", "diffusion, trees"}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "kind",
    [
        "medusa",
        pytest.param("eagle-3", marks=pytest.mark.families),
        *(pytest.param(kind, marks=SLOW) for kind in KINDS if kind not in {"medusa", "eagle-3"} | NOT_COMPILED),
    ],
)
def test_a_compiled_drafter_drafts_as_the_eager_one(
    kind: str, drafts: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        target_file, "compiled_read", lambda model, _backend, *inputs: compile_file._read(model, *inputs)
    )
    target = in_double(make_target())
    drafter = every_drafter(kind, target)

    runs.drafted(target, _static(drafter, is_compiled=False), max_new_tokens=12)
    eager_drafts = [*drafts]
    assert _num_compiled() == 0
    runs.both(target, _static(drafter, is_compiled=True), max_new_tokens=12).assert_equal(is_kept=False)
    num_compiled = _num_compiled()
    runs.both(target, drafter, max_new_tokens=12).assert_equal(is_kept=False)
    off = runs.both(target, drafter, max_new_tokens=12, disable_compile=True)

    off.assert_equal(is_kept=False)
    assert drafts == eager_drafts * 4
    assert _num_compiled() == num_compiled > 0
    assert not counters["graph_break"]
    del off
    held = weakref.ref(unwrapped(drafter))
    del drafter
    gc.collect()
    assert held() is None


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("family", [pytest.param(name, marks=SLOW) for name in ("llama", "mixtral")])
def test_the_text_of_compiled_steps_is_the_targets_own(family: str) -> None:
    target = in_double(make_target(family))
    drafter = _static(every_drafter("eagle-3", target), is_compiled=True)

    pair = runs.both(target, drafter, max_new_tokens=12)
    num_compiled = _num_compiled()
    again = runs.both(target, drafter, max_new_tokens=12)

    pair.assert_equal(is_kept=False)
    again.assert_equal(is_kept=False)
    assert not pair.stats.packed_bytes  # a compiler sees into no packed weight
    assert _num_compiled() == num_compiled > 0
    if family == "llama":  # experts in double precision are a loop over what the host reads
        assert not counters["graph_break"]  # which hooks of the features would be


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("options", [{"disable_compile": True}, {"max_new_tokens": 1}])
def test_nothing_is_compiled_where_it_must_not_or_need_not_be(options: dict[str, Any]) -> None:
    target = in_double(make_target())
    drafter = _static(every_drafter("falcon", target), is_compiled=True)

    runs.drafted(target, drafter, **{"max_new_tokens": 6, **options})

    assert not _num_compiled()


def test_a_step_that_is_not_captured_packs_weights_though_compiled_ones_are_asked_for() -> None:
    target = in_double(make_target()).float()
    drafter = _static(every_drafter("eagle-3", target), is_compiled=True)
    drafter.generation_config.capture = "auto"  # uncaptured on a CPU

    assert runs.both(target, drafter, max_new_tokens=6).stats.packed_bytes
    assert not _num_compiled()
