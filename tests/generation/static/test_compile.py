"""The compiled forward reads as the eager one does, is compiled once for a shape, and holds no model."""

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
from tests.every_drafter import every_drafter
from tests.tiny import in_double, make_target
from transformers_falcon_spec.core.masks import additive, slot_mask
from transformers_falcon_spec.core.tree import DraftTree
from transformers_falcon_spec.generation.feature_hooks import FeatureHooks
from transformers_falcon_spec.generation.model_parts import decoder_of, layer_kinds, masks_by_kind
from transformers_falcon_spec.generation.static import target as static_target
from transformers_falcon_spec.generation.static.compile import CompiledForward, compiled_forward
from transformers_falcon_spec.generation.static.slot_cache import SlotCache
from transformers_falcon_spec.generation.tree_attention import tree_attention

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

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.config = model, model.config.get_text_config(decoder=True)
        self.cache = SlotCache(self.config.num_hidden_layers, 2, 64, torch.device("cpu"))
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
            "past_key_values": self.cache,
            "use_cache": True,
        }

    def eager(self, parents: list[int], seed: int, num_shown: int = 32) -> tuple[Tensor, Tensor | None]:
        with tree_attention(self.model), self.hooks.active():
            logits = self.model(**self.inputs(parents, seed, num_shown)).logits
            return logits, self.hooks.take(len(parents))

    def compiled(
        self, parents: list[int], seed: int, num_shown: int = 32, layers: tuple[int, ...] = LAYERS
    ) -> tuple[Tensor, Tensor | None]:
        forward = compiled_forward(self.model, "aot_eager")
        with tree_attention(self.model), self.hooks.active(), self.hooks.paused():
            return forward(self.model, layers, self.inputs(parents, seed, num_shown))


@pytest.mark.parametrize(
    "family",
    [
        "llama",
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
        torch.testing.assert_close(mine.keys, theirs.keys)
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

    first.compiled(CHAIN, seed=4, num_shown=64)
    assert _num_compiled() == 3


@pytest.mark.families
def test_more_shapes_are_compiled_than_dynamo_allows_by_itself() -> None:
    reader = Reader(make_target(num_hidden_layers=2))

    with torch._dynamo.config.patch(cache_size_limit=1):
        for size in (2, 3, 4):
            reader.compiled([-1, *range(size - 1)], seed=5)

    assert _num_compiled() == 3


@pytest.mark.families
def test_a_reader_without_features_gets_none() -> None:
    reader = Reader(make_target(num_hidden_layers=2))

    logits, features = reader.compiled(TREE, seed=6, layers=())

    torch.testing.assert_close(logits, reader.eager(TREE, seed=6)[0])
    assert features is None


@pytest.mark.families
def test_what_is_compiled_holds_no_model() -> None:
    reader = Reader(make_target(num_hidden_layers=2))
    reader.compiled(TREE, seed=7)
    model = weakref.ref(reader.model)

    del reader
    gc.collect()

    assert model() is None


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those that calls ask for; each gets one that needs no compiler."""
    asked: list[str] = []

    def quick(model: PreTrainedModel, backend: str) -> CompiledForward:
        asked.append(backend)
        return compiled_forward(model, "aot_eager")

    monkeypatch.setattr(static_target, "compiled_forward", quick)
    return asked


def _compiling(drafter: Any) -> Any:
    drafter.generation_config.step, drafter.generation_config.compile = "static", True
    drafter.generation_config.tune, drafter.generation_config.pack_weights = False, True
    return drafter


@pytest.mark.parametrize("family", ["llama", pytest.param("mixtral", marks=[pytest.mark.families, pytest.mark.slow])])
def test_the_text_of_compiled_steps_is_the_targets_own(family: str, backends: list[str]) -> None:
    target = in_double(make_target(family))
    drafter = _compiling(every_drafter("eagle-3", target))

    runs.both(target, drafter, max_new_tokens=12).assert_equal(is_kept=False)
    num_compiled = _num_compiled()
    pair = runs.both(target, drafter, max_new_tokens=12)

    pair.assert_equal(is_kept=False)
    assert not pair.stats.packed_bytes  # a compiler sees into no packed weight
    assert set(backends) == {"inductor"}
    assert _num_compiled() == num_compiled > 0
    if family == "llama":  # experts in double precision are a loop over what the host reads
        assert not counters["graph_break"]  # which hooks of the features would be


@pytest.mark.families
@pytest.mark.parametrize("options", [{"disable_compile": True}, {"max_new_tokens": 1}])
def test_nothing_is_compiled_where_it_must_not_or_need_not_be(options: dict[str, Any], backends: list[str]) -> None:
    target = in_double(make_target())

    runs.drafted(target, _compiling(every_drafter("falcon", target)), **{"max_new_tokens": 6, **options})

    assert not backends
