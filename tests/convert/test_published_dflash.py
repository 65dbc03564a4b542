"""Published DFlash drafters, converted: the numbers of the published forward, and the target's own text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import runs
from tests.batches import batch_and_drafted
from tests.drafters.texts import paths
from tests.growing import grown_paths
from tests.pairs import in_turn
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec import DFlashDrafter, SpeculationConfig, load_drafter
from transformers_falcon_spec.convert import Format, convert_checkpoint, detect, formats
from transformers_falcon_spec.errors import CheckpointError
from transformers_falcon_spec.generation.drafting import Committed, DraftBudget
from transformers_falcon_spec.generation.target import Target
from transformers_falcon_spec.provenance import portable

from . import foreign_dflash as foreign
from . import reference_dflash
from .drafting import random_ids
from .foreign import written

LENGTH = 24
ENDS = (LENGTH - 5, LENGTH - 2, LENGTH - 1, LENGTH)
SLOTS = foreign.BLOCK - 1
TREE = {"parents": [-1, 0, 0, 1, 1, 2, 3, 6, 4], "ranks": [-1, 0, 3, 0, 1, 0, 2, 0, 1]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ALL_SLIDING = {**foreign.SLIDING, "layer_types": ["sliding_attention"] * 2}
VARIANTS: dict[str, tuple[Format, foreign.Parts]] = {
    "plain": (formats.DFLASH, foreign.dflash()),
    "newer": (formats.DFLASH, foreign.newer()),
    "llama 3.1": (
        formats.DFLASH,
        foreign.dflash(rope_scaling={**LLAMA3, "original_max_position_embeddings": 16}),
    ),
    "a window": (formats.DFLASH, foreign.dflash(**foreign.SLIDING)),
    "a window that sees later tokens": (formats.DFLASH, foreign.dflash(**foreign.SLIDING, is_causal=False)),
    "the same, said deeper": (formats.DFLASH, foreign.dflash({"causal": False}, **ALL_SLIDING)),
    "no later tokens": (formats.DFLASH, foreign.dflash(is_causal=True)),
    "JetSpec": (formats.DFLASH, foreign.dflash({"causal_head": True})),
    "JetSpec without": (formats.DFLASH, foreign.dflash({"causal_head": False})),
    "scaled": (
        formats.DFLASH,
        foreign.dflash({"input_embedding_scale": 0.4, "output_multiplier": 3.0, "final_logit_softcapping": 5.0}),
    ),
    "speculators": (formats.DFLASH_SPECULATORS, foreign.speculators()),
    "speculators with a window": (
        formats.DFLASH_SPECULATORS,
        foreign.speculators(ALL_SLIDING, sliding_window_non_causal=True),
    ),
    "DFlash2": (formats.DFLASH2, foreign.dflash2(is_causal=False)),
    "DFlash2, scaled": (
        formats.DFLASH2,
        foreign.dflash2({"output_multiplier": 0.5, "final_logit_softcapping": 8.0}, **ALL_SLIDING, is_causal=False),
    ),
    "speculators at the root's slot": (
        formats.DFLASH_SPECULATORS,
        foreign.speculators(sample_from_anchor=True, block_size=SLOTS),
    ),
    "DSpark": (formats.DSPARK, foreign.dspark()),
    "DSpark, gated": (formats.DSPARK, foreign.dspark("gated")),
    "DSpark without scores": (formats.DSPARK, foreign.dspark(rank=0)),
    "DSpark of speculators": (formats.DSPARK_SPECULATORS, foreign.dspark_speculators()),
    "DSpark of speculators, gated, behind the root": (
        formats.DSPARK_SPECULATORS,
        foreign.dspark_speculators("gated", sample_from_anchor=False, block_size=foreign.BLOCK),
    ),
}
FORMS = ("plain", "a window", "speculators", "DFlash2, scaled", "DSpark, gated", "DSpark of speculators")
NEIGHBOURS = ("DFlash2", "DSpark", "DSpark, gated")


@pytest.fixture(autouse=True)
def own_assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))


def make_deep() -> Any:
    """The target of all these drafters, in double precision."""
    return make_target("llama", num_hidden_layers=foreign.TARGET_LAYERS).double()


def loaded(variant: str, target: Any, folder: Path) -> Any:
    """A drafter of a folder of that form."""
    return load_drafter(written(folder / "source", *VARIANTS[variant][1], "model.safetensors"), target)


class Reference:
    """The published drafter behind a text of random tokens and features."""

    def __init__(self, variant: str, target: Any, length: int = LENGTH) -> None:
        config, weights = VARIANTS[variant][1]
        inner = config.get("transformer_layer_config") or config.get("dflash_config") or {}
        self.config = {**config, **inner}
        self.weights = {name: value.double() for name, value in weights.items()}
        self.ids = random_ids(length)
        draws = torch.Generator().manual_seed(1)
        width = len(foreign.READ) * config.get("hidden_size", foreign.HIDDEN)
        self.features = torch.randn(length - 1, width, generator=draws).double()
        block = [int(self.ids[-1]), *[foreign.MASK] * (self.config["block_size"] - 1)]
        with torch.no_grad():
            embeds = target.get_input_embeddings().weight[block]
            self.states = reference_dflash.states(self.weights, self.config, embeds, self.features)
            self.logits = reference_dflash.logits(self.config, self.states, target.lm_head.weight)

    @property
    def chain(self) -> list[int]:
        """What it drafts when it is greedy."""
        root = int(self.ids[-1])
        return reference_dflash.drafted(self.weights, self.config, self.states, self.logits, root)

    def probs(self, path: tuple[int, ...], _offset: int) -> list[float]:
        """The probability of each token after a path of drafted ones."""
        scores = torch.full_like(self.logits[0], -torch.inf)
        root = (int(self.ids[-1]), *path)
        found = reference_dflash.after(self.weights, self.config, self.states, self.logits, root)
        scores[list(found)] = torch.tensor(list(found.values()), dtype=scores.dtype)
        return scores.softmax(dim=-1).tolist()

    def commit_to(self, generator: Any, budget: DraftBudget) -> None:
        """Commit the text in several parts, with drafts between them."""
        starts = [0, *(end - 1 for end in ENDS[:-1])]
        for start, end in zip(starts, ENDS, strict=True):
            ids, features = self.ids[None, :end], self.features[None, start : end - 1]
            generator.commit(Committed(ids, (end,), (end - 1 - start,), features))
            if end < len(self.ids):
                generator.propose(budget)


def start(drafter: Any, target: Any) -> Any:
    """A generator of drafts for `target`."""
    return drafter.candidate_generator(Target(target, drafter.feature_layers), 10**6, torch.Generator())


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_at_the_masks_are_those_of_the_published_forward(variant: str, tmp_path: Path) -> None:
    target = make_deep()
    drafter, reference = loaded(variant, target, tmp_path), Reference(variant, target)
    generator = start(drafter, target)
    reference.commit_to(generator, DraftBudget((SLOTS,), SLOTS + 1, is_chain=True))

    generator.text.read(generator.read_pairs)
    found = generator.draft_logits(generator.text.first)[0, 0]

    is_candidate = found.isfinite()
    expected: Tensor = reference.logits.float()
    torch.testing.assert_close(found[is_candidate], expected[is_candidate], atol=1e-5, rtol=1e-5)
    top_k = drafter.config.selector_top_k
    assert is_candidate.sum(-1).tolist() == [top_k or target.config.vocab_size] * SLOTS
    assert drafter.feature_layers == (1, 3)
    assert detect(*VARIANTS[variant][1]) is VARIANTS[variant][0]


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_the_chain_is_the_one_that_public_software_drafts(variant: str, tmp_path: Path) -> None:
    target = make_deep()
    drafter, reference = loaded(variant, target, tmp_path), Reference(variant, target)
    generator, budget = start(drafter, target), DraftBudget((SLOTS,), SLOTS + 1, is_chain=True)
    reference.commit_to(generator, budget)

    draft = generator.propose(budget)

    assert draft.token_ids[0, 1:].tolist() == reference.chain
    assert draft.num_passes == 1


@pytest.mark.parametrize("variant", NEIGHBOURS)
@torch.no_grad()
def test_trees_grow_by_the_probabilities_after_the_token_before(variant: str, tmp_path: Path) -> None:
    target = make_deep()
    drafter, reference = loaded(variant, target, tmp_path), Reference(variant, target)
    drafter.generation_config = SpeculationConfig(tree_top_k=4, num_tree_nodes=14)
    generator, budget = start(drafter, target), DraftBudget((SLOTS,), 512)
    reference.commit_to(generator, budget)

    found = paths(generator.propose(budget))

    assert set(found) == set(grown_paths(reference.probs, SLOTS, 4, 14, SLOTS))
    firsts = {path[1]: path[0] for path in found if len(path) > 1}
    assert len(set(firsts.values())) > 1  # else no path shows that the token before matters


@pytest.mark.parametrize(("variant", "mode"), in_turn(FORMS, ({"do_sample": False}, runs.SAMPLING)))
def test_the_text_is_the_targets_own_with_chains_and_trees(variant: str, mode: dict[str, Any], tmp_path: Path) -> None:
    target = make_deep()
    drafter = loaded(variant, target, tmp_path)

    runs.assert_texts_of_every_shape(target, drafter, TREE, **mode)


@pytest.mark.parametrize("variant", FORMS)
def test_rows_of_a_batch_are_those_of_a_plain_one(variant: str, tmp_path: Path) -> None:
    target = make_deep()
    drafter = loaded(variant, target, tmp_path)

    pair = batch_and_drafted(target, drafter)

    pair.assert_equal()
    assert pair.stats.num_drafted > 0


@pytest.mark.parametrize("variant", ["DFlash2", "DSpark, gated"])
@pytest.mark.parametrize("verifier", ["recursive_rejection", "gumbel"])
def test_verifiers_of_drawn_drafts_take_those_after_the_token_before(
    verifier: str, variant: str, tmp_path: Path
) -> None:
    target = make_deep()
    drafter = loaded(variant, target, tmp_path)
    drafter.generation_config = SpeculationConfig(verifier=verifier)

    out = runs.drafted(target, drafter, make_prompt(9), do_sample=True, temperature=0.8)

    assert out.sequences.shape == (1, 33)
    assert out.speculation.num_drafted > 0


@pytest.mark.parametrize("variant", FORMS)
def test_a_folder_becomes_a_drafter_that_loads_without_the_target(variant: str, tmp_path: Path) -> None:
    target = make_target("llama", num_hidden_layers=foreign.TARGET_LAYERS)
    target.save_pretrained(tmp_path / "target")
    kind, (config, weights) = VARIANTS[variant]
    source = written(tmp_path / "source", config, weights, "model.safetensors")

    assert convert_checkpoint(source, tmp_path / "own", str(tmp_path / "target")) is kind
    drafter = DFlashDrafter.from_pretrained(tmp_path / "own").eval()

    own = drafter.state_dict()
    assert own["encoder.fc.weight"].equal(weights["fc.weight"])
    assert own["encoder.output_norm_enc.weight"].equal(weights["hidden_norm.weight"])
    assert all(own[name].equal(weights[name]) for name in own if name in weights)
    kept = json.loads((tmp_path / "own" / "conversion.json").read_text())
    dropped = sorted(name for name in weights if name.startswith(("confidence_head", "embed_tokens", "lm_head")))
    assert (kept["format"], kept["dropped_weights"]) == (kind.name, dropped)
    assert len(own) == len(weights) - len(dropped)
    assert drafter.config.target_name_or_path == portable(tmp_path / "target")
    assert (drafter.is_tree_dynamic, drafter.block_size, drafter.num_nodes) == (True, SLOTS, 16)
    runs.both(target.double(), drafter.double()).assert_equal(is_kept=False)


@pytest.mark.parametrize(
    ("form", "changed"),
    [("speculators", None), ("speculators", "embed_tokens.weight"), ("DSpark", None), ("DSpark", "lm_head.weight")],
)
def test_copies_are_left_out_where_they_equal_the_targets_weights_alone(
    form: str, changed: str | None, tmp_path: Path
) -> None:
    target = make_target("llama", num_hidden_layers=foreign.TARGET_LAYERS)
    target.save_pretrained(tmp_path / "target")
    config, weights = foreign.speculators(copies_of=target) if form == "speculators" else foreign.dspark()
    if changed is not None:
        weights[changed][5] += 0.5
    source = written(tmp_path / "source", config, weights)

    with pytest.raises(CheckpointError, match=r"must know whether `embed_tokens\.weight` equals that of the target"):
        convert_checkpoint(source, tmp_path / "unknown")
    if changed is None:
        convert_checkpoint(source, tmp_path / "own", str(tmp_path / "target"))
        kept = json.loads((tmp_path / "own" / "conversion.json").read_text())
        assert kept["dropped_weights"][-2:] == ["embed_tokens.weight", "lm_head.weight"]
    else:
        with pytest.raises(CheckpointError, match=f"`{changed}` of .* differs from the target's"):
            convert_checkpoint(source, tmp_path / "own", str(tmp_path / "target"))


def test_without_a_target_the_config_says_enough(tmp_path: Path) -> None:
    for variant, name in {"plain": None, "speculators": "someone/a-target"}.items():
        source = written(tmp_path / variant, *VARIANTS[variant][1])

        convert_checkpoint(source, tmp_path / f"own-{variant}")

        config = DFlashDrafter.from_pretrained(tmp_path / f"own-{variant}").config
        assert (config.vocab_size, config.target_name_or_path) == (97, name)
        assert config.target_layer_ids == foreign.READ


def test_windows_and_who_sees_whom_are_those_of_the_config(tmp_path: Path) -> None:
    target = make_deep()
    found = {
        variant: loaded(variant, target, tmp_path / str(number)).config
        for number, variant in enumerate(name for name in VARIANTS if "token" in name or "window" in name)
    }

    causal = {variant: config.causal_layer_types for variant, config in found.items()}
    assert causal == {
        "a window": ["sliding_attention"],
        "a window that sees later tokens": None,
        "no later tokens": ["full_attention"],
        "speculators with a window": None,
    }
    assert {config.sliding_window for name, config in found.items() if "window" in name} == {5}
